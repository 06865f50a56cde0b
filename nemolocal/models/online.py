"""Whether what the catalogue says is still so: asks the hub about every row."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from nemolocal.config import Config
from nemolocal.errors import HubError, ModelNotFoundError, NemoLocalError, OfflineError, UsageError
from nemolocal.models import catalog, hub, reference
from nemolocal.models.catalog import Catalog, CatalogFile, CatalogModel
from nemolocal.models.reference import NamedRef
from nemolocal.models.repos import HubRepo, RemoteModel

N_AT_ONCE = 8
N_NEARLY = 0.03
"""So far off may a size be that was computed, or published to two digits."""

State = Literal["ok", "gated", "elsewhere", "changed", "gone", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCheck:
    """One row of the catalogue, or one of a model's other repositories. "elsewhere" means that another of
    them has the file; `detail` says in one line what differs, or why nothing is known. `names`, `bytes` and
    `sha256` are what the hub has now, of all parts."""

    ref: str
    repo: str
    state: State
    detail: str = ""
    names: tuple[str, ...] = ()
    bytes: int = 0
    sha256: tuple[str, ...] = ()


def check(
    ref: str | None,
    config: Config,
    *,
    progress: Callable[[int, int], None] = lambda n_done, n_all: None,
    known: Catalog | None = None,
) -> tuple[RowCheck, ...]:
    """Ask about the model that `ref` names, or all (None). Files that come inside a package are left out.

    Raises OfflineError when the hub cannot be asked at all, ModelNotFoundError and UsageError for `ref`.
    """
    known = known or catalog.load()
    models = _meant(ref, known)
    hub.refuse_offline(config, what="Asking the hub about the catalogue")
    repos = sorted({repo for model in models for repo in _repos(model)})
    answers: dict[str, HubRepo | NemoLocalError] = {}
    asker = _Asker(config)
    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        for repo, answer in zip(repos, pool.map(asker.ask, repos), strict=True):
            answers[repo] = answer
            progress(len(answers), len(repos))
    if isinstance(asker.ended, OfflineError) and not any(isinstance(a, HubRepo) for a in answers.values()):
        raise asker.ended
    rows = [_check_row(model, row, answers) for model in models for row in model.files if not row.wheel]
    return (*rows, *_lost_repos(models, answers))


def _meant(ref: str | None, known: Catalog) -> tuple[CatalogModel, ...]:
    if ref is None:
        return known.models
    parsed = reference.parse(ref)
    if not isinstance(parsed, NamedRef):
        raise UsageError("--online checks rows of the catalogue.", hint="Name a model by its id, or none.")
    return (known.find(parsed)[0],)


def _repos(model: CatalogModel) -> list[str]:
    named = [row.repo for row in model.files if not row.wheel]
    return list(dict.fromkeys([*named, *(model.other_repos if named else ())]))


class _Asker:
    """Asks about one repository after another, until the hub cannot be reached or wants no more questions."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.ended: NemoLocalError | None = None

    def ask(self, repo: str) -> HubRepo | NemoLocalError:
        if self.ended:
            return self.ended
        try:
            return hub.fetch_repo(repo, self._config)
        except (OfflineError, hub.RateLimitError) as error:
            self.ended = error
            return error
        except NemoLocalError as error:
            return error


def _check_row(
    model: CatalogModel, row: CatalogFile, answers: dict[str, HubRepo | NemoLocalError]
) -> RowCheck:
    ref = f"{model.id}:{row.quant}"
    first = answers[row.repo]
    if isinstance(first, NemoLocalError) and not isinstance(first, hub.NotThereError):
        return RowCheck(ref=ref, repo=row.repo, state="unknown", detail=str(first))
    for repo in (row.repo, *(other for other in model.other_repos if other != row.repo)):
        answer = answers.get(repo)
        if isinstance(answer, HubRepo) and (found := _find(answer, row)):
            if repo == row.repo:
                return _compare(ref, row, answer, found)
            return _row(ref, answer, found, state="elsewhere", detail=f"{row.repo} no longer has it.")
    why = str(first) if isinstance(first, NemoLocalError) else f"The repository has no {row.quant}."
    return RowCheck(ref=ref, repo=row.repo, state="gone", detail=why)


def _find(repo: HubRepo, row: CatalogFile) -> RemoteModel | None:
    names = {file.name for model in repo.models for file in model.files}
    named = row.names[0] if row.names and row.names[0] in names else ""
    try:
        return repo.choose(file=named, quant=row.quant)
    except (ModelNotFoundError, UsageError, HubError):
        return None


def _compare(ref: str, row: CatalogFile, repo: HubRepo, found: RemoteModel) -> RowCheck:
    made = partial(_row, ref, repo, found)
    hashes = tuple(file.sha256 for file in found.files)
    if row.sha256 and all(hashes) and hashes != row.sha256:
        return made(state="changed", detail="The file was published anew: its sha256 is another one.")
    most_off = N_NEARLY * row.bytes if row.is_approximate else 0
    if abs(found.bytes - row.bytes) > most_off:
        detail = f"It has {found.bytes:,} bytes, the catalogue says {row.bytes:,}."
        return made(state="changed", detail=detail)
    if repo.is_gated:
        return made(state="gated", detail="Its terms have to be accepted on the hub.")
    return made(state="ok")


def _row(ref: str, repo: HubRepo, found: RemoteModel, *, state: State, detail: str = "") -> RowCheck:
    return RowCheck(
        ref=ref,
        repo=repo.id,
        state=state,
        detail=detail,
        names=tuple(file.name for file in found.files),
        bytes=found.bytes,
        sha256=tuple(file.sha256 for file in found.files),
    )


def _lost_repos(
    models: tuple[CatalogModel, ...], answers: dict[str, HubRepo | NemoLocalError]
) -> list[RowCheck]:
    """The other repositories of models that the hub no longer has."""
    return [
        RowCheck(ref=model.id, repo=repo, state="gone", detail=str(answer))
        for model in models
        for repo in model.other_repos
        if isinstance(answer := answers.get(repo), hub.NotThereError)
        and repo not in {row.repo for row in model.files}
    ]
