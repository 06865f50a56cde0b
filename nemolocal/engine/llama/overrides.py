"""Tensors that do not lie with their layer: experts that stay in RAM while the rest of it is on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from nemolocal.engine.llama import ggml

EXPERTS = r"^blk\.({})\.ffn_(up|down|gate_up|gate)_(ch|)exps\."
"""The matrices of a block's experts, but not its router and what every token passes (common/fit.cpp)."""


class Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override: a pattern of tensors' names, and where those go."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def experts_in_ram(library: Any, blocks: Sequence[int]) -> Any:
    """The list, ended by an empty entry, that keeps the experts of these blocks in RAM. It must live as long
    as the model is being loaded."""
    pattern = EXPERTS.format("|".join(str(block) for block in blocks)).encode()
    return (Override * 2)(Override(pattern, _ram(library)), Override(None, None))


def _ram(library: Any) -> int:
    """ggml's type of plain memory; llama.cpp compares pointers."""
    return int(ggml.function(library, "ggml_backend_cpu_buffer_type", ctypes.c_void_p)())
