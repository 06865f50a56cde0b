"""How fast devices read memory and compute, roughly, before anything is measured. For forecasts, never
promises."""

from __future__ import annotations

import re
from functools import cache
from typing import Final

GB: Final = 1_000_000_000
TERA: Final = 1_000_000_000_000

EFFICIENCY: Final = 0.75
HBM_EFFICIENCY: Final = 0.55
HBM_BANDWIDTH: Final = 1900
"""Share of the memory's bandwidth that reading quantized weights reaches; measured on an H200: the 8B shape
takes 3.6 ms a token and the 70B shape 22 ms."""

LAYER_S: Final = 60e-6
TENSOR_LAYER_S: Final = 90e-6
"""Launching one layer's kernels, and with every matrix cut over cards also their coming together over
NVLink; measured on two H200s: 64.7 tokens a second with the 70B shape, 280 with the 8B shape."""

QUANTIZED_KV_COST: Final = 2.7
"""How much longer than in f16 it takes to read a quantized cache of as many tokens; measured on an H200:
18 % of the speed at 8,192 tokens, 33 % at 32,768."""

CPU_BANDWIDTH: Final = 45 * GB
"""What two channels of RAM give to a CPU that reads weights; servers have more. A rough figure."""

CPU_LAYER_S: Final = 120e-6

EXPERT_EFFICIENCY: Final = 0.4
"""Of the operations that a GPU manages on whole matrices, what it does on experts, of which each gets only
some tokens of a batch. A rough figure."""

CORE_COMPUTE: Final = 60 * GB
"""Operations a second of one core on quantized matrices, with AVX2. A rough figure."""

BUS_BANDWIDTH: Final = 20 * GB
"""What a GPU copies from RAM: to read a prompt, weights that lie there are brought to it. PCI Express 4.0."""

PIPELINE_GAIN: Final = 0.87
"""Of several cards' speed together, what a long prompt gets that flows through them one after another, and
with every matrix cut over them; measured on two H200s with the 70B shape."""
TENSOR_GAIN: Final = 0.72

