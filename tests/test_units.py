"""Figures as people read them."""

from __future__ import annotations

import pytest

from nemolocal import units


@pytest.mark.parametrize(
    ("n_bytes", "told"),
    [(0, "0.0 GiB"), (1, "<0.1 GiB"), (92 << 20, "0.1 GiB"), (3 << 29, "1.5 GiB"), (24 << 30, "24.0 GiB")],
)
def test_memory(n_bytes: int, told: str) -> None:
    assert units.gib(n_bytes) == told


def test_memory_to_more_digits() -> None:
    assert units.gib(81 << 20, n_digits=2) == "0.08 GiB"
    assert units.gib(1 << 20, n_digits=2) == "<0.01 GiB"


@pytest.mark.parametrize(
    ("n_bytes", "told"),
    [
        (980, "1 kB"),
        (999_600, "1 MB"),
        (98_362_432, "98 MB"),
        (999_999_999, "1.0 GB"),
        (68_600_000_000, "68.6 GB"),
    ],
)
def test_sizes(n_bytes: int, told: str) -> None:
    assert units.size(n_bytes) == told


@pytest.mark.parametrize(
    ("n", "told"),
    [(134_515_008, "135 M"), (999_900_000, "1.0 B"), (8_030_261_312, "8.0 B"), (123_610_000_000, "123.6 B")],
)
def test_parameters(n: int, told: str) -> None:
    assert units.parameters(n) == told
