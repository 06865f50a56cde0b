"""Large files on a disk: is there room, what has arrived of one, is it whole, and what went wrong with it.

Knows nothing of models, and asks no network.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from nemolocal.errors import DownloadError, NoSpaceError

PARTIAL_SUFFIX = ".partial"
CHUNK_BYTES = 1 << 20
_NO_SPACE = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}  # Windows knows no quotas

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all); done never falls. It may raise to stop the download."""
Note = Callable[[str], None]
"""Called with one line that a person should see while they wait."""


def discard_partials(target: Path, *, keep: Path | None = None) -> None:
    """Remove what was begun for `target`, except `keep`."""
    for path in partials_of(target):
        if path != keep:
            path.unlink(missing_ok=True)


def partials_of(target: Path) -> list[Path]:
    """The partial files of a target, of whatever version."""
    name = re.compile(re.escape(target.name) + rf"\.[0-9A-Za-z]+{re.escape(PARTIAL_SUFFIX)}")
    try:
        return [path for path in target.parent.iterdir() if name.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is or will be."""
    return shutil.disk_usage(nearest_existing(folder)).free


def nearest_existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_space(folder: Path, needed_bytes: int, *, what: str) -> None:
    """Raises NoSpaceError when `needed_bytes` more do not fit into `folder`."""
    free = free_bytes(folder)
    if needed_bytes > free:
        raise NoSpaceError(
            f"No space for {what}: it needs {needed_bytes:,} bytes, and {free:,} are free in {folder}.",
            needed_bytes=needed_bytes,
            free_bytes=free,
            hint="Free some space, or set models_dir to a folder on a larger disk.",
        )


def disk_error(error: OSError, path: Path, *, needed_bytes: int = 0) -> DownloadError:
    """A file or folder that cannot be written, in one line; `needed_bytes` were still to be written."""
    if error.errno in _NO_SPACE:
        free = free_bytes(path.parent)
        return NoSpaceError(
            f"No space left to write {path}: {needed_bytes:,} bytes are needed, and {free:,} are free.",
            needed_bytes=needed_bytes,
            free_bytes=free,
            hint="Free some space, and try again.",
        )
    reason = error.strerror or type(error).__name__
    return DownloadError(f"Cannot write {path}: {reason}.", hint="Check the folder's rights and the disk.")


def hash_file(path: Path, progress: Callable[[int], None] = lambda n_bytes: None) -> str:
    """The sha256 of a file in hexadecimal digits; `progress` gets the bytes read so far."""
    digest = hashlib.sha256()
    n_bytes = 0
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            n_bytes += len(chunk)
            progress(n_bytes)
    return digest.hexdigest()
