"""Machines that tests and the README's table plan for."""

from __future__ import annotations

from nemolocal.hardware import Cpu, Gpu, Hardware, Ram

GIB = 1 << 30


def machine(*gpus: tuple[str, float], ram_gib: float = 32.0) -> Hardware:
    """A machine with these GPUs (name, GiB), of whose memory a desktop has taken half a GiB each."""
    cards = tuple(
        Gpu(
            index=i,
            uuid=f"GPU-{i:08d}-0000-0000-0000-000000000000",
            name=name,
            compute_capability="8.9",
            total_bytes=round(gib * GIB),
            free_bytes=round((gib - 0.5) * GIB),
        )
        for i, (name, gib) in enumerate(gpus)
    )
    return Hardware(
        mode="gpu" if cards else "cpu",
        reason="" if cards else "No NVIDIA driver is installed.",
        gpus=cards,
        cpu=Cpu("Test CPU", 8),
        ram=Ram(round(ram_gib * 1.25 * GIB), round(ram_gib * GIB)),
    )
