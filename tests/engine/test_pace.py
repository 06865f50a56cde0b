"""How much of a prompt goes into one step."""

from __future__ import annotations

from nemolocal.engine.pace import ALONE_S, FLOWING_S, N_LEAST, Pace


def taught(n_batch: int, token_s: float, decode_s: float) -> Pace:
    pace = Pace(n_batch)
    for _ in range(50):
        pace.observe(n_prefill=0, seconds=decode_s)
        pace.observe(n_prefill=100, seconds=decode_s + 100 * token_s)
    return pace


def test_slow_machine_reads_small_chunks_beside_streams() -> None:
    pace = taught(2048, token_s=0.005, decode_s=0.01)
    assert N_LEAST <= pace.n_prefill(is_flowing=True) <= FLOWING_S / 0.005
    assert pace.n_prefill(is_flowing=False) == int(ALONE_S / 0.005)


def test_fast_machine_fills_the_batch() -> None:
    pace = taught(2048, token_s=0.00001, decode_s=0.004)
    assert pace.n_prefill(is_flowing=True) == 2048


def test_a_prompt_always_advances() -> None:
    pace = taught(2048, token_s=1.0, decode_s=10.0)
    assert pace.n_prefill(is_flowing=True) == N_LEAST
    assert taught(8, token_s=1.0, decode_s=1.0).n_prefill(is_flowing=True) == 8


def test_first_chunk_is_a_probe() -> None:
    assert Pace(2048).n_prefill(is_flowing=False) <= 128
    assert Pace(64).n_prefill(is_flowing=False) == 64
