"""One file over HTTP: in ranges into a partial file that a later run goes on with, checked by its sha256.

The partial file lies beside its target and carries the hash of what it will be, so that a file that was
published anew never continues an old one. What is fetched and why is not known here.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import filelock
import httpx2

from nemolocal.errors import ChecksumError, DownloadError, HubError, NoSpaceError
from nemolocal.models import hub

PARTIAL_SUFFIX = ".partial"
LOCKS = ".locks"
_N_KEY = 16  # characters of the hash in a partial file's name: enough to tell versions of one file apart
_CHUNK_BYTES = 1 << 20
_NO_SPACE = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}  # Windows knows no quotas
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all); done never falls. It may raise to stop the download."""
Note = Callable[[str], None]
"""Called with one line that a person should see while they wait."""


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


def fetch(source: Source, *, progress: Callable[[int], None], note: Note, retry: Retry) -> Path:
    """Bring the whole file into `source.partial` and return that path; placing it is the caller's.

    Goes on where an earlier run stopped. `progress` gets the bytes that are there. Whatever is raised, the
    partial file is left in a state that a later run goes on from, except after a ChecksumError, which
    removes it. Raises DownloadError (NoSpaceError, ChecksumError) and HubError.
    """
    discard_partials(source.target, keep=source.partial)
    source.partial.parent.mkdir(parents=True, exist_ok=True)
    with _Partial.open(source) as partial:
        progress(partial.n_bytes)
        if partial.n_bytes < source.bytes:
            _receive_all(source, partial, progress=progress, note=note, retry=retry)
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


@contextmanager
def locked(target: Path, root: Path, *, note: Note) -> Iterator[None]:
    """Keep other processes from fetching `target` meanwhile; waits for one that does. The locks are files
    in a hidden folder below `root`, and fall when their process ends, however it ends."""
    folder = root / LOCKS
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, folder) from None
    name = hashlib.sha256(os.fsencode(target.absolute())).hexdigest()[:_N_KEY]
    lock = filelock.FileLock(folder / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        note(f"Another process is fetching {target.name}; waiting for it.")
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()


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
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            n_bytes += len(chunk)
            progress(n_bytes)
    return digest.hexdigest()


# The transfer itself ------------------------------------------------------------------------------


class _LostError(Exception):
    """The connection brought no more; str() says why in a few words. `wait_s` is what the server asks."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


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
    def open(cls, source: Source) -> Iterator[_Partial]:
        """Take up the bytes that an earlier run left."""
        try:
            stream = io.FileIO(source.partial, "r+" if source.partial.exists() else "x+")
        except OSError as error:
            raise disk_error(error, source.partial) from None
        with stream:
            partial = cls(source, stream)
            while chunk := stream.read(_CHUNK_BYTES):
                partial.digest.update(chunk)
                partial.n_bytes += len(chunk)
            if partial.n_bytes > source.bytes:
                partial.restart()
            yield partial

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
            self.stream.truncate(self.n_bytes)  # half a chunk is in no digest
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
    source: Source, partial: _Partial, *, progress: Callable[[int], None], note: Note, retry: Retry
) -> None:
    """Connect until all bytes are there or patience ends."""
    timeout = httpx2.Timeout(retry.silence_s, connect=min(retry.silence_s, hub.REQUEST_TIMEOUT_S))
    headers = {**source.headers, "Accept-Encoding": "identity"}  # compressed bytes have other lengths
    n_lost, n_bytes_before = 0, partial.n_bytes
    with httpx2.Client(follow_redirects=True, timeout=timeout, headers=headers) as client:
        while partial.n_bytes < source.bytes:
            try:
                _receive(client, source, partial, progress)
                continue
            except _LostError as error:
                lost = error
            except httpx2.TransportError as error:
                lost = _LostError(hub.describe(error))
            except httpx2.HTTPError as error:  # a circle of redirects, a body that cannot be decoded
                raise DownloadError(f"{source.what} cannot be fetched: {hub.describe(error)}.") from None
            if partial.n_bytes - n_bytes_before >= _CHUNK_BYTES:
                n_lost = 0
            n_lost, n_bytes_before = n_lost + 1, partial.n_bytes
            if n_lost >= retry.n_attempts:
                raise DownloadError(
                    f"The connection was lost {n_lost} times ({lost}); {source.what} has "
                    f"{partial.n_bytes:,} of {source.bytes:,} bytes.",
                    hint="Run the same command again; it goes on from there.",
                ) from None
            wait_s = max(lost.wait_s, min(retry.first_wait_s * 2 ** (n_lost - 1), retry.last_wait_s))
            note(f"Connection lost ({lost}); trying again in {wait_s:.0f} s.")
            time.sleep(wait_s)


def _receive(
    client: httpx2.Client, source: Source, partial: _Partial, progress: Callable[[int], None]
) -> None:
    """One connection: ask for what is missing and append what comes. Raises _LostError when it ends early."""
    ranges = {"Range": f"bytes={partial.n_bytes}-"} if partial.n_bytes else {}
    with client.stream("GET", source.url, headers=ranges) as response:
        partial.published = _check_version(source, response) or partial.published
        if not _continues(source, partial, response):
            partial.restart()
        if response.status_code == 416:
            raise _LostError("the server refused the range")
        for chunk in response.iter_bytes():
            if partial.n_bytes + len(chunk) > source.bytes:
                partial.restart()
                raise DownloadError(
                    f"{source.what} is longer than the {source.bytes:,} bytes that the hub announced.",
                    hint="Try again; it may have been published anew just now.",
                )
            partial.append(chunk)
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
        wait = response.headers.get("retry-after", "")
        wait_s = float(wait) if wait.isdigit() else 0.0
        if wait_s <= 60:
            raise _LostError(f"the hub answered {status}", wait_s)
    raise hub.refusal(status, response.headers, what=source.what, page=source.page)


def _check_version(source: Source, response: httpx2.Response) -> str:
    """The hash that the hub publishes with its answer, or "".

    It is in the hub's own answer; that of the storage it leads to has an ETag of another kind. Raises
    HubError when this is no longer the file that was asked for.
    """
    first = response.history[0] if response.history else response
    linked = first.headers.get("x-linked-etag", "").removeprefix("W/").strip('"')
    if not _SHA256.fullmatch(linked):
        return ""
    if source.sha256 and linked != source.sha256:
        raise HubError(f"{source.what} was just published anew.", hint="Try again; it will start afresh.")
    return linked
