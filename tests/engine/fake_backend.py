"""A backend without a model, strict about its KV cache: it breaks where llama.cpp would answer nonsense."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nemolocal.engine.backend import Adapters, Batch, CacheFullError, Row, Sampled
from nemolocal.errors import EngineError
from nemolocal.types import Candidate, Prompt, SamplingParams, Segment, TokenLogprob

END = 0
CONTROL = 999
N_VOCAB = 1000


def next_token(tokens: Sequence[int]) -> int:
    """What the fake model says after `tokens`: depends on every one of them and on their order."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return END if value % 41 == 0 else 1 + value % (N_VOCAB - 1)


def repeating(tokens: Sequence[int]) -> int:
    """A fake model that mostly says what it said seven tokens before, so that guesses are often right."""
    token = next_token(tokens)
    return tokens[-7] if token % 6 and len(tokens) >= 7 and 0 < tokens[-7] < CONTROL else token


def answer(prompt: Sequence[int], n_max: int) -> list[int]:
    """The whole answer to a prompt, by definition: up to `n_max` tokens or the end token."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < n_max:
        token = next_token(tokens)
        if token == END:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


class FakeSampler:
    def __init__(self, n_logprobs: int | None = None) -> None:
        self.n_closed = 0
        self.n_logprobs = n_logprobs

    def close(self) -> None:
        self.n_closed += 1


class FakeVocab:
    def __init__(self) -> None:
        self.pieces: dict[int, bytes] = {}

    def tokenize(self, prompt: Prompt) -> list[int]:
        tokens: list[int] = []
        for part in prompt:
            tokens += [ord(c) % N_VOCAB for c in part.text] if isinstance(part, Segment) else [part]
        if any(token >= N_VOCAB for token in tokens):
            raise ValueError("Token outside the vocabulary.")
        return tokens

    def piece(self, token: int) -> bytes:
        return self.pieces.get(token, b"<%d>" % token)

    def is_end(self, token: int) -> bool:
        return token == END

    def is_control(self, token: int) -> bool:
        return token == CONTROL


@dataclass(frozen=True, eq=False, slots=True)
class Cell:
    """A cell of the cache, computed with these adapters. One that was moved was computed after another text
    than the one that stands before it."""

    adapters: Adapters = ()
    is_moved: bool = False


class FakeMemory:
    """Keeps for each slot the tokens whose keys and values it holds, and those that its recurrent state has
    read: where it cannot roll back, the two may part until a state is put back."""

    def __init__(self, *, n_slots: int, n_ctx: int, can_rollback: bool, is_shared: bool) -> None:
        self.can_rollback, self.is_shared, self.can_shift = can_rollback, is_shared, can_rollback
        self.n_cells = n_ctx if is_shared else n_ctx * n_slots
        self.held: list[list[int]] = [[] for _ in range(n_slots)]
        self.state: list[list[int]] = [[] for _ in range(n_slots)]
        self.cells: list[list[Cell]] = [[] for _ in range(n_slots)]  # one object for each distinct cell
        self.n_saved = 0
        self.refuses_states = False

    @property
    def n_taken(self) -> int:
        """Distinct cells that hold something."""
        return len({cell for cells in self.cells for cell in cells})

    def write(self, row: Row, adapters: Adapters = ()) -> None:
        assert row.start == len(self.held[row.slot]), "a position was skipped or written twice"
        assert self.state[row.slot] == self.held[row.slot], "a state that has read something else"
        self.held[row.slot] += row.tokens
        self.state[row.slot] = list(self.held[row.slot])
        self.cells[row.slot] += [Cell(adapters) for _ in row.tokens]

    def remove(self, slot: int, start: int) -> bool:
        if not self.can_rollback and 0 < start < len(self.state[slot]):
            return False
        del self.held[slot][start:]
        del self.cells[slot][start:]
        del self.state[slot][start:]
        return True

    def copy(self, source: int, target: int, end: int) -> None:
        assert not self.held[target]
        assert end <= len(self.held[source])
        self.held[target] = self.held[source][:end]
        self.state[target] = list(self.held[target] if self.can_rollback else self.state[source])
        cells = self.cells[source][:end]
        self.cells[target] = cells if self.is_shared else [replace(cell) for cell in cells]

    def shift(self, slot: int, start: int, n: int) -> None:
        assert self.can_shift
        mine = self.cells[slot][start:]
        others = {cell for index, cells in enumerate(self.cells) if index != slot for cell in cells}
        assert not others.intersection(mine), "cells of others were moved"
        del self.held[slot][start : start + n]
        self.cells[slot][start:] = [Cell(cell.adapters, is_moved=True) for cell in mine[n:]]
        self.state[slot] = list(self.held[slot])

    def save(self, slot: int, *, is_partial: bool) -> memoryview:
        self.n_saved += 1
        assert self.state[slot] == self.held[slot]
        adapters = [cell.adapters for cell in self.cells[slot]]
        return memoryview(bytearray(json.dumps([is_partial, self.state[slot], adapters]).encode()))

    def restore(self, slot: int, state: memoryview, *, is_partial: bool) -> bool:
        was_partial, tokens, adapters = json.loads(bytes(state))
        assert was_partial == is_partial
        cells = [Cell(tuple(each)) for each in adapters]
        if self.refuses_states:
            self.remove(slot, 0)
            return False
        if is_partial:
            assert self.held[slot][: len(tokens)] == tokens, "the rest of the state is not there"
            kept = self.cells[slot][: len(tokens)]
            assert [cell.adapters for cell in kept] == [cell.adapters for cell in cells]
        else:
            assert not self.held[slot]
            self.held[slot] = list(tokens)
            self.cells[slot] = cells
        self.state[slot] = tokens
        return True


class FakeBackend:
    """Computes `says` of what the memory holds, and checks every call against it."""

    def __init__(
        self,
        *,
        n_ctx: int = 256,
        n_slots: int = 4,
        n_batch: int = 32,
        can_rollback: bool = True,
        is_shared: bool = True,
        n_drafted: int = 16,
        is_async: bool = False,
        says: Callable[[Sequence[int]], int] = next_token,
    ) -> None:
        self._says = says
        self.n_ctx, self.n_slots, self.n_batch, self.is_async = n_ctx, n_slots, n_batch, is_async
        self.n_outputs = n_slots + n_drafted
        self.vocab = FakeVocab()
        self.memory = FakeMemory(n_slots=n_slots, n_ctx=n_ctx, can_rollback=can_rollback, is_shared=is_shared)
        self.samplers: list[FakeSampler] = []
        self.batches: list[Batch] = []
        self.n_refusals = 0  # the next batches that find no cell
        self.is_broken = False
        self._launched: Batch | None = None

    def sampler(self, params: SamplingParams, prompt: list[int], *, n_logprobs: int | None) -> FakeSampler:
        self.samplers.append(FakeSampler(n_logprobs))
        return self.samplers[-1]

    def launch(self, batch: Batch) -> None:
        assert self._launched is None, "two batches at once"
        if self.is_broken:
            raise EngineError("The device is gone.")
        if self.n_refusals:
            self.n_refusals -= 1
            raise CacheFullError
        assert 0 < batch.n_tokens <= self.n_batch
        slots = [row.slot for row in batch.rows]
        assert sorted(set(slots)) == slots, "slots out of order, or twice"
        n_outputs = sum(1 + row.n_drafted for row in batch.rows if row.sampler)
        assert n_outputs <= self.n_outputs, "more outputs than there is room for"
        if self.memory.is_shared:
            assert self.memory.n_taken + batch.n_tokens <= self.n_ctx, "more cells than there are"
        for row in batch.rows:
            self.memory.write(row, batch.adapters)
            assert len(self.memory.held[row.slot]) <= self.n_ctx, "beyond the context"
        self.batches.append(batch)
        self._launched = batch

    def collect(self) -> list[Sampled]:
        assert self._launched is not None, "nothing was launched"
        batch, self._launched = self._launched, None
        return [self._sample(row, batch) for row in batch.rows if row.sampler]

    def _sample(self, row: Row, batch: Batch) -> Sampled:
        sampled = Sampled([])
        text = self.memory.held[row.slot]
        cells = self.memory.cells[row.slot]
        assert {cell.adapters for cell in cells} == {batch.adapters}, "read with other adapters"
        n_sure = len(text) - row.n_drafted
        for index in range(row.n_drafted + 1):
            token = self._says([*text[: n_sure + index], *map(int, batch.adapters)])
            sampled.tokens.append(token)
            if isinstance(row.sampler, FakeSampler) and row.sampler.n_logprobs is not None:
                sampled.logprobs.append(TokenLogprob(Candidate(token, self.vocab.piece(token), -1.0)))
            if index == row.n_drafted or token != text[n_sure + index]:
                break
        return sampled

    def close(self) -> None: ...
