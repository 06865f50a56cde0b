"""Saved states of memories that cannot be rolled back (recurrent state, sliding windows), so that an edited
or regenerated turn goes on from the nearest border instead of from the start.

Knows tokens and bytes; where the borders are is in `borders`, what a state means only the backend knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

N_WORTH_KEEPING = 64  # tokens; a shorter beginning is read as fast as its state is put back
N_BETWEEN = 4096  # tokens from one checkpoint of a long text to the next
N_QUESTION = 256  # tokens; a long prompt mostly ends with a question, and the next one asks another


@dataclass(eq=False, slots=True)
class Checkpoint:
    """The state after reading `tokens`, with these adapters."""

    tokens: tuple[int, ...]
    key: tuple[float, ...]
    state: memoryview
    last_used: int


class Checkpoints:
    """All checkpoints of one model; past `limit_bytes` the least recently used go."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: list[Checkpoint] = []
        self._clock = 0

    @property
    def n_bytes(self) -> int:
        return sum(len(checkpoint.state) for checkpoint in self._kept)

    @property
    def is_open(self) -> bool:
        """Whether any may be kept."""
        return self._limit_bytes > 0

    def has(self, tokens: Sequence[int], key: tuple[float, ...]) -> bool:
        wanted = tuple(tokens)
        return any(c.key == key and c.tokens == wanted for c in self._kept)

    def add(self, tokens: Sequence[int], key: tuple[float, ...], state: memoryview) -> None:
        if not 0 < len(state) <= self._limit_bytes:
            return
        self._clock += 1
        self._kept.append(Checkpoint(tuple(tokens), key, state, self._clock))
        while self.n_bytes > self._limit_bytes:
            self._kept.remove(min(self._kept, key=lambda checkpoint: checkpoint.last_used))

    def best(
        self, prompt: Sequence[int], key: tuple[float, ...], n_most: Callable[[Checkpoint], int]
    ) -> Checkpoint | None:
        """The longest one that the prompt begins with; `n_most` says how much of one can be used now."""
        fitting = [
            c
            for c in self._kept
            if c.key == key
            and len(c.tokens) < len(prompt)
            and c.tokens == tuple(prompt[: len(c.tokens)])
            and n_most(c) >= len(c.tokens)
        ]
        best = max(fitting, key=lambda c: len(c.tokens), default=None)
        if best:
            self._clock += 1
            best.last_used = self._clock
        return best

    def before_question(self, tokens: Sequence[int], key: tuple[float, ...]) -> Checkpoint | None:
        """The longest one of a text that leaves its closing question out, so that it serves another question
        about the same text."""
        own = [c for c in self._kept if c.key == key and c.tokens == tuple(tokens[: len(c.tokens)])]
        longest = max((len(c.tokens) for c in own), default=0)
        shorter = [c for c in own if len(c.tokens) <= longest - N_QUESTION // 2]
        return max(shorter or own, key=lambda c: len(c.tokens), default=None)


def borders(tokens: Sequence[int], is_control: Callable[[int], bool]) -> list[int]:
    """Where a later prompt is likely to part from this one: how many tokens come before each such place.

    The end of the first turn (system prompts are shared), the starts of the last two turns, a place in front
    of the closing question of a long text, and regular places between.
    """
    n = len(tokens)
    if n <= N_WORTH_KEEPING:
        return []
    turns = [i for i in range(1, n) if is_control(tokens[i]) and not is_control(tokens[i - 1])]
    places = {*turns[1:2], *turns[-3:], *range(N_BETWEEN, n, N_BETWEEN)}
    if n > 4 * N_QUESTION:
        places.add(n - N_QUESTION)
    return sorted(place for place in places if N_WORTH_KEEPING <= place < n)
