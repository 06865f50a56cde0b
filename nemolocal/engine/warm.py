"""States of sequences on disk, so that what a model has read outlives its process.

Several models, plans and processes share one folder and its limit. Nothing here fails a request: a file that
is damaged is removed and said in the log; a disk that is full or read-only means that nothing is kept. Only
the standard library is used. Knows nothing of llama.cpp, of the scheduler and of pipes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nemolocal.engine import warm_file
from nemolocal.engine.warm_file import DamagedError, Head

if sys.platform != "win32":
    import fcntl

RESCAN_S = 1.0
"""How long `find` may miss what another process has added."""

_NAME = re.compile(rf"[0-9a-f]{{64}}{re.escape(warm_file.SUFFIX)}")
_UNFINISHED = ("unfinished-", ".tmp")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """A state that is kept: `n_tokens` led to it, of which the first `n_common` are the prompt's as well."""

    name: str
    n_tokens: int
    n_common: int
    state_bytes: int


class WarmStore:
    """The states of one model under one plan.

    May be called from several threads; reading, writing and checksums leave the interpreter to the others.
    """

    def __init__(self, folder: str | Path, *, key: str, limit_bytes: int) -> None:
        """`key` names all that shapes a state (model, plan, library): states of other keys are not returned.
        `limit_bytes` is for the folder, all keys together; with 0 nothing is read, kept or removed."""
        self._folder = Path(folder)
        self._key_digest = warm_file.digest_key(key)
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()  # for the next two
        self._index: dict[str, Head] = {}
        self._others: set[str] = set()  # files of other keys, and such as cannot be read
        self._scanned_s = 0.0
        self._has_warned = False
        if limit_bytes:
            self._open()

    def save(self, tokens: Sequence[int], state: bytes | memoryview, *, whole: bool = False) -> bool:
        """Keep a state, which is one row of bytes, and the tokens that led to it.

        Whether it is kept now, or a state that serves as well: one of the same tokens or of more that begin
        with them. The new state makes those of beginnings of its tokens useless, and they are removed. With
        `whole`, for memories that cannot roll back, each length is of use by itself, and only the same
        tokens serve as well. The least recently used states of all keys give way before anything is written.
        A state that is larger than the limit is refused, and so is an empty one.
        """
        if not self._limit_bytes or not tokens or not state:
            return False
        state = memoryview(state)
        head = Head(self._key_digest, warm_file.pack_tokens(tokens), state.nbytes)
        assert state.nbytes == len(state)  # bytes, not numbers
        if head.file_bytes > self._limit_bytes:
            sizes = (head.file_bytes >> 20, self._limit_bytes >> 20)
            _log.info("A state of %d MiB is not kept: the limit of the warm cache is %d MiB.", *sizes)
            return False
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._scan()
            if self._is_served(head.tokens, whole=whole):
                return True
            useless = set() if whole else self._beginnings_of(head.tokens)
            if not self._make_room(head.file_bytes, first=useless):
                return False
            self._write(head, state)
            with self._lock:
                self._index[head.name] = head
            for name in useless:
                self._remove(name)
            self._make_room(0, keep=head.name)  # others may have written meanwhile
        except OSError as error:
            self._warn(f"cannot be written ({_reason(error)})")
            return False
        return True

    def find(self, prompt: Sequence[int], *, whole: bool = False) -> Entry | None:
        """The entry that shares the longest beginning with the prompt; of equals the one with fewer tokens.

        With `whole`, for memories that cannot roll back, only entries count all of whose tokens are a
        beginning of the prompt. That may be the whole prompt: where its last token must be computed anew,
        ask for the prompt without it.
        """
        self._scan(patience_s=RESCAN_S)
        packed = warm_file.pack_tokens(prompt)
        best: Entry | None = None
        with self._lock:
            for name, head in self._index.items():
                n_common = _n_common(head.tokens, packed)
                if n_common == 0 or (whole and n_common < head.n_tokens):
                    continue
                if best is None or (n_common, -head.n_tokens) > (best.n_common, -best.n_tokens):
                    best = Entry(name, head.n_tokens, n_common, head.state_bytes)
        return best

    def load(self, entry: Entry) -> tuple[list[int], memoryview] | None:
        """The tokens and the state of an entry, which counts as used now.

        The state is a writable buffer that is freed with the last view of it. None where the file is gone
        meanwhile or cannot be read, or where it is damaged: then it is removed, and the log says so.
        """
        try:
            with (self._folder / entry.name).open("rb") as stream:
                head = warm_file.read_head(stream, entry.name)
                if head.key_digest != self._key_digest:
                    return None
                state = warm_file.read_state(stream, head)
        except DamagedError as error:
            self._drop(entry.name, error)
            return None
        except FileNotFoundError:
            self._forget(entry.name)
            return None
        except OSError as error:  # a bad sector, or no memory for the state
            if error.errno != errno.ENOMEM:
                self._pass_over(entry.name)
            self._warn(f"cannot be read ({_reason(error)})")
            return None
        self._touch(entry.name)
        return warm_file.unpack_tokens(head.tokens), state

    # What is there --------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep()
            self._make_room(0)
        except OSError as error:
            self._warn(f"cannot be used ({_reason(error)})")
        self._scan()

    def _scan(self, *, patience_s: float = 0.0) -> None:
        """Take in what other processes have added and removed, unless that was done `patience_s` ago."""
        now_s = time.monotonic()
        if not self._limit_bytes or now_s - self._scanned_s < patience_s:
            return
        self._scanned_s = now_s
        present = set()
        try:
            with os.scandir(self._folder) as files:
                present = {file.name for file in files if _NAME.fullmatch(file.name)}
        except FileNotFoundError:
            pass
        except OSError as error:
            self._warn(f"cannot be read ({_reason(error)})")
        with self._lock:
            for name in self._index.keys() - present:
                del self._index[name]
            self._others &= present
            fresh = present - self._index.keys() - self._others
        for name in fresh:
            self._take_in(name)

    def _take_in(self, name: str) -> None:
        try:
            with (self._folder / name).open("rb") as stream:
                head = warm_file.read_head(stream, name)
        except DamagedError as error:
            self._drop(name, error)
            return
        except OSError:  # gone again, or not for us to read
            self._pass_over(name)
            return
        if head.key_digest != self._key_digest:
            self._pass_over(name)
            return
        with self._lock:
            self._index[name] = head

    def _is_served(self, tokens: bytes, *, whole: bool) -> bool:
        """Whether a state that is kept already does for these tokens; it counts as used now."""
        with self._lock:
            names = [
                name
                for name, head in self._index.items()
                if head.tokens == tokens or (not whole and head.tokens.startswith(tokens))
            ]
        return any(self._touch(name) for name in names)

    def _beginnings_of(self, tokens: bytes) -> set[str]:
        with self._lock:
            return {name for name, head in self._index.items() if tokens.startswith(head.tokens)}

    def _touch(self, name: str) -> bool:
        """Note that a file was used now; false when it is gone."""
        try:
            _set_used(self._folder / name)
        except FileNotFoundError:
            self._forget(name)
            return False
        except OSError:
            pass  # a folder that can only be read still serves
        return True

    def _forget(self, name: str) -> None:
        with self._lock:
            self._index.pop(name, None)

    def _pass_over(self, name: str) -> None:
        """Look at a file no more."""
        with self._lock:
            self._index.pop(name, None)
            self._others.add(name)

    def _drop(self, name: str, error: DamagedError) -> None:
        _log.warning("The warm cache drops its file %s: %s.", name, error)
        if not self._remove(name):
            self._pass_over(name)

    def _remove(self, name: str) -> bool:
        """False when the file stays: on Windows another process reads it, or the folder is read-only."""
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError:
            return False
        self._forget(name)
        return True

    # Writing and room -----------------------------------------------------------------------------

    def _make_room(self, n_bytes: int, *, first: set[str] | None = None, keep: str = "") -> bool:
        """Remove files until `n_bytes` more are within the limit: `first`, then the least recently used.

        False where they do not fit: with nothing removed when the disk would be too full all the same.
        Raises OSError.
        """
        files = sorted(self._files(), key=lambda file: (file.name not in (first or ()), file.used_ns))
        excess_bytes = sum(file.n_bytes for file in files) + n_bytes - self._limit_bytes
        leaving, freed_bytes = [], 0
        for file in files:
            if freed_bytes < excess_bytes and file.name != keep:
                leaving.append(file)
                freed_bytes += file.n_bytes
        if n_bytes and shutil.disk_usage(self._folder).free + freed_bytes < n_bytes:
            self._warn("is on a disk that is full")
            return False
        removed_bytes = sum(file.n_bytes for file in leaving if self._remove(file.name))
        if removed_bytes < excess_bytes:
            self._warn("is above its limit, and its files cannot be removed")
            return False
        return True

    def _files(self) -> Iterator[_File]:
        """The finished files of all keys."""
        with os.scandir(self._folder) as files:
            for file in files:
                if _NAME.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat()
                        yield _File(file.name, status.st_size, status.st_mtime_ns)

    def _write(self, head: Head, state: memoryview) -> None:
        """Write a file under another name, and give it its own when it is whole. Raises OSError."""
        prefix, suffix = _UNFINISHED
        descriptor, name = tempfile.mkstemp(suffix, prefix, self._folder)  # for its owner's eyes only
        unfinished, path = Path(name), self._folder / head.name
        try:
            with os.fdopen(descriptor, "wb") as stream:
                _hold(stream)
                warm_file.write(stream, head, state)
                _set_used(unfinished)
                if sys.platform != "win32":
                    unfinished.replace(path)  # while it is held, so that no sweep can come between
            if sys.platform == "win32":  # which gives no open file another name
                unfinished.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def _sweep(self) -> None:
        """Remove what processes left that were killed while they wrote. Who still writes holds the file."""
        for path in self._folder.glob("*".join(_UNFINISHED)):
            with contextlib.suppress(OSError):
                if sys.platform == "win32":
                    path.unlink()  # which fails while anyone has it open
                else:
                    with path.open("rb") as stream:
                        if _hold(stream):
                            path.unlink()

    def _warn(self, what: str) -> None:
        """Once: a full disk would say the same at every request."""
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        _log.log(level, "The warm cache in %s %s; requests are answered without it.", self._folder, what)


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    n_bytes: int
    used_ns: int


def _hold(stream: BinaryIO) -> bool:
    """Keep others from sweeping the file while it is open; false when another process holds it, or when the
    file system knows no locks."""
    if sys.platform != "win32":
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _set_used(path: Path) -> None:
    """Set the time of change to now. Raises OSError."""
    now_ns = time.time_ns()  # the system's own "now" moves in steps of milliseconds
    os.utime(path, ns=(now_ns, now_ns))


def _n_common(a: bytes, b: bytes) -> int:
    """Length of the common beginning in tokens. Halves the interval, since comparing slices runs in C."""
    size = warm_file.TOKEN_BYTES
    if a[:size] != b[:size]:
        return 0
    low, high = 0, min(len(a), len(b)) // size + 1  # the first `low` are common, the first `high` are not
    if b.startswith(a[: (high - 1) * size]):
        return high - 1
    while high - low > 1:
        middle = (low + high) // 2
        if a[low * size : middle * size] == b[low * size : middle * size]:
            low = middle
        else:
            high = middle
    return low


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
