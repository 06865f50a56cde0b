"""The border between the scheduler and the model: what it may ask, in one protocol.

The scheduler sees only this; llama.py implements it on llama.cpp, the tests implement it in plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from nemolocal.types import Prompt, SamplingParams


class CacheFullError(Exception):
    """The KV cache has no place for this batch; nothing of it was computed."""


class Sampler(Protocol):
    """Chooses the next token of one sequence and remembers what it chose (penalties, random state)."""

    def close(self) -> None:
        """Free it. Must be called once."""


@dataclass(slots=True)
class Row:
    """A run of tokens of one sequence that goes into a batch.

    `tokens` stand at positions `start`, `start` + 1, … of slot `slot`. With a `sampler`, the token that
    follows the last one is sampled.
    """

    slot: int
    start: int
    tokens: list[int]
    sampler: Sampler | None = None


@dataclass(slots=True)
class Batch:
    """What one step computes. Rows of different sequences stand side by side."""

    rows: list[Row] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


class Backend(Protocol):
    """One loaded model with its KV cache of `n_ctx` cells, shared by `n_slots` sequences.

    `can_rollback` says whether the end of a sequence can be removed, and a beginning of it copied to
    another slot: true for plain attention, false for recurrent state and sliding windows.
    """

    n_ctx: int
    n_slots: int
    n_batch: int
    can_rollback: bool

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; may be called from another thread. Raises ValueError for ids outside the
        vocabulary."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; b"" for control tokens."""

    def is_end(self, token: int) -> bool:
        """Whether the model ends its answer with this token."""

    def sampler(self, params: SamplingParams, prompt: list[int]) -> Sampler:
        """A new sampler for one sequence. Raises InvalidRequestError for a bias on a token that is not in
        the vocabulary."""

    def decode(self, batch: Batch) -> list[int]:
        """Compute a batch; one new token for each row that has a sampler, in order.

        Raises CacheFullError, or EngineError when the model can no longer be used.
        """

    def remove(self, slot: int, start: int) -> bool:
        """Forget what `slot` holds from position `start` on; false if the memory cannot do that."""

    def copy(self, source: int, target: int, end: int) -> None:
        """Let empty slot `target` begin with the first `end` positions of `source`."""

    def close(self) -> None:
        """Free the model and its memory."""
