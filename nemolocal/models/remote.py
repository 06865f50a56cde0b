"""What a model file on the hub says of itself, before it is downloaded: its header, read by HTTP range.

A header is a few MB at the beginning of a file of many GB. What was learnt is kept on disk by repository,
commit and file, so that it is asked for once, and known without a network afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx2

from nemolocal.config import Config
from nemolocal.errors import HubError, ModelFileError
from nemolocal.models import gguf, hub, receipt
from nemolocal.models.gguf_header import NeedMoreBytesError
from nemolocal.models.hub import HubRepo, RemoteFile, RemoteModel
from nemolocal.models.shape import LayerKind, LayerShape, ModelShape

FIRST_BYTES = 1 << 20
MOST_BYTES = 256 << 20
"""A longer header is not a model's."""
SHOWN = ("name", "architecture", "quant", "n_params", "n_ctx_train", "can_chat", "tokenizer")


@dataclass(frozen=True, slots=True)
class RemoteHeader:
    """A header in short. `facts` are those of SHOWN."""

    facts: dict[str, Any]
    shape: ModelShape


def read_header(repo: HubRepo, model: RemoteModel, config: Config) -> RemoteHeader:
    """The header of a model of a repository, of all its parts.

    Raises ModelFileError for a file that is no model that could be loaded (its architecture unknown to
    llama.cpp, say), HubError and OfflineError when it cannot be read.
    """
    kept = _kept_path(repo, model, config)
    known = _recall(kept)
    if known:
        return known
    parts = []
    with _client(config) as client:
        for file in model.files:
            url = hub.file_url(repo.id, file.name, config, revision=repo.revision)
            parts.append((file.name, _Head(client, url, file, config), file.bytes))
        info = _read(parts)
    facts = {key: getattr(info, key) for key in SHOWN}
    shape = asdict(info.shape)
    for layer in shape["layers"]:
        layer["kind"] = layer["kind"].value
    with contextlib.suppress(OSError):  # it is asked for again then, and that is all
        receipt.write_json(kept, {"facts": facts, "shape": shape})
    return RemoteHeader(facts, info.shape)


def _read(parts: list[tuple[str, _Head, int]]) -> gguf.GgufInfo:
    while True:
        try:
            return gguf.read_streams([(name, head.stream(), size) for name, head, size in parts])
        except NeedMoreBytesError as error:
            # The parser does not say whose bytes ended: each that is not whole yet gets some more.
            grown = [head.grow(error.needed_bytes) for _, head, _ in parts]
            if not any(grown):
                raise ModelFileError("Its header does not end.", kind="corrupt") from None


class _Head:
    """The beginning of a remote file, longer at each call of `grow`."""

    def __init__(self, client: httpx2.Client, url: str, file: RemoteFile, config: Config) -> None:
        self._client, self._url, self._file, self._config = client, url, file, config
        self._bytes = b""

    def stream(self) -> io.BytesIO:
        if not self._bytes:
            self.grow(0)
        return io.BytesIO(self._bytes)

    def grow(self, n_needed: int) -> bool:
        """False when the whole file is here, or more than any header has."""
        n_wanted = min(max(FIRST_BYTES, 2 * len(self._bytes), n_needed), self._file.bytes, MOST_BYTES)
        if n_wanted <= len(self._bytes):
            return False
        self._bytes += self._fetch(len(self._bytes), n_wanted)
        return True

    def _fetch(self, start: int, end: int) -> bytes:
        """Bytes from `start` to `end`. A server that sends the whole file instead is read so far and left."""
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        try:
            with self._client.stream("GET", self._url, headers=headers) as response:
                if response.status_code not in (200, 206):
                    page = f"{hub.endpoint(self._config)}/{self._file.name}"
                    raise hub.refusal(response.status_code, response.headers, what=self._file.name, page=page)
                n_skipped = 0 if response.status_code == 206 else start
                found = bytearray()
                for chunk in response.iter_bytes():
                    found += chunk
                    if len(found) >= n_skipped + end - start:
                        break
        except httpx2.HTTPError as error:
            raise hub.unreachable(self._config, hub.describe(error)) from None
        wanted = bytes(found[n_skipped : n_skipped + end - start])
        if len(wanted) < end - start:
            raise HubError(f"The hub sent less of {self._file.name} than it holds.", hint="Try again.")
        return wanted


def _client(config: Config) -> httpx2.Client:
    hub.refuse_offline(config, what="Reading a model's header on the hub")
    timeout = httpx2.Timeout(hub.REQUEST_TIMEOUT_S)
    return httpx2.Client(follow_redirects=True, timeout=timeout, headers=hub.auth_headers())


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


def _kept_path(repo: HubRepo, model: RemoteModel, config: Config) -> Path:
    key = hashlib.sha256(f"{repo.id} {repo.revision} {model.first}".encode()).hexdigest()
    return config.paths.cache / "headers" / f"{key[:32]}.json"


def _recall(path: Path) -> RemoteHeader | None:
    kept = receipt.read_json(path)
    try:
        values = dict(kept["shape"])
        layers = [LayerShape(**{**x, "kind": LayerKind(x["kind"])}) for x in values.pop("layers")]
        facts = {key: kept["facts"][key] for key in SHOWN}
        return RemoteHeader(facts, ModelShape(layers=tuple(layers), **values))
    except (KeyError, TypeError, ValueError):
        return None
