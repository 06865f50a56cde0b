"""The steps of a sampler chain, and that zero is a value and not "not given"."""

from __future__ import annotations

import math

import pytest

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


def history(params: SamplingParams, prompt: list[int], name: str = "penalties") -> list[int]:
    steps = sampling.chain(params, prompt, n_ctx=1000)
    return [token for step in steps if step.name == name for token in step.history]


def test_what_counts_as_already_said() -> None:
    prompt = list(range(100))
    assert history(SamplingParams(repeat_penalty=1.2), prompt) == prompt[-64:]
    assert history(SamplingParams(presence_penalty=1.0), prompt) == []
    assert history(SamplingParams(), prompt) == []
    assert history(SamplingParams(dry_multiplier=0.8), prompt, "dry") == prompt
    assert history(SamplingParams(dry_multiplier=0.8, dry_last_n=7), prompt, "dry") == prompt[-7:]
    both = SamplingParams(dry_multiplier=0.8, presence_penalty=1.0)
    assert history(both, prompt, "dry") == prompt
    assert history(both, prompt) == []


def test_dry_xtc_and_mirostat_stand_where_llama_cpp_has_them() -> None:
    assert names(SamplingParams(dry_multiplier=0.8)) == ["dry", "top_k", "top_p", "min_p", "temp", "dist"]
    assert names(SamplingParams(xtc_probability=0.5)) == ["top_k", "top_p", "min_p", "xtc", "temp", "dist"]
    assert names(SamplingParams(mirostat_tau=5.0)) == ["temp", "mirostat_v2"]
    assert names(SamplingParams(mirostat_tau=5.0, temperature=0.0)) == ["greedy"]


def test_ignore_eos_bans_what_ends_an_answer() -> None:
    [step] = [s for s in sampling.chain(SamplingParams(ignore_eos=True), ends=[2, 7]) if s.bias]
    assert [token for token, _ in step.bias] == [2, 7]
    assert all(bias == -math.inf for _, bias in step.bias)


@pytest.mark.parametrize(
    ("params", "needs_all"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0.0, top_k=0), False),
        (SamplingParams(top_k=0), True),
        (SamplingParams(top_k=sampling.N_CANDIDATES), False),
        (SamplingParams(top_k=sampling.N_CANDIDATES + 1), True),
        (SamplingParams(logit_bias=((5, -100.0), (6, -1.0))), False),
        (SamplingParams(logit_bias=((5, 1.0),)), True),
        (SamplingParams(repeat_penalty=1.1), False),
        (SamplingParams(repeat_penalty=0.9), True),
        (SamplingParams(presence_penalty=-0.5), True),
        (SamplingParams(frequency_penalty=1.0, penalty_last_n=1000), True),
        (SamplingParams(top_k=sampling.N_CANDIDATES, ignore_eos=True), True),
        (SamplingParams(dry_multiplier=0.8), True),
        (SamplingParams(mirostat_tau=5.0), True),
        (SamplingParams(xtc_probability=0.5), False),
    ],
)
def test_which_requests_need_every_logit(params: SamplingParams, needs_all: bool) -> None:
    assert sampling.needs_all_logits(params, n_ends=2) is needs_all
    assert sampling.needs_all_logits(params, n_ends=2, n_logprobs=0)
