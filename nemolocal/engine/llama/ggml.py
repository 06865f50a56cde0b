"""Functions of ggml, the library below llama.cpp, which llama_cpp itself does not hand out."""

from __future__ import annotations

import ctypes
from typing import Any


def function(library: Any, name: str, result: Any, *arguments: Any, dll: str = "ggml-base.dll") -> Any:
    """A C function of the very copy of ggml that llama.cpp uses. Raises AttributeError or OSError where it
    has none of that name."""
    try:
        found = getattr(library._lib, name)
    except AttributeError:  # Windows does not look into the libraries that a library has loaded
        found = getattr(ctypes.CDLL(dll), name)
    found.restype, found.argtypes = result, list(arguments)
    return found


def free_bytes(library: Any, device: str) -> int | None:
    """What is free now on a device of this name, like CUDA0; None for plain memory and where there is no
    such device."""
    if device.startswith("CPU"):
        return None  # ggml does not look at what other programs have
    try:
        by_name = function(
            library, "ggml_backend_dev_by_name", ctypes.c_void_p, ctypes.c_char_p, dll="ggml.dll"
        )
        sizes = ctypes.POINTER(ctypes.c_size_t)
        memory = function(library, "ggml_backend_dev_memory", None, ctypes.c_void_p, sizes, sizes)
    except (AttributeError, OSError):
        return None
    found = by_name(device.encode())
    if not found:
        return None
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    memory(found, ctypes.byref(free), ctypes.byref(total))
    return free.value
