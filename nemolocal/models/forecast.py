"""How fast a plan will write, roughly, before anything is measured. A forecast, never a promise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

GB = 1_000_000_000

EFFICIENCY = 0.75
HBM_EFFICIENCY = 0.55
HBM_BANDWIDTH = 1900
"""Share of the memory's bandwidth that reading quantized weights reaches; measured on an H200: the 8B shape
takes 3.6 ms a token and the 70B shape 22 ms."""

LAYER_S = 60e-6
TENSOR_LAYER_S = 90e-6
"""Launching one layer's kernels, and with every matrix cut over cards also their coming together over
NVLink; measured on two H200s: 64.7 tokens a second with the 70B shape, 280 with the 8B shape."""

CPU_BANDWIDTH = 45 * GB
"""What two channels of RAM give to a CPU that reads weights; servers have more. A rough figure."""

CPU_LAYER_S = 120e-6

# GB/s by what the driver calls the card; the longest name that it holds in whole words counts. Makers'
# data sheets.
BANDWIDTH = {
    "GTX 1080 Ti": 484, "GTX 1660": 192, "GTX 1660 SUPER": 336, "GTX 1660 Ti": 288, "RTX 2060": 336,
    "RTX 2060 SUPER": 448, "RTX 2070": 448, "RTX 2080": 448, "RTX 2080 SUPER": 496, "RTX 2080 Ti": 616,
    "RTX 3050": 224, "RTX 3060": 360, "RTX 3060 Ti": 448, "RTX 3070": 448,
    "RTX 3070 Ti": 608, "RTX 3080": 760, "RTX 3080 Ti": 912, "RTX 3090": 936, "RTX 3090 Ti": 1008,
    "RTX 4060": 272, "RTX 4060 Ti": 288, "RTX 4070": 504, "RTX 4070 Ti": 504, "RTX 4070 Ti SUPER": 672,
    "RTX 4080": 717, "RTX 4080 SUPER": 736, "RTX 4090": 1008, "RTX 5060": 448, "RTX 5060 Ti": 448,
    "RTX 5070": 672, "RTX 5070 Ti": 896, "RTX 5080": 960, "RTX 5090": 1792, "RTX A2000": 288,
    "RTX A4000": 448, "RTX A5000": 768, "RTX A6000": 768, "RTX 2000 Ada": 224, "RTX 4000 Ada": 360,
    "RTX 5000 Ada": 576, "RTX 6000 Ada": 960, "RTX PRO 4000 Blackwell": 672, "RTX PRO 5000 Blackwell": 1344,
    "RTX PRO 6000 Blackwell": 1792, "Tesla T4": 320, "NVIDIA L4": 300, "NVIDIA L40": 864, "NVIDIA L40S": 864,
    "NVIDIA A10": 600, "NVIDIA A10G": 600, "A100": 1555, "A100 80GB": 1935, "A100-SXM4-80GB": 2039,
    "H100 PCIe": 2000, "H100": 3350, "H200": 4800, "B200": 8000, "GB10": 273,
}  # fmt: skip


@cache
def bandwidth(name: str) -> int | None:
    """Bytes per second of a GPU's memory, None for a card that the table does not know."""
    if any(word in name.casefold() for word in ("laptop", "mobile", "max-q")):
        return None  # the same names, other memory
    known = [card for card in BANDWIDTH if re.search(rf"\b{re.escape(card)}\b", name, re.IGNORECASE)]
    return BANDWIDTH[max(known, key=len)] * GB if known else None


def read_s(name: str, n_bytes: int) -> float | None:
    """Seconds that a GPU takes to read so many weights once, None for a card that the table does not know."""
    speed = bandwidth(name)
    if speed is None:
        return None
    return n_bytes / (speed * (HBM_EFFICIENCY if speed >= HBM_BANDWIDTH * GB else EFFICIENCY))


def token_s(
    reads: Sequence[tuple[str, int]],
    n_layer: int,
    *,
    cpu_bytes: int = 0,
    n_cpu_layers: int = 0,
    is_parallel: bool = False,
) -> float | None:
    """Seconds for one token of one stream, whose GPUs read (name, bytes) for it one after another, or all at
    once where each matrix is cut over them, and whose CPU reads `cpu_bytes` in `n_cpu_layers` of the layers.

    None when a card is unknown.
    """
    times = [read_s(name, n_bytes) for name, n_bytes in reads]
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        return None
    each = TENSOR_LAYER_S if is_parallel else LAYER_S
    on_gpus = (max(known) if is_parallel else sum(known)) + (n_layer - n_cpu_layers) * each if known else 0.0
    return on_gpus + cpu_bytes / CPU_BANDWIDTH + n_cpu_layers * CPU_LAYER_S
