"""What a model file on the hub says of itself, before it is downloaded: its header, read by HTTP range.

A header is a few MB at the beginning of a file of many GB. Which files are worth asking is not known here.
"""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import httpx2

from nemolocal.config import Config
from nemolocal.errors import HubError, ModelFileError
from nemolocal.models import gguf, gguf_header, headers, hub, kept, streams
from nemolocal.models.gguf_header import NeedMoreBytesError
from nemolocal.models.headers import Summary
from nemolocal.models.repos import HubRepo, RemoteFile, RemoteModel
from nemolocal.models.shape import ModelShape

FIRST_BYTES = 1 << 20
FIRST_BYTES_OF_PART = 1 << 17
"""For parts after the first, which list their tensors only."""
MOST_BYTES = 256 << 20
"""A longer header is not a model's."""
N_PARTS_AT_ONCE = 4
N_TRIES = 2


@dataclass(frozen=True, slots=True)
class RemoteHeader:
    """A header in short, and the shape that it tells of."""

    summary: Summary
    shape: ModelShape


def read_header(
    repo: HubRepo, model: RemoteModel, config: Config, *, stop: threading.Event | None = None
) -> RemoteHeader:
    """The header of a model of a repository, of all its parts; from the disk where it was read before.

    Raises ModelFileError for a file that is no model that could be loaded (its architecture unknown to
    llama.cpp, say), HubError and OfflineError when it cannot be read, DownloadStoppedError once `stop` is
    set.
    """
    key = f"{repo.id} {repo.revision} {model.first}"
    known = kept.header(key, config)
    if known:
        return RemoteHeader(*known)
    hub.refuse_offline(config, what=f"Reading the header of {model.first}")
    stop = stop or threading.Event()
    sizes = [FIRST_BYTES, *[FIRST_BYTES_OF_PART] * (len(model.files) - 1)]
    heads = [_Head(repo, file, config, stop, n_first=n) for file, n in zip(model.files, sizes, strict=True)]
    with ThreadPoolExecutor(N_PARTS_AT_ONCE) as pool:
        streams_of = list(pool.map(_Head.whole, heads))
    try:
        info = gguf.read_streams(
            [
                (head.file.name, stream, head.file.bytes)
                for head, stream in zip(heads, streams_of, strict=True)
            ]
        )
    except ModelFileError as error:
        raise ModelFileError(f"{model.first}: {error.message}", kind=error.kind, hint=error.hint) from None
    found = RemoteHeader(headers.of(info), info.shape)
    kept.keep_header(key, found.summary, found.shape, config)
    return found


class _Head:
    """The beginning of a remote file, as long as its header needs."""

    def __init__(
        self, repo: HubRepo, file: RemoteFile, config: Config, stop: threading.Event, *, n_first: int
    ) -> None:
        self.file = file
        self._repo, self._config, self._stop = repo, config, stop
        self._n_first = n_first
        self._bytes = b""

    def whole(self) -> io.BytesIO:
        """As much as holds the header. Raises ModelFileError when it does not end."""
        n_needed = self._n_first
        while self._grow(n_needed):
            try:
                gguf_header.parse(io.BytesIO(self._bytes))
            except NeedMoreBytesError as error:
                n_needed = max(error.needed_bytes, 2 * len(self._bytes))
            except ModelFileError:
                break  # told in full by whoever reads it next
            else:
                break
        else:
            raise ModelFileError(f"{self.file.name}: Its header does not end.", kind="corrupt")
        return io.BytesIO(self._bytes)

    def _grow(self, n_needed: int) -> bool:
        """False when the whole file is here, or more than any header has."""
        n_wanted = min(n_needed, self.file.bytes, MOST_BYTES)
        if n_wanted <= len(self._bytes):
            return False
        for n_left in reversed(range(N_TRIES)):
            try:
                self._bytes += self._fetch(len(self._bytes), n_wanted)
                break
            except _LostError as error:
                if not n_left:
                    raise error.told from None
        return True

    def _fetch(self, start: int, end: int) -> bytes:
        """Bytes from `start` to `end`. A server that sends the whole file instead is read so far and left."""
        url = hub.file_url(self._repo.id, self.file.name, self._config, revision=self._repo.revision)
        asked = {
            **hub.auth_headers(),
            "Range": f"bytes={start}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        found = bytearray()
        n_skipped = 0
        try:
            with streams.get(
                url, headers=asked, timeout=httpx2.Timeout(hub.REQUEST_TIMEOUT_S), stop=self._stop
            ) as answer:
                self._check(answer.head)
                n_skipped = 0 if answer.head.status_code == 206 else start
                for block in answer.blocks:
                    found += block
                    if len(found) >= n_skipped + end - start:
                        break
        except httpx2.HTTPError as error:
            raise _LostError(hub.unreachable(self._config, hub.describe(error))) from None
        wanted = bytes(found[n_skipped : n_skipped + end - start])
        if len(wanted) < end - start:
            told = HubError(f"The hub sent less of {self.file.name} than it holds.", hint="Try again.")
            raise _LostError(told)
        return wanted

    def _check(self, head: httpx2.Response) -> None:
        status = head.status_code
        if status in (200, 206):
            return
        page = f"{hub.endpoint(self._config)}/{self._repo.id}"
        if head.history and status in (403, 416):  # from the storage: an address that has expired
            told = HubError(
                f"The hub's storage refused {self.file.name} (status {status}).", hint="Try again."
            )
            raise _LostError(told)
        raise hub.refusal(status, head.headers, what=self.file.name, page=page)


class _LostError(Exception):
    """A try that may go better the next time; `told` is what to say if it does not."""

    def __init__(self, told: HubError) -> None:
        super().__init__(str(told))
        self.told = told


def scaled(shape: ModelShape, *, from_bytes: int, to_bytes: int) -> ModelShape:
    """The shape of another quantization of the same model, of which only the size is known: what each part
    takes grows with the whole. Right within a few hundredths for each layer."""

    def size(n_bytes: int) -> int:
        return round(n_bytes * to_bytes / max(from_bytes, 1))

    layers = tuple(
        replace(x, weights_bytes=size(x.weights_bytes), expert_bytes=size(x.expert_bytes))
        for x in shape.layers
    )
    return replace(
        shape,
        layers=layers,
        input_bytes=size(shape.input_bytes),
        output_bytes=size(shape.output_bytes),
        extra_bytes=size(shape.extra_bytes),
    )
