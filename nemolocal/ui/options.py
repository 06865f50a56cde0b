"""What a person can set: the system prompt and how the next token is chosen. Pure; must not know gradio."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from nemolocal.errors import InvalidRequestError
from nemolocal.types import GenerationParams, SamplingParams


@dataclass(frozen=True, slots=True)
class Options:
    """What the panel holds, in its order. `max_tokens` 0 means up to the context, `seed` None a fresh one
    for each answer, `stop` one string a line."""

    system: str = ""
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: float = 40
    min_p: float = 0.05
    max_tokens: float | None = 0
    seed: float | None = None
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str = ""


def defaults(sampling: SamplingParams) -> Options:
    """The panel as a model's own way of sampling fills it."""
    return Options(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repeat_penalty=sampling.repeat_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
    )


def to_params(options: Options) -> GenerationParams:
    """What the model is asked with. Raises InvalidRequestError for figures that no model can use."""
    max_tokens = _whole(options.max_tokens or 0, "The longest answer", at_least=0)
    seed = None if options.seed is None else _whole(options.seed, "The seed", at_least=0)
    if seed is not None and seed >= 2**32 - 1:
        raise InvalidRequestError(
            "The seed is too large.", hint="Give one below 4,294,967,295.", param="seed"
        )
    return GenerationParams(
        sampling=SamplingParams(
            temperature=options.temperature,
            top_k=int(options.top_k),
            top_p=options.top_p,
            min_p=options.min_p,
            repeat_penalty=options.repeat_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            seed=seed,
        ),
        max_tokens=max_tokens or None,
        stop=tuple(line for line in options.stop.splitlines() if line),
    )


def changed(options: Options, base: Options) -> dict[str, Any]:
    """What differs from `base`: all that the browser needs to keep."""
    before = asdict(base)
    return {name: value for name, value in asdict(options).items() if value != before[name]}


def overlaid(base: Options, kept: Any) -> Options:
    """`base` with what the browser kept; whatever is of the wrong kind there is passed over."""
    found: dict[str, Any] = {}
    for field in fields(Options):
        value = kept.get(field.name) if isinstance(kept, dict) else None
        if isinstance(field.default, str):
            fits = isinstance(value, str)
        else:
            fits = isinstance(value, int | float) and not isinstance(value, bool)
        if fits:
            found[field.name] = value
    return replace(base, **found)


def _whole(value: float, what: str, *, at_least: int) -> int:
    if value != int(value) or value < at_least:
        raise InvalidRequestError(f"{what} is {value:g}.", hint=f"Give a whole number from {at_least} up.")
    return int(value)
