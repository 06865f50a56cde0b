"""From the parameters of a request to the steps of its sampler chain. Pure: llama.py builds them in C."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from nemolocal.types import SamplingParams

RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's word for "choose one", so no request may carry it by chance


@dataclass(frozen=True, slots=True)
class Step:
    """One sampler of the chain: llama.cpp's name for it and its arguments in C's order."""

    name: str
    arguments: tuple[float | int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()


def chain(params: SamplingParams) -> list[Step]:
    """The steps for these parameters, in llama.cpp's own order; those that would change nothing are left out.

    Bias and penalties act on all logits, then the filters narrow the candidates, then the temperature
    shapes what is left, then one is drawn. Temperature 0 takes the best after bias and penalties.
    """
    steps = []
    if params.logit_bias:
        steps.append(Step("logit_bias", bias=params.logit_bias))
    if has_penalties(params):
        steps.append(
            Step(
                "penalties",
                (
                    params.penalty_last_n,
                    params.repeat_penalty,
                    params.frequency_penalty,
                    params.presence_penalty,
                ),
            )
        )
    if params.temperature <= 0.0:
        return [*steps, Step("greedy")]
    if params.top_k > 0:
        steps.append(Step("top_k", (params.top_k,)))
    if params.typical_p < 1.0:
        steps.append(Step("typical", (params.typical_p, 1)))
    if params.top_p < 1.0:
        steps.append(Step("top_p", (params.top_p, 1)))
    if params.min_p > 0.0:
        steps.append(Step("min_p", (params.min_p, 1)))
    seed = secrets.randbelow(RANDOM_SEED) if params.seed is None else params.seed % RANDOM_SEED
    return [*steps, Step("temp", (params.temperature,)), Step("dist", (seed,))]


def has_penalties(params: SamplingParams) -> bool:
    return params.penalty_last_n > 0 and (
        params.repeat_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    )


def penalised_history(params: SamplingParams, prompt: Sequence[int]) -> Sequence[int]:
    """The end of the prompt that counts as already said.

    A repeat penalty looks back into the prompt, as in llama.cpp; presence and frequency penalties count
    only what the answer says, as in OpenAI's API.
    """
    if not has_penalties(params) or params.repeat_penalty == 1.0:
        return ()
    return prompt[-params.penalty_last_n :]
