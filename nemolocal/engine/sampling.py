"""From the parameters of a request to the steps of its sampler chain. Pure: llama/ builds them in C."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from nemolocal.types import SamplingParams

RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's word for "choose one", so no request may carry it by chance
N_CANDIDATES = 128
"""Tokens of each step that a GPU hands over when it picks the likeliest ones itself: enough for top-k 40
beside 64 penalised tokens, and a copy of a kilobyte instead of the half megabyte of all logits."""


@dataclass(frozen=True, slots=True)
class Step:
    """One sampler of the chain: llama.cpp's name for it, its arguments in C's order without the leading
    vocabulary, and the tokens that it is told of as already said."""

    name: str
    arguments: tuple[float | int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    breakers: tuple[str, ...] = ()
    history: Sequence[int] = ()


def chain(
    params: SamplingParams, prompt: Sequence[int] = (), *, n_ctx: int = 0, ends: Sequence[int] = ()
) -> list[Step]:
    """The steps for these parameters, in llama.cpp's own order; those that would change nothing are left out.

    Bias and penalties act on all logits, then the filters narrow the candidates, then the temperature
    shapes what is left, then one is drawn. Temperature 0 takes the best after bias and penalties. `ends` are
    the tokens that end an answer, for `ignore_eos`; `n_ctx` is how far back "the whole context" goes.
    """
    steps = []
    bias = (*params.logit_bias, *((token, float("-inf")) for token in ends if params.ignore_eos))
    if bias:
        steps.append(Step("logit_bias", bias=bias))
    if has_penalties(params):
        steps.append(_penalties(params, prompt))
    if params.dry_multiplier > 0.0:
        steps.append(_dry(params, prompt, n_ctx))
    if params.temperature <= 0.0:
        return [*steps, Step("greedy")]
    seed = secrets.randbelow(RANDOM_SEED) if params.seed is None else params.seed % RANDOM_SEED
    if params.mirostat_tau > 0.0:
        mirostat = Step("mirostat_v2", (seed, params.mirostat_tau, params.mirostat_eta))
        return [*steps, Step("temp", (params.temperature,)), mirostat]
    if params.top_k > 0:
        steps.append(Step("top_k", (params.top_k,)))
    if params.typical_p < 1.0:
        steps.append(Step("typical", (params.typical_p, 1)))
    if params.top_p < 1.0:
        steps.append(Step("top_p", (params.top_p, 1)))
    if params.min_p > 0.0:
        steps.append(Step("min_p", (params.min_p, 1)))
    if params.xtc_probability > 0.0:
        steps.append(Step("xtc", (params.xtc_probability, params.xtc_threshold, 1, seed)))
    return [*steps, Step("temp", (params.temperature,)), Step("dist", (seed,))]


def needs_all_logits(params: SamplingParams, *, n_ends: int, n_logprobs: int | None = None) -> bool:
    """Whether the likeliest N_CANDIDATES tokens by the model's own logits are not enough to sample exactly.

    They are enough where a fixed number k of tokens is kept (top-k, or 1 for greedy) and what comes before
    that only lowers logits: a token among the best k afterwards had at most k + n better or equal before,
    n being the number of lowered tokens. A step that raises a token, that weighs the whole distribution or
    that lowers an unknown number of tokens needs them all, and so do log probabilities.
    """
    if n_logprobs is not None or params.dry_multiplier > 0.0:
        return True
    n_kept = 1 if params.temperature <= 0.0 else params.top_k
    if n_kept == 0 or (params.mirostat_tau > 0.0 and params.temperature > 0.0):
        return True
    if any(bias > 0.0 for _, bias in params.logit_bias):
        return True
    n_lowered = len(params.logit_bias) + (n_ends if params.ignore_eos else 0)
    if has_penalties(params):
        n_lowered += params.penalty_last_n
        raises = params.repeat_penalty < 1.0 or min(params.presence_penalty, params.frequency_penalty) < 0.0
        if raises:
            return True
    return n_kept + n_lowered > N_CANDIDATES


def has_penalties(params: SamplingParams) -> bool:
    return params.penalty_last_n > 0 and (
        params.repeat_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    )


def _penalties(params: SamplingParams, prompt: Sequence[int]) -> Step:
    """A repeat penalty looks back into the prompt, as in llama.cpp; presence and frequency penalties count
    only what the answer says, as in OpenAI's API."""
    arguments = (
        params.penalty_last_n,
        params.repeat_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )
    history = () if params.repeat_penalty == 1.0 else prompt[-params.penalty_last_n :]
    return Step("penalties", arguments, history=history)


def _dry(params: SamplingParams, prompt: Sequence[int], n_ctx: int) -> Step:
    """DRY lowers the tokens that would go on with a repetition, of the prompt too."""
    n = n_ctx if params.dry_last_n < 0 else params.dry_last_n
    arguments = (params.dry_multiplier, params.dry_base, params.dry_allowed_length, n)
    history = prompt[-n:] if n else ()
    return Step("dry", arguments, breakers=params.dry_breakers, history=history)
