"""One request inside the engine, from its tokens to its last event."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemolocal.engine.backend import Adapters, Sampler
from nemolocal.engine.cache import WarmState
from nemolocal.engine.text import TextStream
from nemolocal.types import GenerationParams, TokenLogprob


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is the prompt and what was sampled so far, but for what a shift of the context dropped; the
    first `n_computed` of them are in the model's memory. Reading the prompt and writing the answer are the
    same thing: computing what is pending."""

    id: int
    tokens: list[int]
    params: GenerationParams
    n_prompt: int
    n_new_most: int  # tokens that the answer may have
    sampler: Sampler
    text: TextStream
    adapters: Adapters = ()
    warm: WarmState | None = None  # a state from disk that the prompt begins with
    borders: list[int] = field(default_factory=list)  # where checkpoints are due, in rising order
    slot: int | None = None
    n_computed: int = 0
    n_new: int = 0
    n_kept: int | None = None  # tokens before the first shift; what follows is no true prefix any more
    n_cached: int | None = None  # tokens that did not have to be read when it got its first slot
    n_drafted: int = 0
    n_accepted: int = 0
    n_unsent: int = 0  # tokens whose text was held back
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of those tokens

    @property
    def n_pending(self) -> int:
        return len(self.tokens) - self.n_computed

    @property
    def is_decoding(self) -> bool:
        """Whether its next row gives the next token of an answer that has begun."""
        return self.n_new > 0 and len(self.tokens) - self.n_computed == 1
