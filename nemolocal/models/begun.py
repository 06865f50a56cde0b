"""Downloads that were begun and are not whole yet: what has arrived of which model.

Looks at names and sizes only, so that it is quick; whether what has arrived still matches what is published
is seen when the download goes on.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nemolocal.config import Config
from nemolocal.errors import UsageError
from nemolocal.models import catalog, disk, reference
from nemolocal.models.catalog import Catalog
from nemolocal.models.reference import FileGroup, HubRef, NamedRef, PathRef, Reference


@dataclass(frozen=True, slots=True)
class Begun:
    """What has arrived of one model of a repository: `group` holds the names of its files there. `ref` is the
    reference that goes on with it; `total_bytes` is 0 where the catalogue does not tell."""

    ref: str
    repo: str
    group: FileGroup
    done_bytes: int
    total_bytes: int = 0

    def is_of(self, ref: str, known: Catalog | None = None) -> bool:
        """Whether a download of this reference is, or may be, the one that was begun."""
        parsed = _parse(ref)
        if isinstance(parsed, HubRef):
            repos, quant, file = {parsed.repo}, parsed.quant, parsed.file
        elif isinstance(parsed, NamedRef) and (model := (known or catalog.load()).get(parsed.name)):
            repos, quant, file = {model.repo, *model.other_repos}, parsed.quant, ""
            repos |= {row.repo for row in model.files}
        else:
            return False
        if self.repo.casefold() not in {repo.casefold() for repo in repos}:
            return False
        if file:
            return file in self.group.names or file == self.group.first
        return not quant or quant.casefold() == self.group.quant.casefold()


def all_of(config: Config, known: Catalog | None = None) -> tuple[Begun, ...]:
    """What was begun, by repository and name."""
    known = known or catalog.load()
    root = config.models_dir
    arrived: dict[str, dict[str, int]] = defaultdict(dict)  # by repository, then by the file's name
    for path in sorted(root.glob(f"*/*/**/*{disk.PARTIAL_SUFFIX}")):
        owner, name, *rest = path.relative_to(root).parts
        # NAME.gguf.KEY.partial; the newest of several versions is the one that goes on
        file = "/".join(rest).removesuffix(disk.PARTIAL_SUFFIX).rpartition(".")[0]
        with suppress(OSError):  # as a rule it is whole by now, and under its own name
            arrived[f"{owner}/{name}"][file] = _n_bytes(path, arrived[f"{owner}/{name}"].get(file, 0))
    found = (
        _begun(repo, group, sum(files[name] for name in group.names), known)
        for repo, files in arrived.items()
        if reference.is_repo(repo)
        for group in reference.group_files(files)
    )
    return tuple(each for each in found if _parse(each.ref))  # others lay files there, too


def is_same(one: str, other: str, known: Catalog | None = None) -> bool:
    """Whether two references mean the same file, as far as that can be told without asking the hub."""
    known = known or catalog.load()
    a, b = _parse(one), _parse(other)
    if a is None or b is None or isinstance(a, PathRef) or isinstance(b, PathRef):
        return False
    mine, its = _meant(a, known), _meant(b, known)
    if mine is None or its is None:
        return a == b
    if mine.repo != its.repo:
        return False
    if mine.first and its.first:
        return mine.first == its.first
    return mine.quant == its.quant and "model" == mine.kind == its.kind


def _parse(ref: str) -> Reference | None:
    try:
        return reference.parse(ref)
    except UsageError:
        return None


@dataclass(frozen=True, slots=True)
class _Meant:
    """The file that a reference means, in small letters: `first` is "" where only its quantization is
    named."""

    repo: str
    quant: str
    first: str
    kind: str = "model"


def _meant(ref: NamedRef | HubRef, known: Catalog) -> _Meant | None:
    """None where that hangs on what a repository has."""
    if isinstance(ref, HubRef):
        if ref.file:
            first = reference.part_names(ref.file)[0]
            quant, kind = reference.quant_of(first), reference.kind_of(first)
            return _Meant(ref.repo.casefold(), quant.casefold(), first.casefold(), kind)
        return _Meant(ref.repo.casefold(), ref.quant.casefold(), "") if ref.quant else None
    listed = known.get(ref.name)
    if listed is None:
        return None
    rows = [row for row in listed.files if not ref.quant or row.quant.casefold() == ref.quant.casefold()]
    if len(rows) != 1:
        return None
    first = rows[0].names[0].casefold() if rows[0].names else ""
    return _Meant(rows[0].repo.casefold(), rows[0].quant.casefold(), first)


def _n_bytes(path: Path, n_before: int) -> int:
    return max(path.stat().st_size, n_before)


def _begun(repo: str, group: FileGroup, done_bytes: int, known: Catalog) -> Begun:
    if group.kind == "model":
        for model in known.models:
            for row in model.files:
                if (row.repo, row.quant) == (repo, group.quant):
                    return Begun(f"{model.id}:{row.quant}", repo, group, done_bytes, row.bytes)
    return Begun(f"hf:{repo}:{group.first}", repo, group, done_bytes)
