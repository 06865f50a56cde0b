"""What llama.cpp has allocated, and what it could not, as its log tells. The lines are those of llama.cpp as
vendored in llama-cpp-python 0.3.36.

Pure: knows lines and numbers, not the library. A line that is not known says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from nemolocal.engine.messages import Held, Shortage

MIB: Final = 1 << 20

# src/llama-model.cpp, llama-kv-cache.cpp, llama-memory-recurrent.cpp, llama-context.cpp, llama-adapter.cpp
_SIZE: Final = re.compile(
    r"(\S+)\s+(model|KV|RS|DSV4 \S+ state|output|compute|LoRA) buffer size = +(\d+\.\d+) MiB$"
)
_FAILED: Final = re.compile(r"failed to allocate (\S+) buffer of size (\d+)$")  # ggml/src/ggml-alloc.c
_GPU: Final = re.compile(r"CUDA(\d+)$")
_SEVERAL: Final = re.compile(r"Meta\((.+)\)$")  # one buffer on each; the size is the largest's

Sizes = dict[tuple[str, str], int]
"""Bytes by (llama.cpp's name of a device, its word for what lies there)."""


class Allocated:
    """Reads the log line by line. `gpus` are UUIDs in the order in which CUDA counts them. `free_bytes` asks
    what is free on a device of llama.cpp's name, None where it cannot be told."""

    def __init__(self, gpus: Sequence[str] = (), free_bytes: Callable[[str], int | None] = lambda _: None):
        self._gpus = tuple(gpus)
        self._free_bytes = free_bytes
        self._models: list[Sizes] = [{}]
        self.shortage: Shortage | None = None

    def begin(self) -> int:
        """Another model is about to be loaded; its number."""
        self._models.append({})
        self.shortage = None
        return len(self._models) - 1

    def hear(self, line: str) -> None:
        if found := _SIZE.search(line):
            name, what, mib = found.groups()
            sizes, n_bytes = self._models[-1], round(float(mib) * MIB)
            # A context says anew what its computing takes whenever that changes; all else comes on top.
            sizes[name, what] = n_bytes + (0 if what == "compute" else sizes.get((name, what), 0))
        elif found := _FAILED.search(line):
            name, wanted = found.groups()
            device = self._devices(name)[0]
            held = next((each for each in self.held(len(self._models) - 1) if each.device == device), None)
            self.shortage = Shortage(
                device=device,
                wanted_bytes=int(wanted),
                free_bytes=self._free_bytes(name),
                held_bytes=held.total_bytes if held else 0,
            )

    def held(self, number: int) -> tuple[Held, ...]:
        """What lies on each device for the model of this number, and beside it for those that came later."""
        found: dict[str, dict[str, int]] = {}
        for n, sizes in enumerate(self._models[number:]):
            for (name, what), n_bytes in sizes.items():
                field = "beside_bytes" if n or what == "LoRA" else _field(what)
                for device in self._devices(name):
                    of_device = found.setdefault(device, {})
                    of_device[field] = of_device.get(field, 0) + n_bytes
        mapped = any(name.endswith("_Mapped") for name, _ in self._models[number])
        return tuple(Held(device, is_mapped=mapped and not device, **of) for device, of in found.items())

    def _devices(self, name: str) -> tuple[str, ...]:
        """UUIDs of the GPUs that a name stands for, "" for plain memory, whoever may reach it."""
        if several := _SEVERAL.match(name):
            return tuple(device for part in several[1].split(",") for device in self._devices(part))
        gpu = _GPU.match(name)
        if not gpu:
            return ("",)
        index = int(gpu[1])
        return (self._gpus[index] if index < len(self._gpus) else name,)


def _field(what: str) -> str:
    if what.startswith("DSV4"):
        return "state_bytes"
    words = {"model": "weights", "KV": "kv", "RS": "state", "output": "output", "compute": "compute"}
    return f"{words[what]}_bytes"
