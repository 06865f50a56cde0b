"""States of sequences that are kept in RAM: with the tokens that led to each, within a limit, the least
recently used going first. Knows tokens and bytes; what a state means only the backend knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nemolocal.engine.backend import Adapters


@dataclass(eq=False, slots=True)
class SavedState:
    """The state after `tokens`, with these adapters. The first `n_saved` tokens are on disk too."""

    tokens: list[int]
    adapters: Adapters
    state: memoryview
    last_used: int
    n_saved: int = 0


class SavedStates:
    """All of one kind; together they take `limit_bytes` at most."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: list[SavedState] = []
        self._clock = 0

    @property
    def is_open(self) -> bool:
        """Whether any may be kept."""
        return self._limit_bytes > 0

    @property
    def n_bytes(self) -> int:
        return sum(len(saved.state) for saved in self._kept)

    def of(self, adapters: Adapters) -> Iterator[SavedState]:
        """Those that were computed with these adapters."""
        return (saved for saved in self._kept if saved.adapters == adapters)

    def find(self, tokens: list[int], adapters: Adapters) -> SavedState | None:
        """The state after just these tokens."""
        return next((saved for saved in self.of(adapters) if saved.tokens == tokens), None)

    def fits(self, state: memoryview) -> bool:
        """Whether it is a state, and not larger than the limit by itself."""
        return 0 < len(state) <= self._limit_bytes

    def add(self, tokens: list[int], adapters: Adapters, state: memoryview, *, n_saved: int = 0) -> None:
        """Keep a state that fits; the least recently used ones make room for it."""
        self._clock += 1
        self._kept.append(SavedState(tokens, adapters, state, self._clock, n_saved))
        while self.n_bytes > self._limit_bytes:
            self._kept.remove(min(self._kept, key=lambda saved: saved.last_used))

    def drop(self, useless: list[SavedState]) -> None:
        self._kept = [saved for saved in self._kept if saved not in useless]

    def touch(self, saved: SavedState) -> None:
        """Note that it was used."""
        self._clock += 1
        saved.last_used = self._clock
