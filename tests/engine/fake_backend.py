"""A backend without a model, strict about its KV cache: it breaks where llama.cpp would answer nonsense."""

from __future__ import annotations

from collections.abc import Sequence

from nemolocal.engine.backend import Batch, CacheFullError
from nemolocal.errors import EngineError
from nemolocal.types import Prompt, SamplingParams, Segment

END = 0
N_VOCAB = 1000


def next_token(tokens: Sequence[int]) -> int:
    """What the fake model says after `tokens`: depends on every one of them and on their order."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return END if value % 41 == 0 else 1 + value % (N_VOCAB - 1)


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
    def __init__(self) -> None:
        self.n_closed = 0

    def close(self) -> None:
        self.n_closed += 1


class FakeBackend:
    """Keeps for each slot the tokens whose cells it holds, and checks every call against them."""

    def __init__(
        self, *, n_ctx: int = 256, n_slots: int = 4, n_batch: int = 32, can_rollback: bool = True
    ) -> None:
        self.n_ctx, self.n_slots, self.n_batch, self.can_rollback = n_ctx, n_slots, n_batch, can_rollback
        self.held: list[list[int]] = [[] for _ in range(n_slots)]
        self._cells: list[list[object]] = [[] for _ in range(n_slots)]  # one object for each distinct cell
        self.samplers: list[FakeSampler] = []
        self.batches: list[Batch] = []
        self.pieces: dict[int, bytes] = {}
        self.n_refusals = 0  # the next decodes that find no cell
        self.is_broken = False

    @property
    def n_taken(self) -> int:
        """Distinct cells that hold something."""
        return len({cell for cells in self._cells for cell in cells})

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

    def sampler(self, params: SamplingParams, prompt: list[int]) -> FakeSampler:
        self.samplers.append(FakeSampler())
        return self.samplers[-1]

    def decode(self, batch: Batch) -> list[int]:
        if self.is_broken:
            raise EngineError("The device is gone.")
        if self.n_refusals:
            self.n_refusals -= 1
            raise CacheFullError
        assert 0 < batch.n_tokens <= self.n_batch
        assert len({row.slot for row in batch.rows}) == len(batch.rows)
        assert self.n_taken + batch.n_tokens <= self.n_ctx, "more cells than there are"
        self.batches.append(batch)
        sampled = []
        for row in batch.rows:
            assert row.start == len(self.held[row.slot]), "a position was skipped or written twice"
            self.held[row.slot] += row.tokens
            self._cells[row.slot] += [object() for _ in row.tokens]
            if row.sampler is not None:
                sampled.append(next_token(self.held[row.slot]))
        return sampled

    def remove(self, slot: int, start: int) -> bool:
        if start > 0 and not self.can_rollback:
            return False
        del self.held[slot][start:]
        del self._cells[slot][start:]
        return True

    def copy(self, source: int, target: int, end: int) -> None:
        assert self.can_rollback
        assert not self.held[target]
        assert end <= len(self.held[source])
        self.held[target] = self.held[source][:end]
        self._cells[target] = self._cells[source][:end]

    def close(self) -> None: ...
