"""Bytes and times as people read them. Knows nothing of what they are of."""

from __future__ import annotations

from typing import Final

GIB: Final = 1 << 30


def gib(n_bytes: float, *, n_digits: int = 1) -> str:
    """Memory, in the unit that GPUs are sold in."""
    return f"{n_bytes / GIB:.{n_digits}f} GiB"


def size(n_bytes: float) -> str:
    """A file's size in decimal units, as web pages and file managers give it."""
    if n_bytes < 1_000_000:
        return f"{n_bytes / 1_000:.0f} kB"
    if n_bytes < 1_000_000_000:
        return f"{n_bytes / 1_000_000:.0f} MB"
    return f"{n_bytes / 1_000_000_000:.1f} GB"


def span_of_time(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
