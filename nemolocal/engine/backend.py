"""The border between the scheduler and the model: what it may ask, in three small protocols.

The scheduler sees only these; llama/ implements them on llama.cpp, the tests implement them in plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from nemolocal.types import Prompt, SamplingParams, TokenLogprob

Adapters = tuple[float, ...]
"""The scale of each LoRA adapter of the load, in its order; () where the load has none."""


class CacheFullError(Exception):
    """The KV cache has no place for this batch; nothing of it was computed."""


class Sampler(Protocol):
    """Chooses the next token of one sequence and remembers what it chose (penalties, random state)."""

    def close(self) -> None:
        """Free it. Must be called once."""


@dataclass(slots=True)
class Row:
    """A run of tokens of one sequence that goes into a batch.

    `tokens` stand at positions `start`, `start` + 1, … of slot `slot`. With a `sampler`, the token after each
    of the last 1 + `n_drafted` of them is sampled, one after another, for as long as it is the one that
    follows in the row: the last `n_drafted` tokens of a row are guesses.
    """

    slot: int
    start: int
    tokens: list[int]
    sampler: Sampler | None = None
    n_drafted: int = 0


@dataclass(slots=True)
class Sampled:
    """What came after a row: its accepted guesses and one token more. `logprobs` is as long as `tokens`
    where the sampler was asked for them, else empty."""

    tokens: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Batch:
    """What one step computes. Rows of different sequences stand side by side."""

    rows: list[Row] = field(default_factory=list)
    adapters: Adapters = ()

    @property
    def n_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


class Vocab(Protocol):
    """From text to tokens and back."""

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; may be called from another thread. Raises ValueError for ids outside the
        vocabulary."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; b"" for control tokens."""

    def is_end(self, token: int) -> bool:
        """Whether the model ends its answer with this token."""

    def is_control(self, token: int) -> bool:
        """Whether the token marks the borders of turns rather than standing for text."""


class Memory(Protocol):
    """What the model remembers of each slot: keys and values of attention, recurrent state.

    `can_rollback` says whether the end of a sequence can be removed, and a beginning of it copied to another
    slot: true for plain attention, false for recurrent state and sliding windows, which go back only to a
    state that was saved. `is_shared` says whether the slots share `n_cells` cells; else each has its own.
    """

    n_cells: int
    is_shared: bool
    can_rollback: bool
    can_shift: bool

    def remove(self, slot: int, start: int) -> bool:
        """Forget what `slot` holds from position `start` on; false if the memory cannot do that."""

    def copy(self, source: int, target: int, end: int) -> None:
        """Let empty slot `target` begin with the first `end` positions of `source`. Where `can_rollback` is
        false, `restore` must follow before the target is used."""

    def shift(self, slot: int, start: int, n: int) -> None:
        """Forget `n` positions from `start` on and move what follows down by as many."""

    def save(self, slot: int, *, is_partial: bool) -> memoryview:
        """The state of a slot; with `is_partial` only what cannot be rolled back, for a slot that keeps the
        rest. Empty when it cannot be had now."""

    def restore(self, slot: int, state: memoryview, *, is_partial: bool) -> bool:
        """Put a saved state in place of the slot's; false, with the slot empty, when it does not fit."""


class Backend(Protocol):
    """One loaded model: `n_slots` sequences of up to `n_ctx` tokens each, computed `n_batch` tokens at a
    time at most, of which the successors of `n_outputs` can be sampled. `is_async` says whether `launch`
    returns before the work is done."""

    n_ctx: int
    n_slots: int
    n_batch: int
    n_outputs: int
    is_async: bool

    @property
    def vocab(self) -> Vocab: ...

    @property
    def memory(self) -> Memory: ...

    def sampler(self, params: SamplingParams, prompt: list[int], *, n_logprobs: int | None) -> Sampler:
        """A new sampler for one sequence. Raises InvalidRequestError for a bias on a token that is not in
        the vocabulary."""

    def launch(self, batch: Batch) -> None:
        """Begin to compute a batch. Raises CacheFullError, or EngineError when the model can no longer be
        used."""

    def collect(self) -> list[Sampled]:
        """Wait for the batch; what was sampled for each row with a sampler, in order. Raises EngineError."""

    def close(self) -> None:
        """Free the model and its memory."""
