"""Models that failed: when they are left alone, and what is remembered of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemolocal.errors import EngineDiedError, EngineError, EngineGaveUpError
from nemolocal.failures import CAUTION_BYTES, PAUSE_S, Failures

ONE, TWO = Path("one.gguf"), Path("two.gguf")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_three_failures_in_a_row_stop_the_trying_for_a_while() -> None:
    clock = Clock()
    failures = Failures(clock)
    for problem in ("first", "second"):
        failures.add(ONE, EngineDiedError(problem))
        failures.check(ONE, "one")
    failures.add(ONE, EngineDiedError("The engine's process ended.", hint="Again."))
    with pytest.raises(EngineGaveUpError) as caught:
        failures.check(ONE, "one")
    assert "one failed 3 times in a row" in caught.value.message
    assert "The engine's process ended." in caught.value.message
    assert "again in 300 s" in caught.value.hint
    assert caught.value.retry_after_s == PAUSE_S
    failures.check(TWO, "two")
    clock.now += PAUSE_S - 0.5
    with pytest.raises(EngineGaveUpError) as caught:
        failures.check(ONE, "one")
    assert caught.value.retry_after_s == 1
    clock.now += 1
    failures.check(ONE, "one")
    failures.add(ONE, EngineError("fourth"))  # one more is enough
    with pytest.raises(EngineGaveUpError, match="4 times"):
        failures.check(ONE, "one")


def test_an_answer_between_them_begins_a_new_row() -> None:
    failures = Failures()
    for _ in range(5):
        failures.add(ONE, EngineError("no"))
        failures.add(ONE, EngineError("no"))
        failures.check(ONE, "one")
        failures.end_row(ONE)
    failures.end_row(TWO)


def test_want_of_memory_is_remembered_longer_than_the_row() -> None:
    failures = Failures()
    assert failures.caution_bytes(ONE) == 0
    failures.add(ONE, EngineError("other"))
    assert failures.caution_bytes(ONE) == 0
    failures.add(ONE, EngineError("memory", is_out_of_memory=True))
    failures.end_row(ONE)
    assert failures.caution_bytes(ONE) == CAUTION_BYTES
    failures.add(ONE, EngineDiedError("memory", is_out_of_memory=True))
    assert failures.caution_bytes(ONE) == 2 * CAUTION_BYTES


def test_where_it_is_known_what_was_missing_only_that_is_remembered() -> None:
    failures = Failures()
    failures.add(ONE, EngineError("memory", is_out_of_memory=True), missing={"GPU-1": 5})
    failures.add(ONE, EngineError("memory", is_out_of_memory=True), missing={"GPU-1": 7, "": 1})
    assert failures.caution_bytes(ONE) == 0
    assert failures.missing_bytes(ONE) == {"GPU-1": 7, "": 1}
    assert failures.missing_bytes(TWO) == {}
    failures.forget([ONE])
    assert failures.missing_bytes(ONE) == {}


def test_a_fresh_try_forgets_all() -> None:
    failures = Failures()
    for _ in range(3):
        failures.add(ONE, EngineError("no", is_out_of_memory=True))
    failures.forget([ONE, TWO])
    failures.check(ONE, "one")
    assert failures.caution_bytes(ONE) == 0
    failures.add(ONE, OSError())  # without a word
    failures.add(ONE, OSError())
    failures.add(ONE, OSError())
    with pytest.raises(EngineGaveUpError, match="OSError"):
        failures.check(ONE, "one")
