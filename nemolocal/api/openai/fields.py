"""The fields that chat and completion requests share, and what answers of both have in common.

An optional field that is null is as one that is absent; unknown fields are ignored; fields that would change
the answer and are not served are refused by name. How tokens are chosen has a module of its own.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
import uuid
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from nemolocal.api.body import Schema
from nemolocal.api.errors import NotServedError
from nemolocal.api.openai.sampling import SamplingFields
from nemolocal.types import GenerationParams, SamplingParams

N_STOP = 64
N_CHOICES = 128
N_ADAPTERS = 64
FOR_EVER_S = -1.0  # as the service has it
N_LOGPROBS = 20  # the most likely tokens that are told in place of each one
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_DURATION = re.compile(rf"(?P<sign>[-+]?)(?:(?P<seconds>{_PART})|(?P<parts>(?:{_PART}(?:ms|s|m|h))+))")


def _as_stop(value: Any) -> list[str]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(entries) > N_STOP:
        raise PydanticCustomError("stop", f"may hold at most {N_STOP} strings")
    return [entry for entry in entries if entry]


def as_seconds(value: Any) -> float:
    """Seconds as a number, or a duration as Ollama writes it: "5m", "1h30m", "-1". Below 0 is for
    ever."""
    if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
        return FOR_EVER_S if value < 0 or math.isinf(value) else float(value)
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise PydanticCustomError("keep_alive", 'must be seconds, or a duration such as "5m" or "-1"')
    if match["sign"] == "-":
        return FOR_EVER_S
    if match["seconds"]:
        return float(match["seconds"])
    parts = re.findall(rf"({_PART})(ms|s|m|h)", match["parts"])
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


def _as_adapter_id(value: Any) -> int | str:
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
    if is_number or (isinstance(value, str) and 0 < len(value) <= 1024):
        return value  # type: ignore[no-any-return]
    raise PydanticCustomError("adapter", "must be the name of an adapter or its number, from 0")


class StreamOptions(Schema):
    include_usage: bool | None = None


class AdapterUse(Schema):
    """A LoRA adapter of the loaded model, by its name or by its number in the order of loading."""

    id: Annotated[int | str, BeforeValidator(_as_adapter_id)]
    scale: Annotated[float, Field(ge=-100.0, le=100.0)] = 1.0


class GenerationFields(SamplingFields):
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
    cache_prompt: bool | None = None
    context_shift: bool | None = None
    lora: Annotated[list[AdapterUse], Field(max_length=N_ADAPTERS)] | None = None
    keep_alive: Annotated[float, BeforeValidator(as_seconds)] | None = None
    grammar: Any = None
    json_schema: Any = None
    chat_template_kwargs: Any = None

    @field_validator("lora")
    @classmethod
    def _names_each_once(cls, value: list[AdapterUse] | None) -> list[AdapterUse] | None:
        ids = [use.id for use in value or ()]
        if len(set(ids)) != len(ids):
            raise PydanticCustomError("lora", "must name each adapter once")
        return value

    def check_served(self) -> None:
        """Raises NotServedError for a field that this version would have to drop."""
        self.check_sampling()
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

    @property
    def n_logprobs(self) -> int | None:
        """How many likeliest tokens are told beside each one; None where none is told of."""
        return None

    def generation(
        self, default: SamplingParams, *, max_tokens: int | None, n_ctx: int
    ) -> list[GenerationParams]:
        """One GenerationParams for each of the `n` choices; `default` fills in what was left open, `n_ctx` is
        the model's context. With a seed, choice i gets seed + i: the first is what a request for one choice
        would get, the others differ from it."""
        params = GenerationParams(
            sampling=self.sampling(default, n_ctx=n_ctx),
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            reuse_cache=self.cache_prompt,
            n_logprobs=self.n_logprobs,
            shift_context=bool(self.context_shift),
            adapters=None if self.lora is None else tuple((str(use.id), use.scale) for use in self.lora),
        )
        seed = params.sampling.seed
        if seed is None:
            return [params] * self.n_choices
        return [
            dataclasses.replace(params, sampling=dataclasses.replace(params.sampling, seed=seed + index))
            for index in range(self.n_choices)
        ]


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
