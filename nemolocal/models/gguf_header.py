"""The bytes of a GGUF header: keys and tensor infos, read with bounds on everything.

Reads from any binary stream, also from the first part of a file: where the bytes end too early it raises
NeedMoreBytesError, so that a remote header can be fetched piece by piece. Nothing is trusted: counts and
lengths are held against the limits below before anything is allocated, and nothing recurses. Knows nothing
of paths, of architectures, or of what the keys mean.

The format is that of llama.cpp's ggml/src/gguf.cpp, whose own checks are all made here too.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final

from nemolocal.errors import ModelFileError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)

ALIGNMENT: Final = 32
"""Tensors begin at multiples of this where a header does not say otherwise."""

MAX_HEADER_BYTES: Final = 128 << 20
MAX_KEYS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 16
MAX_KEY_BYTES: Final = 1 << 16
MAX_NAME_BYTES: Final = 63  # GGML_MAX_NAME - 1
MAX_STRING_BYTES: Final = 16 << 20
MAX_ARRAY_ELEMENTS: Final = 1 << 30
MAX_ELEMENTS: Final = 1 << 63
N_KEPT_ELEMENTS: Final = 4096
"""Longer arrays are counted and skipped: they are vocabularies, which only the engine needs."""

_CHUNK_BYTES: Final = 1 << 20

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class SkippedArray:
    """An array whose elements were not kept; `n` is how many there are."""

    n: int


Value = Scalar | tuple[Scalar, ...] | SkippedArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `dims` in elements, the row first; `offset` and `n_bytes` within the data section."""

    name: str
    dims: tuple[int, ...]
    type_name: str
    offset: int
    n_bytes: int

    @property
    def n_elements(self) -> int:
        n = 1
        for dim in self.dims:
            n *= dim
        return n


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `data_offset` is where the tensors' bytes begin, `needed_bytes` the length that the
    file must have at least; the keys end at `keys_end`."""

    version: int
    keys: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    keys_end: int = 0

    @property
    def needed_bytes(self) -> int:
        return self.data_offset + max((t.offset + t.n_bytes for t in self.tensors), default=0)


class NeedMoreBytesError(Exception):
    """The stream ends inside the header; at least `needed_bytes` from its start are wanted."""

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(needed_bytes)
        self.needed_bytes = needed_bytes


TENSOR_TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
"""Number -> name, elements of a block, bytes of a block (ggml/include/ggml.h and ggml_type_size)."""

_TYPE_STRING: Final = 8
_TYPE_ARRAY: Final = 9
_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


def corrupt(what: str) -> ModelFileError:
    """The error for a header that contradicts itself; `what` completes "The GGUF header is damaged: "."""
    line = "".join(c if c.isprintable() else "?" for c in what)
    return ModelFileError(
        f"The GGUF header is damaged: {line}.", kind="corrupt", hint="Download the file again."
    )


def parse(stream: BinaryIO) -> Header:
    """Read a header from the beginning of `stream`.

    Raises NeedMoreBytesError when the stream ends before the header does, ModelFileError (not_gguf,
    old_format, unsupported, corrupt) when more bytes would not help.
    """
    reader = _Reader(stream)
    if reader.take(4) != MAGIC:
        raise ModelFileError("The file does not begin with GGUF.", kind="not_gguf")
    version = _read_version(reader)
    n_tensors = reader.count(MAX_TENSORS, "tensors")
    n_keys = reader.count(MAX_KEYS, "keys")
    keys: dict[str, Value] = {}
    for _ in range(n_keys):
        key = reader.text(MAX_KEY_BYTES, "a key")
        if not key or key in keys:
            raise corrupt(f"the key '{key[:80]}' is there twice" if key else "a key has no name")
        keys[key] = _read_value(reader, reader.u32(), key)
    keys_end = reader.position
    alignment = keys.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise corrupt("its alignment is not a power of two")
    tensors = _read_tensors(reader, n_tensors, alignment)
    return Header(version, keys, tensors, _pad(reader.position, alignment), keys_end)


def _read_version(reader: _Reader) -> int:
    version = reader.u32()
    if version & 0xFFFF == 0:
        raise ModelFileError(
            "This GGUF file is big-endian, made for another kind of processor.",
            kind="unsupported",
            hint="Get the little-endian file.",
        )
    if version < VERSIONS[0]:
        raise ModelFileError(
            f"This is version {version} of the GGUF format, which llama.cpp no longer reads.",
            kind="old_format",
            hint="Get a newer file of the model.",
        )
    if version > VERSIONS[-1]:
        raise ModelFileError(
            f"This is version {version} of the GGUF format; up to {VERSIONS[-1]} can be read.",
            kind="unsupported",
            hint="Update NemoLocal.",
        )
    return version


def _read_value(reader: _Reader, type_number: int, key: str) -> Value:
    if type_number == _TYPE_STRING:
        return reader.text(MAX_STRING_BYTES, f"the text of '{key}'")
    if type_number == _TYPE_ARRAY:
        return _read_array(reader, key)
    scalar = _SCALARS.get(type_number)
    if scalar is None:
        raise corrupt(f"'{key[:80]}' has the unknown type {type_number}")
    value: Scalar = scalar.unpack(reader.take(scalar.size))[0]
    return value


def _read_array(reader: _Reader, key: str) -> Value:
    type_number = reader.u32()
    n = reader.count(MAX_ARRAY_ELEMENTS, f"elements of '{key}'")
    if type_number == _TYPE_STRING:
        if n > N_KEPT_ELEMENTS:
            reader.skip_texts(n)
            return SkippedArray(n)
        return tuple(reader.text(MAX_STRING_BYTES, f"the text of '{key}'") for _ in range(n))
    scalar = _SCALARS.get(type_number)
    if scalar is None:
        raise corrupt(f"'{key[:80]}' is a list of the unknown type {type_number}")
    if n > N_KEPT_ELEMENTS:
        reader.skip(n * scalar.size)
        return SkippedArray(n)
    return tuple(value for (value,) in scalar.iter_unpack(reader.take(n * scalar.size)))


def _read_tensors(reader: _Reader, n_tensors: int, alignment: int) -> tuple[TensorInfo, ...]:
    tensors: list[TensorInfo] = []
    names: set[str] = set()
    end = 0
    for _ in range(n_tensors):
        tensor = _read_tensor(reader)
        if tensor.name in names:
            raise corrupt(f"the tensor '{tensor.name}' is there twice")
        if tensor.offset != end:
            raise corrupt(f"the tensor '{tensor.name}' is not where it should be")
        names.add(tensor.name)
        end += _pad(tensor.n_bytes, alignment)
        tensors.append(tensor)
    return tuple(tensors)


def _read_tensor(reader: _Reader) -> TensorInfo:
    name = reader.text(MAX_NAME_BYTES, "a tensor's name")
    n_dims = reader.u32()
    if n_dims > 4:
        raise corrupt(f"the tensor '{name}' has {n_dims} dimensions")
    dims = tuple(reader.u64() for _ in range(n_dims))
    n_elements = 1
    for dim in dims:
        n_elements *= dim
    if n_elements >= MAX_ELEMENTS or 0 in dims:
        raise corrupt(f"the tensor '{name}' has the size {' x '.join(map(str, dims))}")
    type_number = reader.u32()
    if type_number not in TENSOR_TYPES:
        raise ModelFileError(
            f"The tensor '{name}' has the type {type_number}, which this llama.cpp does not read.",
            kind="unsupported",
            hint="Choose another quantization of the model.",
        )
    type_name, n_block, block_bytes = TENSOR_TYPES[type_number]
    if (dims[0] if dims else 1) % n_block:
        raise corrupt(f"a row of the tensor '{name}' is no multiple of {n_block}")
    return TensorInfo(name, dims, type_name, reader.u64(), n_elements // n_block * block_bytes)


def _pad(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


class _Reader:
    """A window on the stream that grows in chunks; `position` counts from the stream's start."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._buffer = b""
        self._begin = 0  # stream offset of the buffer
        self._at = 0

    @property
    def position(self) -> int:
        return self._begin + self._at

    def take(self, n: int) -> bytes:
        if self._at + n > len(self._buffer):
            self._fill(n)
        piece = self._buffer[self._at : self._at + n]
        self._at += n
        return piece

    def u32(self) -> int:
        value: int = _U32.unpack(self.take(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack(self.take(8))[0]
        return value

    def count(self, limit: int, what: str) -> int:
        n = self.u64()
        if n > limit:
            raise corrupt(f"it claims {n} {what[:80]}")
        return n

    def text(self, limit: int, what: str) -> str:
        n = self.u64()
        if n > limit:
            raise corrupt(f"{what[:80]} claims a length of {n} bytes")
        return self.take(n).decode("utf-8", errors="replace")

    def skip(self, n: int) -> None:
        """Pass over bytes without keeping them; they must exist."""
        while n > 0:
            step = min(n, _CHUNK_BYTES)
            if self._at + step > len(self._buffer):
                self._fill(step, for_bytes=n)
            self._at += step
            n -= step

    def skip_texts(self, n: int) -> None:
        """Pass over `n` texts. A vocabulary has hundreds of thousands, hence the bare loop."""
        unpack_from = _U64.unpack_from
        buffer, at = self._buffer, self._at
        for i in range(n):
            if at + 8 > len(buffer):
                self._at = at
                self._fill(8, for_bytes=8 * (n - i))
                buffer, at = self._buffer, self._at
            length: int = unpack_from(buffer, at)[0]
            at += 8 + length
            if at > len(buffer):
                if length > MAX_STRING_BYTES:
                    raise corrupt(f"a text in a list claims a length of {length} bytes")
                self._at = at - length
                self._fill(length, for_bytes=length + 8 * (n - i - 1))
                buffer, at = self._buffer, self._at + length
        self._at = at

    def _fill(self, n: int, *, for_bytes: int = 0) -> None:
        """Make `n` bytes available from here. `for_bytes` is what is known to be wanted in all."""
        needed = self.position + max(n, for_bytes)
        if needed > MAX_HEADER_BYTES:
            raise corrupt(f"it is longer than {MAX_HEADER_BYTES >> 20} MiB")
        rest = self._buffer[self._at :]
        wanted = max(n - len(rest), _CHUNK_BYTES)
        self._begin += self._at
        self._at = 0
        self._buffer = rest + self._stream.read(wanted)
        if len(self._buffer) < n:
            raise NeedMoreBytesError(needed)
