"""One file over HTTP: in ranges into a partial file that a later run goes on with, checked by its sha256.

The partial file lies beside its target and carries the hash of what it will be, so that a file that was
published anew never continues an old one. What is fetched and why is not known here.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import filelock
import httpx2

from nemolocal.errors import BeingFetchedError, ChecksumError, DownloadError, HubError
from nemolocal.models import hub, streams
from nemolocal.models.disk import CHUNK_BYTES, PARTIAL_SUFFIX, Note, discard_partials, disk_error

LOCKS = ".locks"
LONGEST_WAIT_S = 60
"""Who asks for more patience than this is left alone, and the person told."""
_N_KEY = 16  # characters of the hash in a partial file's name: enough to tell versions of one file apart
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file to fetch. `sha256` "" means that nobody published one; then `etag` tells versions apart.
    `what` names the file in messages, `page` is the repository's page."""

    url: str
    bytes: int
    target: Path
    what: str
    sha256: str = ""
    etag: str = ""
    page: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # holds the token

    @property
    def partial(self) -> Path:
        """Where the bytes gather until they are all there."""
        key = re.sub(r"[^0-9A-Za-z]", "", self.sha256 or self.etag or str(self.bytes))[:_N_KEY]
        return self.target.with_name(f"{self.target.name}.{key}{PARTIAL_SUFFIX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How patient a transfer is. `n_attempts` counts connections in a row that brought next to nothing;
    the pause between two doubles from `first_wait_s` to `last_wait_s`. A connection that is silent for
    `silence_s` counts as lost."""

    n_attempts: int = 6
    first_wait_s: float = 1.0
    last_wait_s: float = 30.0
    silence_s: float = 30.0


def fetch(
    source: Source, *, progress: Callable[[int], None], note: Note, retry: Retry, stop: threading.Event
) -> Path:
    """Bring the whole file into `source.partial` and return that path; placing it is the caller's.

    Goes on where an earlier run stopped. `progress` gets the bytes that are there. Whatever is raised, the
    partial file is left in a state that a later run goes on from, except after a ChecksumError, which
    removes it. Raises DownloadError (NoSpaceError, ChecksumError, within a moment DownloadStoppedError once
    `stop` is set) and HubError.
    """
    try:
        source.partial.parent.mkdir(parents=True, exist_ok=True)
        discard_partials(source.target, keep=source.partial)
    except OSError as error:
        raise disk_error(error, source.partial) from None
    with _Partial.open(source, stop) as partial:
        progress(partial.n_bytes)
        if partial.n_bytes < source.bytes:
            _receive_all(source, partial, progress=progress, note=note, retry=retry, stop=stop)
        partial.finish()
    found = partial.digest.hexdigest()
    if partial.published and found != partial.published:
        source.partial.unlink(missing_ok=True)
        raise ChecksumError(
            f"{source.what} did not arrive as it was published (sha256 {found[:12]}… instead of "
            f"{partial.published[:12]}…); it was thrown away.",
            hint="Try again; if that does not help, a proxy may be changing downloads.",
        )
    return source.partial


@contextmanager
def locked(target: Path, root: Path, *, note: Note, stop: threading.Event) -> Iterator[None]:
    """Keep others, here or in other processes, from fetching `target` meanwhile; waits for one that does. The
    locks are files in a hidden folder below `root`, and fall when their process ends, however it ends.

    Raises DownloadStoppedError when stopped while it waits.
    """
    lock = _lock_of(target, root)
    try:
        if not _take(lock):
            note(f"{target.name} is being fetched already; waiting for that.")
            while not lock.is_locked:
                streams.refuse_stopped(stop)
                with suppress(filelock.Timeout):
                    lock.acquire(timeout=0.2)
    except OSError as error:
        raise disk_error(error, root / LOCKS) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def locked_at_once(target: Path, root: Path) -> Iterator[None]:
    """The same without waiting. Raises BeingFetchedError while somebody, here or elsewhere, fetches it."""
    lock = _lock_of(target, root)
    try:
        is_taken = _take(lock)
    except OSError as error:
        raise disk_error(error, root / LOCKS) from None
    if not is_taken:
        raise BeingFetchedError(f"{target.name} is being fetched.", hint="Stop that download first.")
    try:
        yield
    finally:
        lock.release()


def _lock_of(target: Path, root: Path) -> filelock.BaseFileLock:
    name = hashlib.sha256(os.fsencode(target.absolute())).hexdigest()[:_N_KEY]
    return filelock.FileLock(root / LOCKS / f"{name}.lock")


def _take(lock: filelock.BaseFileLock) -> bool:
    """Take a lock if nobody has it. Raises OSError."""
    Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    return True


# The transfer itself ------------------------------------------------------------------------------


class _LostError(Exception):
    """The connection brought no more; str() says why in a few words. `wait_s` is what the server asks."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)


class _Partial:
    """An open partial file. `n_bytes` and `digest` always tell of the same bytes, those at its start;
    `published` is the sha256 that it must come to, "" while none is known."""

    def __init__(self, source: Source, stream: io.FileIO) -> None:
        self.source = source
        self.stream = stream
        self.n_bytes = 0
        self.digest = hashlib.sha256()
        self.published = source.sha256

    @classmethod
    @contextmanager
    def open(cls, source: Source, stop: threading.Event) -> Iterator[_Partial]:
        """Take up the bytes that an earlier run left. What lies there and is no file of its own, such as a
        link, is left alone: what it leads to is nobody's to write."""
        try:
            is_there = os.path.lexists(source.partial)
            if is_there and not stat.S_ISREG(source.partial.lstat().st_mode):
                raise DownloadError(
                    f"Cannot write {source.partial}: it is no ordinary file.",
                    hint="Remove it, and try again.",
                )
            stream = io.FileIO(source.partial, "r+" if is_there else "x+", opener=_open_itself)
        except OSError as error:
            raise disk_error(error, source.partial) from None
        with stream:
            partial = cls(source, stream)
            partial._take_up(stop)
            yield partial

    def _take_up(self, stop: threading.Event) -> None:
        try:
            while chunk := self.stream.read(CHUNK_BYTES):
                streams.refuse_stopped(stop)
                self.digest.update(chunk)
                self.n_bytes += len(chunk)
        except OSError as error:
            raise disk_error(error, self.source.partial) from None
        if self.n_bytes > self.source.bytes:
            self.restart()

    def restart(self) -> None:
        self.stream.seek(0)
        self.stream.truncate()
        self.n_bytes = 0
        self.digest = hashlib.sha256()

    def append(self, chunk: bytes) -> None:
        rest = memoryview(chunk)
        try:
            while rest:
                rest = rest[self.stream.write(rest) :]
        except OSError as error:
            raise self._failed(error) from None
        self.digest.update(chunk)
        self.n_bytes += len(chunk)

    def finish(self) -> None:
        """See that the bytes are on the disk, where some systems only then find it full."""
        try:
            os.fsync(self.stream.fileno())
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> DownloadError:
        path, n_missing = self.source.partial, self.source.bytes - self.n_bytes
        failure = disk_error(error, path, needed_bytes=n_missing)
        failure.hint = (
            f"{failure.hint} What has arrived is kept in {path.name}, and a later run goes on from there."
        )
        return failure


def _receive_all(
    source: Source,
    partial: _Partial,
    *,
    progress: Callable[[int], None],
    note: Note,
    retry: Retry,
    stop: threading.Event,
) -> None:
    """Connect until all bytes are there, patience ends or it is stopped."""
    timeout = httpx2.Timeout(retry.silence_s, connect=min(retry.silence_s, hub.REQUEST_TIMEOUT_S))
    n_lost, n_most_bytes = 0, partial.n_bytes
    while partial.n_bytes < source.bytes:
        try:
            _receive(source, partial, timeout, progress=progress, stop=stop)
            continue
        except _LostError as error:
            lost = error
        except httpx2.TransportError as error:
            lost = _LostError(hub.describe(error))
        except httpx2.HTTPError as error:  # a circle of redirects, a body that cannot be decoded
            raise DownloadError(f"{source.what} cannot be fetched: {hub.describe(error)}.") from None
        # What came a second time, from a server that begins anew each time, is no way forward.
        if partial.n_bytes - n_most_bytes >= CHUNK_BYTES:
            n_lost = 0
        n_lost, n_most_bytes = n_lost + 1, max(n_most_bytes, partial.n_bytes)
        if n_lost >= retry.n_attempts:
            raise DownloadError(
                f"The connection was lost {n_lost} times ({lost}); {source.what} has "
                f"{partial.n_bytes:,} of {source.bytes:,} bytes.",
                hint="Run the same command again; it goes on from there.",
            ) from None
        wait_s = max(lost.wait_s, min(retry.first_wait_s * 2 ** (n_lost - 1), retry.last_wait_s))
        note(f"Connection lost ({lost}); trying again in {wait_s:.0f} s.")
        stop.wait(wait_s)


def _receive(
    source: Source,
    partial: _Partial,
    timeout: httpx2.Timeout,
    *,
    progress: Callable[[int], None],
    stop: threading.Event,
) -> None:
    """One connection: ask for what is missing and append what comes. Raises _LostError when it ends early."""
    headers = {**source.headers, "Accept-Encoding": "identity"}  # compressed bytes have other lengths
    if partial.n_bytes:
        headers["Range"] = f"bytes={partial.n_bytes}-"
    with streams.get(source.url, headers=headers, timeout=timeout, stop=stop) as answer:
        partial.published = _check_version(source, answer.head) or partial.published
        if not _continues(source, partial, answer.head):
            partial.restart()
        if answer.head.status_code == 416:
            raise _LostError("the server refused the range")
        for block in answer.blocks:
            if partial.n_bytes + len(block) > source.bytes:
                partial.restart()
                raise DownloadError(
                    f"{source.what} is longer than the {source.bytes:,} bytes that the hub announced.",
                    hint="Try again; it may have been published anew just now.",
                )
            partial.append(block)
            progress(partial.n_bytes)
    if partial.n_bytes < source.bytes:
        raise _LostError("the connection ended early")


def _continues(source: Source, partial: _Partial, response: httpx2.Response) -> bool:
    """Whether the body goes on where the partial file ends; False when it is the file from its start or
    when there is no such place. Raises for any other answer."""
    status = response.status_code
    if status == 206:
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if found is None or int(found[1]) != partial.n_bytes or found[2] not in ("*", str(source.bytes)):
            raise DownloadError(
                f"The server sent another range of {source.what} than was asked for.", hint="Try again later."
            )
        return True
    if status == 416 and partial.n_bytes:
        return False
    if status == 200:
        return partial.n_bytes == 0
    # A 403 from the storage, not from the hub itself, is an address that has expired.
    if status in (408, 429) or status >= 500 or (status == 403 and response.history):
        wait_s = hub.seconds_to_wait(response.headers)
        if wait_s <= LONGEST_WAIT_S:
            raise _LostError(f"the hub answered {status}", wait_s)
    raise hub.refusal(status, response.headers, what=source.what, page=source.page)


def _check_version(source: Source, response: httpx2.Response) -> str:
    """The hash that the hub publishes with its answer, or "".

    It is in the hub's own answer, the first or, where a repository was renamed, the next; that of the storage
    it leads to has an ETag of another kind. Raises
    HubError when this is no longer the file that was asked for.
    """
    answers = (*response.history, response)
    tags = (answer.headers.get("x-linked-etag", "").removeprefix("W/").strip('"') for answer in answers)
    linked = next((tag for tag in tags if _SHA256.fullmatch(tag)), "")
    if not linked:
        return ""
    if source.sha256 and linked != source.sha256:
        raise HubError(f"{source.what} was just published anew.", hint="Try again; it will start afresh.")
    return linked
