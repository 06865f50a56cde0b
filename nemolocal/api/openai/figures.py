"""`usage` and `timings`: what an answer took, in tokens and in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemolocal.types import Finish


def usage(finishes: Sequence[Finish], *, n_per_prompt: int) -> dict[str, Any]:
    """Token counts of a whole answer. A prompt counts once, however many choices were made from it, and
    what one of them had to read of it was not cached. Guessed tokens are told of where there were any."""
    prompts = [finishes[first : first + n_per_prompt] for first in range(0, len(finishes), n_per_prompt)]
    n_prompt = sum(choices[0].usage.prompt_tokens for choices in prompts)
    n_cached = sum(min(choice.usage.cached_tokens for choice in choices) for choices in prompts)
    n_new = sum(finish.usage.completion_tokens for finish in finishes)
    counts: dict[str, Any] = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }
    n_drafted, n_accepted = _drafted(finishes)
    if n_drafted:
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": n_accepted,
            "rejected_prediction_tokens": n_drafted - n_accepted,
        }
    return counts


def timings(finishes: Sequence[Finish]) -> dict[str, Any]:
    """Counts and times in llama.cpp's names, in ms; choices run side by side, so the longest time counts."""
    n_cached = sum(finish.usage.cached_tokens for finish in finishes)
    n_read = sum(finish.usage.prompt_tokens for finish in finishes) - n_cached
    n_new = sum(finish.usage.completion_tokens for finish in finishes)
    prompt_s = max(finish.timings.prompt_s for finish in finishes)
    decode_s = max(finish.timings.decode_s for finish in finishes)
    times: dict[str, Any] = {
        "queue_ms": round(1e3 * max(finish.timings.queue_s for finish in finishes), 3),
        "cache_n": n_cached,
        "prompt_n": n_read,
        "prompt_ms": round(1e3 * prompt_s, 3),
        "prompt_per_second": round(n_read / prompt_s, 3) if prompt_s else None,
        "predicted_n": n_new,
        "predicted_ms": round(1e3 * decode_s, 3),
        "predicted_per_second": round(n_new / decode_s, 3) if decode_s else None,
    }
    n_drafted, n_accepted = _drafted(finishes)
    if n_drafted:
        times |= {"draft_n": n_drafted, "draft_n_accepted": n_accepted}
    return times


def _drafted(finishes: Sequence[Finish]) -> tuple[int, int]:
    """Tokens that were guessed ahead, and those of them that were right."""
    return (
        sum(finish.usage.drafted_tokens for finish in finishes),
        sum(finish.usage.accepted_tokens for finish in finishes),
    )
