"""One request inside the engine, from its tokens to its last event."""

from __future__ import annotations

from dataclasses import dataclass

from nemolocal.engine.backend import Sampler
from nemolocal.engine.text import TextStream
from nemolocal.types import GenerationParams


@dataclass(slots=True)
class Sequence:
    """`tokens` is the prompt and what was sampled so far; the first `n_computed` of them are in the KV
    cache. Reading the prompt and writing the answer are the same thing: computing what is pending."""

    id: int
    tokens: list[int]
    params: GenerationParams
    n_prompt: int
    n_max: int  # tokens that prompt and answer may take together
    sampler: Sampler
    text: TextStream
    slot: int | None = None
    n_computed: int = 0
    n_cached: int | None = None  # tokens that did not have to be read when it got its first slot
    n_unsent: int = 0  # tokens whose text was held back

    @property
    def n_pending(self) -> int:
        return len(self.tokens) - self.n_computed

    @property
    def n_new(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether its next row gives the next token of an answer that has begun."""
        return self.n_pending == 1 and self.n_new > 0
