"""What a machine is made of, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Holder:
    """A program that holds memory of a GPU: `name` is "NemoLocal" for an engine of ours. `used_bytes`
    is 0 where the driver does not tell (Windows)."""

    pid: int
    name: str
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device.

    `index` is NVML's, which counts in the order of the PCI bus; `uuid` is what CUDA_VISIBLE_DEVICES names it
    by. `free_bytes` is what was free when it was asked. `compute_capability` is like "8.9"; `driver_cuda`,
    the newest CUDA that the driver runs, is like "13.0". `state` is "ok", "unused" (healthy, but the
    installed engine cannot use it), "lost", "mig" or "error"; where it is not "ok", `problem` says why in
    one line. The byte counts are 0 where the driver gave none: nothing stale is ever shown.
    `shares_ram` marks a GPU without memory of its own, whose byte counts are the RAM's. `is_slice` marks a
    part that MIG has cut off the GPU of this index: named by its UUID alone, and one to a process.
    `n_links` are its active NVLinks, `holders` the programs in its memory, the largest first. `load` is from
    0 to 1; None where the driver does not say, as for the temperature and the power.
    """

    index: int
    uuid: str
    name: str
    compute_capability: str
    total_bytes: int
    free_bytes: int
    pci_bus_id: str = ""
    driver: str = ""
    driver_cuda: str = ""
    state: str = "ok"
    problem: str = ""
    shares_ram: bool = False
    is_slice: bool = False
    n_links: int = 0
    holders: tuple[Holder, ...] = ()
    load: float | None = None
    temperature_c: int | None = None
    power_w: float | None = None

    @property
    def is_read(self) -> bool:
        """Whether its figures are the driver's."""
        return self.state in ("ok", "unused")


@dataclass(frozen=True, slots=True)
class Cpu:
    """`physical_cores` are those that this process may use. `features` holds the vector extensions that
    llama.cpp can use, for example avx2, avx512f, neon. `n_numa_nodes` is how many parts the RAM has that
    some of these cores reach faster than others."""

    name: str
    physical_cores: int
    features: tuple[str, ...] = ()
    n_numa_nodes: int = 1


@dataclass(frozen=True, slots=True)
class Ram:
    """Memory of the machine, or of the container that this process lives in where that is less."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """`mode` is "gpu" when at least one GPU can be used; `reason` says in one line why it is what it is.
    `gpus` are those that CUDA_VISIBLE_DEVICES leaves, in its order, the unusable ones too.
    `disk_free_bytes` is the free space where models are kept. `engine` says which llama-cpp-python is
    installed and what for. `warnings` say, a line each, what keeps a healthy GPU from being used, and the
    fix."""

    mode: Literal["gpu", "cpu"]
    reason: str
    gpus: tuple[Gpu, ...]
    cpu: Cpu
    ram: Ram
    disk_free_bytes: int = 0
    engine: str = ""
    warnings: tuple[str, ...] = ()
