"""Which files a repository of the hub offers, planned before any of them is downloaded.

Of each model in it one header is read whole, that of the smallest file; the other quantizations hold the same
tensors, so their shapes are taken from it in proportion to their sizes, until one of them is chosen and its
own header is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from nemolocal.config import Config
from nemolocal.errors import (
    HubError,
    ModelFileError,
    ModelNotFoundError,
    NemoLocalError,
    OfflineError,
    UsageError,
)
from nemolocal.models import hub, kept, reference, remote, repos
from nemolocal.models.choice import Candidate
from nemolocal.models.headers import Summary
from nemolocal.models.plans import Plan
from nemolocal.models.reference import HubRef
from nemolocal.models.remote import RemoteHeader
from nemolocal.models.repos import HubRepo, RemoteModel
from nemolocal.models.shape import ModelShape

N_MODELS_MOST = 8
"""A repository that holds more different models than this is not looked through; one has to be named."""
N_CONVERTERS_NAMED = 3
CONVERTERS = ("unsloth", "bartowski", "ggml-org", "lmstudio-community", "mradermacher", "Mungert")
"""Those whose conversions most people use; theirs are named before others'."""
_FORMATS = re.compile(r"-(?:BF16|FP16|FP8|NVFP4|MXFP4|HF|GGUF|GPTQ|AWQ|int4|int8)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Offer:
    """A model file of a repository and what is known of it. `is_exact` says that the shape comes from its own
    header, not from that of another quantization."""

    model: RemoteModel
    summary: Summary
    shape: ModelShape
    is_exact: bool


def look_up(name: str, config: Config) -> tuple[HubRepo, str]:
    """What a repository holds, and "" or a sentence which says that this is what it held the last time,
    since the hub cannot be asked.

    Raises HubError, and OfflineError where nothing is known of it.
    """
    try:
        found = hub.fetch_repo(name, config)
    except OfflineError as error:
        known = kept.repo(name, config)
        if known is None:
            raise
        return known[0], f"{error.message} This is what {name} held on {known[1]}."
    kept.keep_repo(found, config)
    return found, ""


def usable(repo: HubRepo, ref: HubRef, config: Config) -> list[RemoteModel]:
    """The models of a repository that a reference means and that are whole.

    Raises ModelNotFoundError where it has none, with repositories that have the same model as GGUF.
    """
    if ref.quant or ref.file:
        return [repo.choose(quant=ref.quant, file=ref.file)]
    models = [model for model in repo.chat_models if not model.missing]
    if models:
        return models
    if repo.chat_models:
        model = repo.chat_models[0]
        raise HubError(
            f"{repo.id} lacks a part of its only model: {model.missing[0]}.",
            hint="Choose another repository.",
        )
    if repo.pieces:
        repo.choose(quant=repo.pieces[0])  # raises, and says how to join them
    only = f", only {repos.named(repo.companions)}" if repo.companions else ", which are what can be run here"
    what = "GGUF models" if repo.companions else "GGUF files"
    raise ModelNotFoundError(f"{repo.id} holds no {what}{only}.", hint=_elsewhere(repo, config))


def all_of(repo: HubRepo, models: Sequence[RemoteModel], config: Config) -> list[Offer]:
    """What is known of these models of a repository, in their order; those whose header says that they cannot
    be loaded are left out.

    Raises ModelFileError when none can be loaded, UsageError when they are too many different models, and
    HubError and OfflineError when headers cannot be read.
    """
    alike = _alike(models)
    if len(alike) > N_MODELS_MOST:
        raise UsageError(
            f"{repo.id} holds {len(alike)} different models.",
            hint=f"Name one file: {' or '.join(repo.ref(group[0]) for group in alike[:3])}.",
        )

    def read(group: list[RemoteModel]) -> tuple[RemoteModel, RemoteHeader | ModelFileError]:
        smallest = min(group, key=lambda model: (model.bytes, model.first))
        try:
            return smallest, remote.read_header(repo, smallest, config)
        except ModelFileError as error:
            return smallest, error

    with ThreadPoolExecutor(N_MODELS_MOST) as pool:
        bases = list(pool.map(read, alike))
    found: dict[str, Offer] = {}
    for group, (smallest, header) in zip(alike, bases, strict=True):
        if isinstance(header, RemoteHeader):
            found |= {model.first: _offer(model, smallest, header) for model in group}
    if not found:
        raise next(header for _, header in bases if isinstance(header, ModelFileError))
    return [found[model.first] for model in models if model.first in found]


def _alike(models: Sequence[RemoteModel]) -> list[list[RemoteModel]]:
    """Quantizations of one model each, as far as the names tell."""
    groups: dict[str, list[RemoteModel]] = {}
    for model in models:
        groups.setdefault(reference.name_of(model.first), []).append(model)
    return list(groups.values())


def _offer(model: RemoteModel, smallest: RemoteModel, header: RemoteHeader) -> Offer:
    if model is smallest:
        return Offer(model, header.summary, header.shape, is_exact=True)
    shape = remote.scaled(header.shape, from_bytes=smallest.bytes, to_bytes=model.bytes)
    return Offer(model, replace(header.summary, quant=model.quant), shape, is_exact=False)


def candidates(ref: HubRef, config: Config) -> list[Candidate]:
    """All files that a reference means, for a plan to choose among; each `file` is the reference that means
    it alone.

    Raises what `look_up`, `usable` and `all_of` raise.
    """
    repo, _ = look_up(ref.repo, config)
    return [_candidate(repo, offer) for offer in all_of(repo, usable(repo, ref, config), config)]


def _candidate(repo: HubRepo, offer: Offer) -> Candidate:
    model = offer.model
    file = f"hf:{repo.id}:{model.first}"
    return Candidate(model.quant or offer.summary.quant, file, model.bytes, offer.shape, is_local=False)


def plan(ref: HubRef, config: Config, decide: Callable[[Sequence[Candidate]], Plan]) -> Plan:
    """Let `decide` choose among the files that a reference means, until the shape of the chosen one is exact.

    Raises what asking the hub and deciding raise, ModelFileError when the file could not be loaded.
    """
    repo, note = look_up(ref.repo, config)
    found = plan_in(repo, ref, config, decide)
    return replace(found, reasons=(*found.reasons, note)) if note else found


def plan_in(
    repo: HubRepo, ref: HubRef, config: Config, decide: Callable[[Sequence[Candidate]], Plan]
) -> Plan:
    """The same for a repository that was looked up."""
    offers = {offer.model.first: offer for offer in all_of(repo, usable(repo, ref, config), config)}
    while True:
        found = decide([_candidate(repo, offer) for offer in offers.values()])
        chosen = offers[found.candidate.file.removeprefix(f"hf:{repo.id}:")]
        if chosen.is_exact:
            return found
        try:
            header = remote.read_header(repo, chosen.model, config)
        except ModelFileError:  # this quantization is of a kind that cannot be loaded; others may be
            del offers[chosen.model.first]
            if not offers:
                raise
        else:
            offers[chosen.model.first] = Offer(chosen.model, header.summary, header.shape, is_exact=True)


# The same model elsewhere -------------------------------------------------------------------------


def _elsewhere(repo: HubRepo, config: Config) -> str:
    """Repositories that have this model as GGUF: whose cards say so, or whose names."""
    found = [f"hf:{name}" for name in conversions(repo.id, config)[:N_CONVERTERS_NAMED]]
    return f"The same model as GGUF: {', '.join(found)}." if found else "Search for a conversion of it."


def conversions(name: str, config: Config) -> list[str]:
    """Repositories with GGUF files of the model in repository `name`, those of the usual converters first,
    then by downloads; none where the hub does not answer."""
    short = _plain_name(name)
    hits: list[hub.SearchHit] = []
    with suppress(NemoLocalError):
        hits += hub.search("", config, base=name)
    with suppress(NemoLocalError):
        hits += [hit for hit in hub.search(short, config) if _key(short) in _key(hit.repo.partition("/")[2])]
    unique = {hit.repo: hit for hit in hits if hit.repo != name}

    def place(repo: str) -> tuple[int, int]:
        owner = repo.partition("/")[0]
        return (CONVERTERS.index(owner) if owner in CONVERTERS else len(CONVERTERS)), -unique[
            repo
        ].n_downloads

    return sorted(unique, key=place)


def _plain_name(repo: str) -> str:
    """A model's name without its owner, and the format that its repository is in."""
    owner, _, name = repo.partition("/")
    while _FORMATS.search(name):
        name = _FORMATS.sub("", name)
    return re.sub(rf"^{re.escape(owner)}[-_]", "", name, flags=re.IGNORECASE)


def _key(name: str) -> str:
    return re.sub(r"[^0-9a-z]", "", name.lower())
