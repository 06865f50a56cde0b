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
from nemolocal.models import catalog, disk, reference
from nemolocal.models.catalog import Catalog
from nemolocal.models.reference import FileGroup, HubRef, NamedRef


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
        parsed = reference.parse(ref)
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
        with suppress(FileNotFoundError):  # whole by now, and under its own name
            arrived[f"{owner}/{name}"][file] = _n_bytes(path, arrived[f"{owner}/{name}"].get(file, 0))
    return tuple(
        _begun(repo, group, sum(files[name] for name in group.names), known)
        for repo, files in arrived.items()
        if reference.is_repo(repo)
        for group in reference.group_files(files)
    )


def _n_bytes(path: Path, n_before: int) -> int:
    return max(path.stat().st_size, n_before)


def _begun(repo: str, group: FileGroup, done_bytes: int, known: Catalog) -> Begun:
    if group.kind == "model":
        for model in known.models:
            for row in model.files:
                if (row.repo, row.quant) == (repo, group.quant):
                    return Begun(f"{model.id}:{row.quant}", repo, group, done_bytes, row.bytes)
    return Begun(f"hf:{repo}:{group.first}", repo, group, done_bytes)
