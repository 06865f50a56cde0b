"""The steps of a sampler chain, and that zero is a value and not "not given"."""

from __future__ import annotations

from nemolocal.engine import sampling
from nemolocal.types import SamplingParams


def names(params: SamplingParams) -> list[str]:
    return [step.name for step in sampling.chain(params)]


def test_defaults() -> None:
    assert names(SamplingParams()) == ["top_k", "top_p", "min_p", "temp", "dist"]


def test_temperature_zero_is_greedy_after_bias_and_penalties() -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((5, -100.0),), repeat_penalty=1.1, seed=3)
    assert names(params) == ["logit_bias", "penalties", "greedy"]


def test_zero_top_p_is_kept() -> None:
    [step] = [step for step in sampling.chain(SamplingParams(top_p=0.0)) if step.name == "top_p"]
    assert step.arguments == (0.0, 1)


def test_filters_that_change_nothing_are_left_out() -> None:
    assert names(SamplingParams(top_k=0, top_p=1.0, min_p=0.0)) == ["temp", "dist"]
    assert "typical" in names(SamplingParams(typical_p=0.9))


def test_seeds() -> None:
    def seed(params: SamplingParams) -> float:
        return sampling.chain(params)[-1].arguments[0]

    assert seed(SamplingParams(seed=0)) == 0
    assert seed(SamplingParams(seed=7)) == 7
    assert 0 <= seed(SamplingParams(seed=2**40 + 5)) < sampling.RANDOM_SEED
    assert seed(SamplingParams(seed=sampling.RANDOM_SEED)) != sampling.RANDOM_SEED
    assert len({seed(SamplingParams()) for _ in range(5)}) > 1


def test_what_counts_as_already_said() -> None:
    prompt = list(range(100))
    assert list(sampling.penalised_history(SamplingParams(repeat_penalty=1.2), prompt)) == prompt[-64:]
    assert list(sampling.penalised_history(SamplingParams(presence_penalty=1.0), prompt)) == []
    assert list(sampling.penalised_history(SamplingParams(), prompt)) == []
