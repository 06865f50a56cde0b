"""Importance matrices: how much each column of a model's matrices weighs in its answers, as llama.cpp's
imatrix tool writes it. The smallest quantizations need one, and all gain by one.

Both of its formats are read, with bounds on everything (common/imatrix-loader.cpp, tools/quantize).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from nemolocal.errors import ModelFileError
from nemolocal.models import gguf_header
from nemolocal.models.gguf_header import Header, NeedMoreBytesError, TensorInfo

Floats = npt.NDArray[np.floating]
Importance = Mapping[str, bytes]
"""By a tensor's name one float32, little-endian, for each column, of experts one after the other."""

MAX_ENTRIES: Final = 1 << 16
MAX_NAME_BYTES: Final = 1 << 10
_SUMS = ".in_sum2"
_COUNTS = ".counts"
_I32: Final = struct.Struct("<i")


def read(path: Path) -> Importance:
    """The importance matrix in a file. Raises ModelFileError for a file that is none."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as stream:
            is_gguf = stream.read(4) == gguf_header.MAGIC
            stream.seek(0)
            found = _read_gguf(stream, size_bytes) if is_gguf else _read_old(stream, size_bytes)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ModelFileError(f"{path}: The file cannot be read ({reason}).", kind="missing") from None
    except (NeedMoreBytesError, ModelFileError, struct.error):
        found = {}
    if not found:
        raise ModelFileError(
            f"{path.name} is no importance matrix, or a damaged one.",
            kind="unsupported",
            hint="llama.cpp's imatrix tool makes them; some repositories have them as imatrix.gguf or .dat.",
        )
    return found


def _read_gguf(stream: BinaryIO, size_bytes: int) -> dict[str, bytes]:
    header = gguf_header.parse(stream)
    if header.needed_bytes > size_bytes:
        return {}
    tensors = {tensor.name: tensor for tensor in header.tensors}
    found = {}
    for name, sums in tensors.items():
        counts = tensors.get(name.removesuffix(_SUMS) + _COUNTS)
        if name.endswith(_SUMS) and counts:
            values, n_seen = (_floats(stream, header, tensor) for tensor in (sums, counts))
            found[name.removesuffix(_SUMS)] = _means(values, n_seen)
    return found


def _floats(stream: BinaryIO, header: Header, tensor: TensorInfo) -> Floats:
    if tensor.type_name != "F32":
        raise ModelFileError(f"{tensor.name} is not F32", kind="corrupt")
    stream.seek(header.data_offset + tensor.offset)
    return np.frombuffer(stream.read(tensor.n_bytes), "<f4")


def _means(sums: Floats, n_seen: Floats) -> bytes:
    """The sums of each expert by how often it was asked; one that never was weighs evenly."""
    if not len(n_seen) or len(sums) % len(n_seen):
        raise ModelFileError("sums and counts do not match", kind="corrupt")
    counts = np.round(n_seen)[:, None]
    means = sums.reshape(len(n_seen), -1) / np.maximum(counts, 1)
    return np.where(counts > 0, means, 1).astype("<f4").tobytes()


def _read_old(stream: BinaryIO, size_bytes: int) -> dict[str, bytes]:
    """The older format: a count, then for each matrix its name, how many texts, and its values."""

    def number(most: int) -> int:
        n: int = _I32.unpack(stream.read(4))[0]
        if not 0 <= n <= most:
            raise ModelFileError(f"{n} is not possible", kind="corrupt")
        return n

    found = {}
    for _ in range(number(MAX_ENTRIES)):
        name = stream.read(number(MAX_NAME_BYTES)).decode("utf-8", errors="replace")
        n_texts = max(number(1 << 30), 1)
        n_bytes = 4 * number(size_bytes // 4)
        values = stream.read(n_bytes)
        if len(values) < n_bytes:
            raise ModelFileError("it is cut off", kind="truncated")
        found[name] = (np.frombuffer(values, "<f4") / n_texts).astype("<f4").tobytes()
    return found
