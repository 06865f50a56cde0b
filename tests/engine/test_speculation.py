"""Guesses: how they are counted, and how a small model keeps up with texts that it did not write."""

from __future__ import annotations

from collections.abc import Sequence

from nemolocal.engine.batching import Budget
from nemolocal.engine.scheduler import Ended, Scheduler
from nemolocal.engine.speculation import N_READ, Drafter, ModelDrafter, Wish
from nemolocal.types import GenerationParams, SamplingParams
from tests.engine.fake_backend import END, FakeBackend, next_token

PROMPT = next([n] for n in range(1, 999) if next_token([n, next_token([n])]) == END)
"""A prompt that is answered with one token."""


class Oracle:
    """Guesses right, also what the model would say after its end."""

    is_free = True

    def __init__(self) -> None:
        self.n_asked = 0

    def draft(self, wishes: Sequence[Wish]) -> dict[int, list[int]]:
        self.n_asked += len(wishes)
        return {wish.id: self._guess(wish) for wish in wishes}

    def forget(self, id: int) -> None: ...

    def close(self) -> None: ...

    def _guess(self, wish: Wish) -> list[int]:
        tokens = list(wish.tokens)
        for _ in range(wish.n_most):
            tokens.append(next_token(tokens))
        return tokens[len(wish.tokens) :]


def finish(drafter: Drafter, params: GenerationParams, prompt: Sequence[int] = PROMPT) -> Ended:
    scheduler = Scheduler(FakeBackend(), drafter=drafter)
    scheduler.add(1, list(prompt), params)
    while True:
        for event in scheduler.step(Budget(100, 100)):
            if isinstance(event, Ended):
                return event


def test_right_guesses_beyond_the_end_do_not_count() -> None:
    usage = finish(Oracle(), GenerationParams(max_tokens=50)).usage
    assert usage.completion_tokens == 1
    assert usage.drafted_tokens > 1
    assert usage.accepted_tokens == 0  # the end itself is no token of the answer


def test_a_seed_that_decides_the_text_keeps_the_engine_from_guessing() -> None:
    long = next([n] for n in range(1, 999) if END not in Oracle()._guess(Wish(1, 0, [n], 30)))
    for sampling, is_free in (
        (SamplingParams(), True),
        (SamplingParams(seed=1), False),
        (SamplingParams(seed=1, temperature=0.0), True),
    ):
        drafter = Oracle()
        usage = finish(drafter, GenerationParams(sampling, max_tokens=20), long).usage
        assert (drafter.n_asked > 0, usage.drafted_tokens > 0) == (is_free, is_free)
        assert usage.completion_tokens == 20
    usage = finish(Oracle(), GenerationParams(SamplingParams(seed=1), 20, speculate=True), long).usage
    assert usage.drafted_tokens > 0


def test_a_small_model_reads_a_long_text_piece_by_piece() -> None:
    backend = FakeBackend(n_ctx=4096, n_batch=512, n_drafted=0)
    drafter = ModelDrafter(backend)
    text = [1 + n % 7 for n in range(5 * N_READ + 10)]
    n_steps = 0
    while not (guesses := drafter.draft([Wish(1, 2, text, 1)])):
        n_steps += 1
        assert backend.batches[-1].n_tokens == N_READ
    assert n_steps == 5
    assert guesses == {1: [next_token(text)]}
    assert backend.memory.held[2] == text


def test_who_is_read_for_does_not_hold_up_the_others() -> None:
    drafter = ModelDrafter(FakeBackend(n_ctx=4096, n_batch=512, n_drafted=0))
    long, short = Wish(1, 0, [3] * 4 * N_READ, 1), Wish(2, 1, [5, 6], 1)
    assert drafter.draft([long, short]) == {2: [next_token([5, 6])]}
