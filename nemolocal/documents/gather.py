"""Which files are meant by paths that people write: files, folders and patterns."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemolocal.documents.load.sniff import SUFFIXES
from nemolocal.errors import DocumentError

N_FILES_MOST = 10_000


@dataclass(frozen=True, slots=True)
class Missing:
    """A path that names nothing that could be read."""

    path: str
    error: DocumentError


def gather(paths: Sequence[str | Path]) -> list[Path | Missing]:
    """The files, each once, in the order of the paths and then of their names. Of folders those that look
    like documents, hidden ones left out; links to folders are not followed."""
    found: dict[Path | str, Path | Missing] = {}
    for text in map(str, paths):
        for each in _files(text):
            found.setdefault(each.resolve() if isinstance(each, Path) else each.path, each)
            if len(found) > N_FILES_MOST:
                hint = "Name fewer folders."
                raise DocumentError(
                    f"{text} and the rest hold more than {N_FILES_MOST:,} files.", kind="too_large", hint=hint
                )
    return list(found.values())


def _files(text: str) -> Iterator[Path | Missing]:
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            inside = list(_of_folder(path))
            yield from inside
            if not inside:
                yield Missing(text, DocumentError(f"{text} holds no documents.", kind="missing"))
        elif path.exists():
            yield path
        else:
            matched = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(text) else []  # noqa: PTH207
            for each in matched:
                yield from _of_folder(Path(each)) if Path(each).is_dir() else [Path(each)]
            if not matched:
                yield Missing(text, DocumentError(f"There is no file {text}.", kind="missing"))
    except (OSError, ValueError) as error:  # a name that is too long, or with NUL
        why = getattr(error, "strerror", None) or str(error)
        yield Missing(text, DocumentError(f"{text[:200]!r} cannot be looked at: {why}.", kind="missing"))


def _of_folder(folder: Path) -> Iterator[Path]:
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith((".", "~$")) and name.lower().endswith(SUFFIXES):
                yield Path(top, name)