# By what the driver calls the card; the longest name that it holds in whole words counts. GB/s of its
# memory, from makers' data sheets, and the 10^12 operations a second that llama.cpp reaches on quantized
# matrices when it reads a prompt: about twice what the sheets give for FP32, more on A100s and cards of the
# Turing kind, less without tensor cores. Measured: 152 on an H200. The others are rough.
CARDS: Final = {
    "GTX 1080 Ti": (484, 13), "GTX 1660": (192, 6), "GTX 1660 SUPER": (336, 6), "GTX 1660 Ti": (288, 6),
    "RTX 2060": (336, 20), "RTX 2060 SUPER": (448, 22), "RTX 2070": (448, 23), "RTX 2080": (448, 31),
    "RTX 2080 SUPER": (496, 34), "RTX 2080 Ti": (616, 43), "RTX 3050": (224, 18), "RTX 3060": (360, 28),
    "RTX 3060 Ti": (448, 33), "RTX 3070": (448, 41), "RTX 3070 Ti": (608, 43), "RTX 3080": (760, 60),
    "RTX 3080 Ti": (912, 68), "RTX 3090": (936, 70), "RTX 3090 Ti": (1008, 78), "RTX 4060": (272, 30),
    "RTX 4060 Ti": (288, 44), "RTX 4070": (504, 58), "RTX 4070 SUPER": (504, 70), "RTX 4070 Ti": (504, 80),
    "RTX 4070 Ti SUPER": (672, 88), "RTX 4080": (717, 97), "RTX 4080 SUPER": (736, 104),
    "RTX 4090": (1008, 155), "RTX 5050": (320, 26), "RTX 5060": (448, 38), "RTX 5060 Ti": (448, 47),
    "RTX 5070": (672, 62), "RTX 5070 Ti": (896, 88), "RTX 5080": (960, 112), "RTX 5090": (1792, 200),
    "RTX A2000": (288, 16), "RTX A4000": (448, 38), "RTX A4500": (640, 46), "RTX A5000": (768, 55),
    "RTX A6000": (768, 72), "RTX 2000 Ada": (224, 24), "RTX 4000 Ada": (360, 53), "RTX 4500 Ada": (432, 75),
    "RTX 5000 Ada": (576, 125), "RTX 6000 Ada": (960, 165), "RTX PRO 4000 Blackwell": (672, 90),
    "RTX PRO 4500 Blackwell": (896, 105), "RTX PRO 5000 Blackwell": (1344, 140),
    "RTX PRO 6000 Blackwell": (1792, 230), "RTX PRO 6000 Blackwell Max-Q": (1792, 190),
    "Tesla T4": (320, 16), "NVIDIA L4": (300, 50),
    "NVIDIA L40": (864, 150), "NVIDIA L40S": (864, 165), "NVIDIA A10": (600, 58), "NVIDIA A10G": (600, 60),
    "V100": (900, 25), "V100S": (1134, 27), "Quadro RTX 4000": (416, 22), "Quadro RTX 5000": (448, 35),
    "Quadro RTX 6000": (672, 50), "Quadro RTX 8000": (672, 50), "A100": (1555, 75),
    "A100 80GB": (1935, 75), "A100-PCIE-80GB": (1935, 75), "A100-SXM4-80GB": (2039, 75),
    "H20": (4000, 80), "H100 PCIe": (2000, 110), "H100 NVL": (3938, 140), "H100": (3350, 150),
    "GH200": (4000, 150), "GH200 144G HBM3e": (4900, 152), "H200": (4800, 152), "B200": (8000, 180),
    "B300": (8000, 180), "GB10": (273, 55), "NVIDIA Thor": (273, 16),
    # Laptops have other chips under the same names, and as much power as their makers give them.
    "RTX 3060 Laptop GPU": (336, 20), "RTX 3070 Laptop GPU": (448, 30), "RTX 3070 Ti Laptop GPU": (448, 32),
    "RTX 3080 Laptop GPU": (448, 36), "RTX 3080 Ti Laptop GPU": (512, 42), "RTX 4050 Laptop GPU": (192, 18),
    "RTX 4060 Laptop GPU": (256, 23), "RTX 4070 Laptop GPU": (256, 30), "RTX 4080 Laptop GPU": (432, 48),
    "RTX 4090 Laptop GPU": (576, 64), "RTX 5060 Laptop GPU": (384, 26), "RTX 5070 Laptop GPU": (384, 30),
    "RTX 5070 Ti Laptop GPU": (672, 42), "RTX 5080 Laptop GPU": (896, 50), "RTX 5090 Laptop GPU": (896, 62),
}  # fmt: skip


@cache
def _card(name: str) -> tuple[int, int] | None:
    known = [card for card in CARDS if re.search(rf"\b{re.escape(card)}\b", name, re.IGNORECASE)]
    card = max(known, key=len, default="")
    rest = name.casefold().replace(card.casefold(), "")
    if not card or any(word in rest for word in ("laptop", "mobile", "max-q", "mig ")):
        return None  # the same names, other chips, or a slice of one
    return CARDS[card]


def bandwidth(name: str) -> int | None:
    """Bytes per second of a GPU's memory, None for a card that the table does not know."""
    card = _card(name)
    return card[0] * GB if card else None


def read_s(name: str, n_bytes: float) -> float | None:
    """Seconds that a GPU takes to read so many bytes once, None for a card that the table does not know."""
    speed = bandwidth(name)
    if speed is None:
        return None
    return n_bytes / (speed * (HBM_EFFICIENCY if speed >= HBM_BANDWIDTH * GB else EFFICIENCY))


def compute_s(name: str, n_operations: float) -> float | None:
    """Seconds that a GPU takes for so many operations on the matrices of a long prompt, None for a card that
    the table does not know."""
    card = _card(name)
    return n_operations / (card[1] * TERA) if card else None
