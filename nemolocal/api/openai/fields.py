"""The fields that chat and completion requests share, and what answers of both have in common.

An optional field that is null is as one that is absent; unknown fields are ignored; fields that would change
the answer and are not served are refused by name.
"""

from __future__ import annotations

import dataclasses
import re
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from nemolocal.api.errors import NotServedError
from nemolocal.types import Finish, GenerationParams, SamplingParams

N_STOP = 64
N_CHOICES = 128
RANDOM_SEED = -1  # many local clients send it for "any"
_PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty")
_TOKEN_ID = re.compile(r"[0-9]{1,9}")


def _as_stop(value: Any) -> list[str]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(entries) > N_STOP:
        raise PydanticCustomError("stop", f"may hold at most {N_STOP} strings")
    return [entry for entry in entries if entry]


def _as_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object of token ids and numbers")
    for key, bias in value.items():
        if not (isinstance(key, str) and _TOKEN_ID.fullmatch(key)):
            raise PydanticCustomError("logit_bias", "its keys must be token ids")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise PydanticCustomError("logit_bias", "its values must be numbers from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


class Schema(BaseModel):
    """A wire shape: no number is read out of a string, nothing is infinite."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(Schema):
    include_usage: bool | None = None


class GenerationFields(Schema):
    """What both kinds of request may say of sampling, length, end and form of the answer."""

    UNSERVED: ClassVar[dict[str, str]] = {
        "grammar": "This version has no grammars.",
        "json_schema": "This version does not constrain answers to a schema.",
        "chat_template_kwargs": "This version passes nothing on to the chat template.",
    }

    model: Annotated[str, Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=N_CHOICES)] | None = None
    stop: Annotated[list[str], BeforeValidator(_as_stop)] | None = None
    seed: Annotated[int, Field(ge=RANDOM_SEED, lt=1 << 63)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    typical_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_as_bias)] | None = None
    cache_prompt: bool | None = None
    grammar: Any = None
    json_schema: Any = None
    chat_template_kwargs: Any = None

    def check_served(self) -> None:
        """Raises NotServedError for a field that this version would have to drop."""
        for name, why in self.UNSERVED.items():
            if getattr(self, name):
                raise NotServedError(f"{name}: {why}", param=name, hint="Send the request without it.")

    @property
    def n_choices(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def generation(self, default: SamplingParams, *, max_tokens: int | None) -> list[GenerationParams]:
        """One GenerationParams for each of the `n` choices; `default` fills in what was left open. With a
        seed, choice i gets seed + i: the first is what a request for one choice would get, the others
        differ from it."""
        params = GenerationParams(
            sampling=self._sampling(default),
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            reuse_cache=self.cache_prompt,
        )
        seed = params.sampling.seed
        if seed is None:
            return [params] * self.n_choices
        return [
            dataclasses.replace(params, sampling=dataclasses.replace(params.sampling, seed=seed + index))
            for index in range(self.n_choices)
        ]

    def _sampling(self, default: SamplingParams) -> SamplingParams:
        given = {
            name: value
            for name in ("temperature", "top_p", "min_p", "typical_p", *_PENALTIES)
            if (value := getattr(self, name)) is not None
        }
        return dataclasses.replace(
            default,
            **given,
            top_k=default.top_k if self.top_k is None else max(0, self.top_k),
            seed=None if self.seed == RANDOM_SEED else self.seed,
            logit_bias=tuple((self.logit_bias or {}).items()),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer says alike. No `system_fingerprint`: equal ones would promise equal
    texts, which batched arithmetic does not give."""

    id: str
    created: int
    model: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def head(prefix: str, model_id: str) -> Head:
    return Head(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model_id)


def usage(finishes: Sequence[Finish], *, n_per_prompt: int) -> dict[str, Any]:
    """Token counts of a whole answer. A prompt counts once, however many choices were made from it."""
    firsts = finishes[::n_per_prompt]
    n_prompt = sum(finish.usage.prompt_tokens for finish in firsts)
    n_new = sum(finish.usage.completion_tokens for finish in finishes)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": sum(finish.usage.cached_tokens for finish in firsts)},
    }


def timings(finishes: Sequence[Finish]) -> dict[str, Any]:
    """Counts and times in llama.cpp's names, in ms; choices run side by side, so the longest time counts."""
    n_cached = sum(finish.usage.cached_tokens for finish in finishes)
    n_read = sum(finish.usage.prompt_tokens for finish in finishes) - n_cached
    n_new = sum(finish.usage.completion_tokens for finish in finishes)
    prompt_s = max(finish.timings.prompt_s for finish in finishes)
    decode_s = max(finish.timings.decode_s for finish in finishes)
    return {
        "queue_ms": round(1e3 * max(finish.timings.queue_s for finish in finishes), 3),
        "cache_n": n_cached,
        "prompt_n": n_read,
        "prompt_ms": round(1e3 * prompt_s, 3),
        "prompt_per_second": round(n_read / prompt_s, 3) if prompt_s else None,
        "predicted_n": n_new,
        "predicted_ms": round(1e3 * decode_s, 3),
        "predicted_per_second": round(n_new / decode_s, 3) if decode_s else None,
    }
