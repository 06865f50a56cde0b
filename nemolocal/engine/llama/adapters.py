"""LoRA adapters on llama.cpp: loaded once beside the model, switched on with a scale for each batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from nemolocal.engine.backend import Adapters
from nemolocal.errors import EngineError


class LoraAdapters:
    """The loaded adapters of one context. The model frees them with itself."""

    def __init__(self, library: Any, context: Any, pointers: Sequence[Any]) -> None:
        self._library = library
        self._context = context
        self._pointers = pointers
        self._used: Adapters = ()

    def use(self, scales: Adapters) -> None:
        """Compute with these scales from now on, one for each adapter; 0 leaves it out."""
        if scales == self._used:
            return
        self._used = scales
        chosen = [(p, scale) for p, scale in zip(self._pointers, scales, strict=True) if scale]
        n = len(chosen)
        addresses = (ctypes.cast(pointer, ctypes.c_void_p).value for pointer, _ in chosen)
        pointers = (ctypes.c_void_p * n)(*addresses)
        factors = (ctypes.c_float * n)(*(scale for _, scale in chosen))
        array = ctypes.cast(pointers, ctypes.POINTER(self._library.llama_adapter_lora_p_ctypes))
        if self._library.llama_set_adapters_lora(self._context, array, n, factors) != 0:
            raise EngineError("llama.cpp refused the LoRA adapters.")
