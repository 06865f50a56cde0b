"""Which model is this, by its content? A short text that two files share only when they hold the same model.

Cheap enough to be asked at every load: it reads headers and samples of the weights, not the whole. Knows
nothing of the store and its receipts: a receipt says what was downloaded, and a file may have been exchanged
under its name since, while saved states are of use only to the weights that are there now.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from nemolocal.errors import ModelFileError
from nemolocal.models import gguf, gguf_header
from nemolocal.models.gguf_header import Header, NeedMoreBytesError, TensorInfo

SAMPLE_BYTES = 4096
SAMPLE_EVERY_BYTES = 32 << 20
MAX_SPACED_SAMPLES = 256
"""Of one file, besides one for each tensor; a larger file is sampled at wider spaces."""

_SCHEME = b"nemolocal model fingerprint 1"
_CHUNK_BYTES = 1 << 20


def fingerprint(path: str | Path) -> str:
    """The fingerprint of a model file, 64 hexadecimal digits; any part of a split model stands for the whole.

    A sha256 over the number of parts and, for each in its order, the size, the whole header (metadata,
    tokens, tensor table) and SAMPLE_BYTES at evenly spaced places of every tensor, at least one in each.
    Names, folders and times of files do not count. An 8B model takes 10 MB of reading.

    Told apart: other metadata, tokens or templates, other quantizations, and other weights wherever a tensor
    was written anew as a whole, as training, merging and quantizing do. Not told apart: files of the same
    header that differ only in bytes between the samples, such as a single flipped bit. It is a key for
    caches, not a proof that a file is whole or honest.

    Raises ModelFileError where a part is missing, cannot be read, or has no sound header.
    """
    path = Path(path)
    split = gguf.parse_split_name(path.name)
    numbers = range(1, split.n_parts + 1) if split else ()
    parts = [path.with_name(split.part(number)) for number in numbers] if split else [path]
    digest = hashlib.sha256(_SCHEME)
    digest.update(struct.pack("<Q", len(parts)))
    for part in parts:
        for piece in _pieces(part):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    """The bytes of one file that count."""
    try:
        with path.open("rb") as stream:
            size_bytes = stream.seek(0, 2)
            stream.seek(0)
            header = _parse(stream, path.name)
            yield struct.pack("<QQ", size_bytes, header.data_offset)
            yield from _header_bytes(stream, header)
            for offset in _sample_offsets(header):
                stream.seek(offset)
                yield stream.read(SAMPLE_BYTES)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ModelFileError(f"{path.name}: The file cannot be read ({reason}).", kind="missing") from None


def _parse(stream: BinaryIO, name: str) -> Header:
    try:
        return gguf_header.parse(stream)
    except ModelFileError as error:
        raise ModelFileError(f"{name}: {error.message}", kind=error.kind, hint=error.hint) from None
    except NeedMoreBytesError:
        raise ModelFileError(
            f"{name}: The file ends within its header.", kind="truncated", hint="Download it again."
        ) from None


def _header_bytes(stream: BinaryIO, header: Header) -> Iterator[bytes]:
    stream.seek(0)
    n_left = header.data_offset
    while n_left > 0 and (chunk := stream.read(min(n_left, _CHUNK_BYTES))):
        yield chunk
        n_left -= len(chunk)


def _sample_offsets(header: Header) -> Iterator[int]:
    """Places in the file, counted from its start: one in the middle of each equal share of a tensor."""
    n_weights_bytes = sum(tensor.n_bytes for tensor in header.tensors)
    spacing = max(SAMPLE_EVERY_BYTES, n_weights_bytes // MAX_SPACED_SAMPLES)
    for tensor in header.tensors:
        for offset in _within(tensor, spacing):
            yield header.data_offset + offset


def _within(tensor: TensorInfo, spacing: int) -> Iterator[int]:
    n_samples = 1 + tensor.n_bytes // spacing
    for i in range(n_samples):
        middle = tensor.offset + tensor.n_bytes * (2 * i + 1) // (2 * n_samples)
        # A tensor that is smaller than a sample is read from its beginning.
        yield max(tensor.offset, middle - SAMPLE_BYTES // 2)
