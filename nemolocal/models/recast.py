"""What a model file becomes when its tensors get other types: its size to the byte, its shape for a plan.

The rules are those of llama.cpp's quantizer (src/llama-quant.cpp): all keys are copied but those of a split,
two are set, parts become one file, and each tensor is padded. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from nemolocal.errors import ModelFileError
from nemolocal.models import gguf, gguf_shape
from nemolocal.models.gguf import GgufInfo
from nemolocal.models.gguf_header import ALIGNMENT, TENSOR_TYPES, Header, TensorInfo

_BLOCKS: Final = {name: (n_block, n_bytes) for name, n_block, n_bytes in TENSOR_TYPES.values()}
_N_KEY_BYTES: Final = 8 + 4  # the length of its name, and the number of its type
_SET_KEYS: Final = {"general.quantization_version": 4, "general.file_type": 4}
_DROPPED_KEYS: Final = {"split.no": 2, "split.count": 2, "split.tensors.count": 4}
"""With the bytes of their values."""


def recast(info: GgufInfo, quant: str, types: Mapping[str, str], target: Path) -> GgufInfo:
    """The model as it would be in `target`, with these types of its tensors by their names.

    Raises ModelFileError for a file that the quantizer would spoil, and when it cannot be read.
    """
    header = _header(info)
    tensors = tuple(_as(tensor, types[tensor.name]) for tensor in info.tensors)
    return replace(
        info,
        path=target,
        parts=(target,),
        size_bytes=_file_bytes(header, tensors),
        quant=quant,
        tensors=tensors,
        shape=gguf_shape.derive(header, tensors),
    )


def _header(info: GgufInfo) -> Header:
    try:
        header = gguf.read_header(info.path)
    except OSError as error:
        raise ModelFileError(
            f"{info.path.name}: The file cannot be read ({error.strerror}).", kind="missing"
        ) from None
    alignment = header.keys.get("general.alignment", ALIGNMENT)
    if alignment != ALIGNMENT:  # it would say so in the new file, and not do it
        raise ModelFileError(
            f"{info.path.name} aligns its tensors to {alignment} bytes, which llama.cpp's quantizer "
            "does not keep.",
            kind="unsupported",
            hint="Get the model as a file of another maker.",
        )
    return header


def _as(tensor: TensorInfo, type_name: str) -> TensorInfo:
    """The same tensor in another type; where it will lie is not said."""
    if type_name not in _BLOCKS:
        raise ModelFileError(f"{tensor.name} would be of the unknown type {type_name}.", kind="unsupported")
    n_block, n_bytes = _BLOCKS[type_name]
    return replace(tensor, type_name=type_name, offset=0, n_bytes=tensor.n_elements // n_block * n_bytes)


def _file_bytes(header: Header, tensors: tuple[TensorInfo, ...]) -> int:
    head = header.keys_end
    for key, n_bytes in _SET_KEYS.items():
        head += 0 if key in header.keys else _N_KEY_BYTES + len(key) + n_bytes
    for key, n_bytes in _DROPPED_KEYS.items():
        head -= _N_KEY_BYTES + len(key) + n_bytes if key in header.keys else 0
    head += sum(map(_info_bytes, tensors))
    return _pad(head) + sum(_pad(tensor.n_bytes) for tensor in tensors)


def _info_bytes(tensor: TensorInfo) -> int:
    """What a tensor takes in the list: its name, its dimensions without the last ones that are 1, its type
    and its offset (ggml/src/gguf.cpp)."""
    n_dims = max((i for i, dim in enumerate(tensor.dims, 1) if dim > 1), default=1)
    return 8 + len(tensor.name.encode()) + 4 + 8 * n_dims + 4 + 8


def _pad(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
