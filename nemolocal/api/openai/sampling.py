"""The fields that say how the next token is chosen, in the names of OpenAI and llama.cpp's server, and the
way from them to SamplingParams. Knows nothing of lengths, streams or answers."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from nemolocal.api.body import Schema
from nemolocal.api.errors import NotServedError
from nemolocal.types import SamplingParams

RANDOM_SEED = -1  # many local clients send it for "any"
MIROSTAT_TAU = 5.0  # llama.cpp's default
N_BREAKERS = 64
BREAKER_BYTES = 40  # the library would cut a longer one
LAST_N = 1 << 20  # tokens
_TOKEN_ID = re.compile(r"[0-9]{1,9}")

# What a request and SamplingParams call alike.
_PLAIN = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "xtc_probability",
    "xtc_threshold",
    "mirostat_eta",
    "ignore_eos",
)
_RENAMED = {
    "dry_penalty_last_n": "dry_last_n",
    "dry_sequence_breakers": "dry_breakers",
}


def _as_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object of token ids and numbers")
    for key, bias in value.items():
        if not (isinstance(key, str) and _TOKEN_ID.fullmatch(key)):
            raise PydanticCustomError("logit_bias", "its keys must be token ids")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise PydanticCustomError("logit_bias", "its values must be numbers from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


def _as_breakers(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        raise PydanticCustomError("breakers", "must be a list of strings that are not empty")
    if len(value) > N_BREAKERS:
        raise PydanticCustomError("breakers", f"may hold at most {N_BREAKERS} strings")
    if any("\0" in entry or len(entry.encode()) > BREAKER_BYTES for entry in value):
        raise PydanticCustomError(
            "breakers", f"its strings may be at most {BREAKER_BYTES} bytes long, and hold no null character"
        )
    return tuple(value)


class SamplingFields(Schema):
    """An optional field that is null is as one that is absent: the model's own default then counts."""

    seed: Annotated[int, Field(ge=RANDOM_SEED, lt=1 << 63)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    typical_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=LAST_N)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_as_bias)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    dry_base: Annotated[float, Field(ge=1.0, le=100.0)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0, le=LAST_N)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=LAST_N)] | None = None
    dry_sequence_breakers: Annotated[tuple[str, ...], BeforeValidator(_as_breakers)] | None = None
    xtc_probability: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    mirostat: Annotated[int, Field(ge=0, le=2)] | None = None
    mirostat_tau: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    mirostat_eta: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    ignore_eos: bool | None = None

    def check_sampling(self) -> None:
        """Raises NotServedError for a way of sampling that there is not."""
        if self.mirostat == 1:
            raise NotServedError(
                "mirostat: Its first version is not served.",
                param="mirostat",
                hint="Send 2 for the second version, which aims at the same, or 0.",
            )

    def sampling(self, default: SamplingParams, *, n_ctx: int) -> SamplingParams:
        """What the request says, and `default` where it says nothing. `n_ctx` is the model's context."""
        names = {name: name for name in _PLAIN} | _RENAMED
        given = {
            ours: value for theirs, ours in names.items() if (value := getattr(self, theirs)) is not None
        }
        tau = MIROSTAT_TAU if self.mirostat_tau is None else self.mirostat_tau
        if self.mirostat is not None:
            given["mirostat_tau"] = tau if self.mirostat == 2 else 0.0
        if self.repeat_last_n is not None:
            # Each sequence keeps a list of this length, so it is no longer than it can be filled.
            given["penalty_last_n"] = n_ctx if self.repeat_last_n < 0 else min(self.repeat_last_n, n_ctx)
        return dataclasses.replace(
            default,
            **given,
            top_k=default.top_k if self.top_k is None else max(0, self.top_k),
            seed=None if self.seed == RANDOM_SEED else self.seed,
            logit_bias=tuple((self.logit_bias or {}).items()),
        )
