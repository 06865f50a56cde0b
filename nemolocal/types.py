"""What the layers hand each other. Plain frozen values; no behaviour beyond derived properties.

This module imports nothing of ours but the parameters of a generation, which have a module of their own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from nemolocal.generation import GenerationParams as GenerationParams
from nemolocal.generation import SamplingParams as SamplingParams

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call that the assistant made; `arguments` is a JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `reasoning` is the assistant's thinking, kept apart from its answer."""

    role: Role
    content: str
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt. Control tokens are recognised only where `is_control` is true."""

    text: str
    is_control: bool = False


Prompt = tuple[Segment, ...] | tuple[int, ...]
"""A prompt as marked text, or as token ids that are taken as they are."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `cached_tokens` is the part of the prompt that did not have to be read. Of the
    `drafted_tokens` that were guessed ahead, `accepted_tokens` were what the model said."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a request spent waiting for a slot, reading its prompt, and writing its answer."""

    queue_s: float
    prompt_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could have been said and the natural logarithm of its probability, by the model itself:
    before temperature, penalties and filters."""

    token: int
    piece: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The token that was said and the likeliest ones in its place, best first."""

    chosen: Candidate
    top: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The first item of every stream: the prompt was accepted. Comes before the prompt is read."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text; always whole characters, never empty. `n_tokens` is how many tokens it took; `logprobs`
    describes each of them where the request asked for it."""

    text: str
    n_tokens: int = 1
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The last item of every stream that did not raise."""

    reason: FinishReason
    usage: Usage
    timings: Timings


StreamItem = Started | Delta | Finish


class TextModel(Protocol):
    """A model that answers: the local engine or a remote server."""

    @property
    def id(self) -> str: ...

    @property
    def n_ctx(self) -> int:
        """Tokens that one prompt and its answer may take together."""

    def chat(self, messages: Sequence[Message], params: GenerationParams) -> AsyncGenerator[StreamItem, None]:
        """Answer a conversation. Closing the iterator cancels the generation."""

    def complete(
        self, prompt: str | Sequence[int], params: GenerationParams
    ) -> AsyncGenerator[StreamItem, None]:
        """Go on from a raw prompt. Control tokens in a text prompt are recognised."""

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text is, with no control tokens in it."""
