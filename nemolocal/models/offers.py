"""Which files a repository of the hub offers, planned before any of them is downloaded.

One header is read whole, that of the smallest file; the other quantizations hold the same tensors, so their
shapes are taken from it in proportion to their sizes, until one of them is chosen and its own header is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from nemolocal.config import Config
from nemolocal.errors import ModelNotFoundError
from nemolocal.models import hub, remote
from nemolocal.models.choice import Candidate
from nemolocal.models.hub import HubRepo, RemoteModel
from nemolocal.models.plans import Plan
from nemolocal.models.reference import HubRef

N_CONVERTERS_NAMED = 3


def plan(ref: HubRef, config: Config, decide: Callable[[Sequence[Candidate]], Plan]) -> Plan:
    """Let `decide` choose among the files that a reference means, until the shape of the chosen one is exact.

    Raises what asking the hub and deciding raise, ModelFileError when the file could not be loaded.
    """
    repo = hub.fetch_repo(ref.repo, config)
    models = usable(repo, ref, config)
    smallest = min(models, key=lambda model: (model.bytes, model.first))
    known = {smallest.first: remote.read_header(repo, smallest, config).shape}
    base = known[smallest.first]

    def candidate(model: RemoteModel) -> Candidate:
        shape = known.get(model.first)
        if shape is None:
            shape = remote.scaled(base, from_bytes=smallest.bytes, to_bytes=model.bytes)
        return Candidate(model.quant, model.first, model.bytes, shape, is_local=False)

    while True:
        found = decide([candidate(model) for model in models])
        if found.candidate.file in known:
            file = f"hf:{repo.id}:{found.candidate.file}"
            return replace(found, candidate=replace(found.candidate, file=file))
        chosen = next(model for model in models if model.first == found.candidate.file)
        known[chosen.first] = remote.read_header(repo, chosen, config).shape


def usable(repo: HubRepo, ref: HubRef, config: Config) -> list[RemoteModel]:
    """The models of a repository that a reference means and that are whole.

    Raises ModelNotFoundError where it has none, with repositories that have the same model as GGUF.
    """
    if ref.quant or ref.file:
        return [repo.choose(quant=ref.quant, file=ref.file)]
    models = [model for model in repo.chat_models if not model.missing]
    if not models:
        raise ModelNotFoundError(
            f"{repo.id} holds no GGUF files, which are what can be run here.", hint=_elsewhere(repo, config)
        )
    return models


def _elsewhere(repo: HubRepo, config: Config) -> str:
    """Repositories of those who convert models, found by the model's name."""
    name = repo.id.partition("/")[2]
    hits = (
        hit
        for hit in hub.search(name, config)
        if name.casefold() in hit.repo.casefold() and hit.repo != repo.id
    )
    found = [f"hf:{hit.repo}" for hit in islice(hits, N_CONVERTERS_NAMED)]
    return f"The same model as GGUF: {', '.join(found)}." if found else "Search for a conversion of it."
