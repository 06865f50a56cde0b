"""How much of a prompt goes into one step."""

from __future__ import annotations

import pytest

from nemolocal.engine.pace import ALONE_S, BURST_S, FLOWING_S, N_LEAST, Pace


def taught(n_batch: int, token_s: float, decode_s: float) -> Pace:
    pace = Pace(n_batch)
    for _ in range(50):
        pace.observe(n_prefill=0, n_rows=1, seconds=decode_s)
        pace.observe(n_prefill=100, n_rows=101, seconds=decode_s + 100 * token_s)
    return pace


def test_slow_machine_reads_small_chunks_beside_streams() -> None:
    pace = taught(2048, token_s=0.005, decode_s=0.01)
    assert N_LEAST <= pace.budget(is_flowing=True).n_prefill <= FLOWING_S / 0.005
    assert pace.budget(is_flowing=False).n_prefill == int(ALONE_S / 0.005)


def test_fast_machine_fills_the_batch() -> None:
    pace = taught(2048, token_s=0.00001, decode_s=0.004)
    assert pace.budget(is_flowing=True).n_prefill == 2048


def test_a_prompt_always_advances() -> None:
    pace = taught(2048, token_s=1.0, decode_s=10.0)
    assert pace.budget(is_flowing=True).n_prefill == N_LEAST
    assert taught(8, token_s=1.0, decode_s=1.0).budget(is_flowing=True).n_prefill == 8


def test_first_chunk_is_a_probe() -> None:
    assert Pace(2048).budget(is_flowing=False).n_prefill <= 128
    assert Pace(64).budget(is_flowing=False).n_prefill == 64


def test_a_burst_may_take_longer_than_a_step_beside_streams() -> None:
    budget = taught(4096, token_s=0.0001, decode_s=0.004).budget(is_flowing=True)
    assert budget.n_prefill < budget.n_burst <= BURST_S / 0.0001


def test_cost_of_rows_is_what_was_measured_and_lies_between_its_neighbours() -> None:
    pace = Pace(512)
    assert pace.step_s(1) < pace.step_s(2) < pace.step_s(16)
    for _ in range(40):
        pace.observe(n_prefill=0, n_rows=1, seconds=0.010)
        pace.observe(n_prefill=0, n_rows=5, seconds=0.030)
    assert pace.step_s(1) == pytest.approx(0.010)
    assert pace.step_s(3) == pytest.approx(0.020)
    assert pace.step_s(9) > pace.step_s(5)


def test_a_long_prompt_beside_streams_keeps_to_its_time() -> None:
    """Prompt tokens get dearer as the text gets longer, and small chunks are dearer than large ones."""
    pace = taught(4096, token_s=0.0001, decode_s=0.010)
    n_read, steps = 0, []
    while n_read < 30_000:
        n = pace.budget(is_flowing=True).n_prefill
        seconds = 0.012 + n * (0.00015 + n_read * 4e-9)
        pace.observe(n_prefill=n, n_rows=n + 8, seconds=seconds)
        n_read += n
        steps.append(seconds)
    assert max(steps[2:]) < 0.1
    spent = sum(steps) - 0.012 * len(steps)
    assert spent / sum(steps) > 0.8
