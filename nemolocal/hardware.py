"""What this machine is made of: GPUs, CPU, RAM, disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device. `index` is NVML's; `free_bytes` is what is free now; `state` is "ok" or a short
    reason why the device cannot be used; `compute_capability` is like "8.9"."""

    index: int
    uuid: str
    name: str
    compute_capability: str
    total_bytes: int
    free_bytes: int
    pci_bus_id: str = ""
    driver: str = ""
    state: str = "ok"


@dataclass(frozen=True, slots=True)
class Cpu:
    """`features` holds the vector extensions that llama.cpp can use, for example avx2, avx512f, neon."""

    name: str
    physical_cores: int
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ram:
    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """`mode` is "gpu" when at least one GPU can be used; `reason` says in one line why it is what it is.
    `disk_free_bytes` is the free space where models are kept."""

    mode: Literal["gpu", "cpu"]
    reason: str
    gpus: tuple[Gpu, ...]
    cpu: Cpu
    ram: Ram
    disk_free_bytes: int = 0
