"""Documents that are ZIP archives inside: opened only when what is packed in them stays within bounds."""

from __future__ import annotations

import zipfile
import zlib

from nemolocal.documents.limits import Limits
from nemolocal.documents.load.source import Source

N_ENTRIES_MOST = 20_000
SMALL_BYTES = 1 << 20  # below this any ratio is harmless
PROBLEMS = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError, ValueError)
"""What reading an archive may raise."""


def open_archive(source: Source, limits: Limits) -> zipfile.ZipFile:
    """The archive, to be closed by the caller. Raises DocumentError for a damaged one, for one that is
    protected by a password, and for one that would unpack to too much."""
    try:
        packed = zipfile.ZipFile(source.path)
    except PROBLEMS as error:
        raise source.damaged(error) from None
    try:
        _check(packed, source, limits)
    except BaseException:
        packed.close()
        raise
    return packed


def _check(packed: zipfile.ZipFile, source: Source, limits: Limits) -> None:
    entries = packed.infolist()
    if len(entries) > N_ENTRIES_MOST:
        raise source.too_large(f"{len(entries):,} files are packed in it")
    names = [entry.filename for entry in entries]
    if len(set(names)) < len(names):
        raise source.damaged("two of the files packed in it have one name")
    if any(entry.flag_bits & 1 for entry in entries):
        raise source.unsupported("it is protected by a password", "Save it without one.")
    n_bytes = sum(entry.file_size for entry in entries)
    if n_bytes > limits.max_unpacked_bytes:
        raise source.too_large(f"it would unpack to {n_bytes >> 20:,} MiB")
    for entry in entries:
        is_bomb = entry.file_size > SMALL_BYTES and entry.file_size > limits.max_ratio * max(
            entry.compress_size, 1
        )
        if is_bomb:
            raise source.too_large(f"a part of it is packed more than {limits.max_ratio} times smaller")


def read_entry(packed: zipfile.ZipFile, name: str, source: Source) -> bytes:
    """One packed file, no longer than its entry says. Raises DocumentError."""
    try:
        entry = packed.getinfo(name)
        with packed.open(entry) as stream:
            data = stream.read(entry.file_size + 1)
    except PROBLEMS as error:
        raise source.damaged(f"{name}: {error}") from None
    if len(data) > entry.file_size:
        raise source.damaged(f"{name} is longer than it says")
    if b"<!ENTITY" in data[:65536]:
        raise source.damaged("it defines entities, as no such document does")
    return data
