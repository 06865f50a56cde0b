"""States of idle slots, copied to RAM in quiet moments.

A cell that is held costs every step a little, whoever it belongs to, and there are fewer slots than
conversations: what is parked can leave the model's memory and come back in the time of a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemolocal.engine.backend import Adapters
from nemolocal.engine.prefixes import n_common

N_WORTH_PARKING = 256  # tokens; fewer are read as fast as they are brought back


@dataclass(eq=False, slots=True)
class Parked:
    """The whole state after `tokens`, with these adapters. The first `n_saved` tokens are on disk too."""

    tokens: list[int]
    adapters: Adapters
    state: memoryview
    last_used: int
    n_saved: int = 0


class Parking:
    """All parked states of one model; past `limit_bytes` the least recently used go."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: list[Parked] = []
        self._clock = 0

    @property
    def is_open(self) -> bool:
        """Whether any may be kept."""
        return self._limit_bytes > 0

    @property
    def n_bytes(self) -> int:
        return sum(len(parked.state) for parked in self._kept)

    def add(
        self, tokens: list[int], adapters: Adapters, state: memoryview, *, whole: bool, n_saved: int = 0
    ) -> None:
        """Keep a state; one that is larger than the limit is not kept. It takes the place of those of its own
        beginnings, unless the memory can only go on from a `whole` state."""
        if not 0 < len(state) <= self._limit_bytes:
            return
        self._kept = [
            parked
            for parked in self._kept
            if parked.adapters != adapters
            or (whole and len(parked.tokens) != len(tokens))
            or n_common(parked.tokens, tokens) < len(parked.tokens)
        ]
        self._clock += 1
        self._kept.append(Parked(tokens, adapters, state, self._clock, n_saved))
        while self.n_bytes > self._limit_bytes:
            self._kept.remove(min(self._kept, key=lambda parked: parked.last_used))

    def best(self, prompt: Sequence[int], adapters: Adapters, *, whole: bool) -> tuple[Parked | None, int]:
        """The state that serves a prompt best, and how many of the prompt's tokens it saves."""
        best, n_best = None, 0
        for parked in self._kept:
            n = n_common(parked.tokens, prompt) if parked.adapters == adapters else 0
            if n > n_best and not (whole and (n < len(parked.tokens) or n == len(prompt))):
                best, n_best = parked, n
        return best, n_best

    def find(self, tokens: list[int], adapters: Adapters) -> Parked | None:
        """The state after just these tokens."""
        for parked in self._kept:
            if parked.adapters == adapters and parked.tokens == tokens:
                return parked
        return None

    def unsaved(self, n_least: int, adapters: Adapters) -> Parked | None:
        """The state whose loss would cost most, of those that are worth a file: see `is_worth_saving`."""
        worth = [
            parked
            for parked in self._kept
            if parked.adapters == adapters and is_worth_saving(len(parked.tokens), parked.n_saved, n_least)
        ]
        return max(worth, key=lambda parked: len(parked.tokens) - parked.n_saved, default=None)

    def note_saved(self, tokens: list[int], adapters: Adapters) -> None:
        """Note that a state after these tokens is on disk; it does for all that begins like it."""
        for parked in self._kept:
            if parked.adapters == adapters:
                parked.n_saved = max(parked.n_saved, n_common(parked.tokens, tokens))

    def touch(self, parked: Parked) -> None:
        """Note that it was used."""
        self._clock += 1
        parked.last_used = self._clock


def is_worth_saving(n_tokens: int, n_saved: int, n_least: int) -> bool:
    """Whether there are `n_least` tokens or more, and at least a quarter of them is not on disk yet."""
    return n_tokens >= n_least and 4 * (n_tokens - n_saved) >= n_tokens
