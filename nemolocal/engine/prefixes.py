"""How much two texts, as tokens, have in common at their beginnings."""

from __future__ import annotations

from collections.abc import Sequence


def n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning. Halves the interval, since comparing slices runs in C."""
    low, high = 0, min(len(a), len(b)) + 1  # a[:low] == b[:low] always; high is the first length that differs
    if a[: high - 1] == b[: high - 1]:
        return high - 1
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
