"""What the layers hand each other. Plain frozen values; no behaviour beyond derived properties.

This module imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

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
class SamplingParams:
    """How the next token is chosen. The defaults are llama.cpp's.

    `temperature` 0 means greedy. `top_k` 0 means no limit. `seed` None means a fresh one for each request.
    `logit_bias` holds (token id, bias) pairs; a bias of -100 or less bans the token. `mirostat_tau` above 0
    turns mirostat 2 on, which takes the place of top-k, top-p, min-p and typical. `dry_last_n` -1 looks back
    over the whole context. With `ignore_eos` the answer ends only at a stop string or a limit.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int = -1
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat_tau: float = 0.0
    mirostat_eta: float = 0.1
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """One generation: how to sample and when to end. `max_tokens` None means up to the context.

    `reuse_cache` says whether a beginning of the prompt that is still in the cache may be used. None means:
    unless a seed decides the text, since a prompt read in one go and a prompt whose beginning was kept round
    differently, and a seed asks for the same text again.

    `n_logprobs` asks for the log probability of each token that is said, and of that many likeliest ones;
    None asks for none. `shift_context` lets an answer that meets the end of the context go on by forgetting
    the middle, where the model can. `speculate` False keeps the engine from guessing ahead. `adapters` are
    (name, scale) of the LoRA adapters to use; None means those of the load.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    reuse_cache: bool | None = None
    n_logprobs: int | None = None
    shift_context: bool = False
    speculate: bool = True
    adapters: tuple[tuple[str, float], ...] | None = None


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
