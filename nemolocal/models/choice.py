"""Which quantization is preferred to which. Real bytes decide; a label only says what the bytes buy.

K-quants fall back to larger types where a model's widths are no multiple of 256, so that for some Nemotrons
Q6_K is as large as Q8_0 and Q3_K as IQ4_XS: a file is left out where a better one costs next to nothing
more. Knows nothing of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from nemolocal.models.shape import ModelShape

Aim = Literal["balanced", "quality", "speed"]

Q6_CLASS: Final = 6.7
"""Beyond this, more bytes cost speed and buy nothing that is seen."""

Q4_CLASS: Final = 4.9
"""What speed asks for, and what a CPU is given: each token reads every weight, there at a tenth of a GPU's
speed."""

BF16_CLASS: Final = 16.0

AIMS: Final[dict[Aim, float]] = {"balanced": Q6_CLASS, "quality": BF16_CLASS, "speed": Q4_CLASS}
"""How far up each aim goes on GPUs."""

CPU_AIMS: Final[dict[Aim, float]] = {"balanced": Q4_CLASS, "quality": Q6_CLASS, "speed": Q4_CLASS}

GOOD: Final = 4.2
"""Below this, answers begin to suffer: a smaller context is the better choice."""

FAIR: Final = 3.3
"""Below this they suffer so much that layers on the CPU are the better choice."""

_NEARLY: Final = 1.02  # a file this much larger costs next to nothing more

_RANKS: Final = {
    "F32": 32.0, "BF16": 16.0, "F16": 16.0, "Q8_K_L": 8.6, "Q8_0": 8.5, "Q6_K_L": 6.65, "Q6_K": 6.6,
    "Q5_K_L": 5.8, "Q5_K_M": 5.7, "Q5_K": 5.7, "Q5_1": 5.6, "Q5_K_S": 5.5, "Q5_0": 5.4,
    "Q4_K_L": 4.9, "Q4_K_M": 4.85, "Q4_K": 4.85, "Q4_1": 4.65,
    "Q4_K_S": 4.6, "IQ4_NL": 4.5, "NVFP4": 4.45, "Q4_0": 4.4, "MXFP4_MOE": 4.35, "MXFP4": 4.35, "IQ4_XS": 4.3,
    "Q3_K_L": 4.0, "Q3_K_M": 3.8, "Q3_K": 3.8, "IQ3_M": 3.7, "IQ3_S": 3.5, "Q3_K_S": 3.4, "IQ3_XS": 3.35,
    "IQ3_XXS": 3.1, "Q2_K_L": 3.0, "Q2_K": 2.9, "IQ2_M": 2.7, "Q2_K_S": 2.6, "IQ2_S": 2.5, "IQ2_XS": 2.3,
    "IQ2_XXS": 2.1, "TQ2_0": 2.0, "IQ1_M": 1.8, "TQ1_0": 1.7, "IQ1_S": 1.6,
}  # fmt: skip
"""How true to the original a quantization is, on the scale of its bits for each weight."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One file that could be loaded. `file` is its path or name, `size_bytes` what all its parts take on
    disk; `is_local` says that it is here already."""

    quant: str
    file: str
    size_bytes: int
    shape: ModelShape
    is_local: bool = True

    @property
    def rank(self) -> float:
        """The place of the quantization among others; for an unknown label, its bits for each weight."""
        label = self.quant.upper().removeprefix("UD-")
        base = label.removesuffix("_XL")  # more of the embeddings than _L; beside that alike
        known = _RANKS.get(label if base == label else f"{base}_L", _RANKS.get(base))
        return known if known is not None else 8 * self.size_bytes / max(self.shape.n_params, 1)


@dataclass(frozen=True, slots=True)
class Preference:
    """Candidates by class, the best first within each."""

    good: tuple[Candidate, ...]
    fair: tuple[Candidate, ...]
    poor: tuple[Candidate, ...]


def prefer(candidates: Sequence[Candidate], *, aim: float) -> Preference:
    """Sort candidates, given in any order, into classes. Those ranked above `aim` are left out unless there
    is nothing else, or unless they cost no more than one within it."""
    useful = [c for c in candidates if not any(_replaces(other, c) for other in candidates)]
    within = [c for c in candidates if c.rank <= aim]
    aimed = [c for c in useful if c.rank <= aim or any(_replaces(c, other) for other in within)]
    if not aimed:
        least = min(c.rank for c in useful)
        aimed = [c for c in useful if c.rank == least]
    ordered = sorted(aimed, key=lambda c: (-c.size_bytes, -c.rank, not c.is_local, c.file))
    return Preference(
        good=tuple(c for c in ordered if c.rank >= GOOD),
        fair=tuple(c for c in ordered if FAIR <= c.rank < GOOD),
        poor=tuple(c for c in ordered if c.rank < FAIR),
    )


def _replaces(better: Candidate, worse: Candidate) -> bool:
    """Whether `better` is truer to the original and next to no larger."""
    return better.rank > worse.rank and better.size_bytes <= worse.size_bytes * _NEARLY
