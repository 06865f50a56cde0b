"""Bytes and times as people read them. Knows nothing of what they are of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

GIB: Final = 1 << 30


def gib(n_bytes: float, *, n_digits: int = 1) -> str:
    """Memory, in the unit that GPUs are sold in. What is there never reads as nothing."""
    least = 10**-n_digits
    if 0 < n_bytes < GIB * least / 2:
        return f"<{least:.{n_digits}f} GiB"
    return f"{n_bytes / GIB:.{n_digits}f} GiB"


def size(n_bytes: float) -> str:
    """A file's size, or the room on a disk, in decimal units, as web pages and file managers give them."""
    if n_bytes < 999_500:
        return f"{n_bytes / 1_000:.0f} kB"
    if n_bytes < 999_500_000:
        return f"{n_bytes / 1_000_000:.0f} MB"
    return f"{n_bytes / 1_000_000_000:.1f} GB"


def parameters(n: int) -> str:
    """How many parameters a model has, as the names of models give it."""
    return f"{n / 1e9:.1f} B" if n >= 999_500_000 else f"{n / 1e6:.0f} M"


def span_of_time(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers with those that follow each other together: 1, 3–5, 9."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
