"""States of idle slots, copied to RAM in quiet moments.

A cell that is held costs every step a little, whoever it belongs to, and there are fewer slots than
conversations: what is parked can leave the model's memory and come back in the time of a copy.
"""

from __future__ import annotations

from nemolocal.engine.backend import Adapters
from nemolocal.engine.prefixes import n_common
from nemolocal.engine.states import SavedState, SavedStates

N_WORTH_PARKING = 256  # tokens; fewer are read as fast as they are brought back


class Parking:
    """All parked states of one model, `limit_bytes` in all: whole states of idle slots."""

    def __init__(self, limit_bytes: int) -> None:
        self._states = SavedStates(limit_bytes)

    @property
    def is_open(self) -> bool:
        """Whether any may be kept."""
        return self._states.is_open

    def find(self, tokens: list[int], adapters: Adapters) -> SavedState | None:
        """The state after just these tokens."""
        return self._states.find(tokens, adapters)

    def touch(self, parked: SavedState) -> None:
        """Note that it was used."""
        self._states.touch(parked)

    def add(
        self, tokens: list[int], adapters: Adapters, state: memoryview, *, whole: bool, n_saved: int = 0
    ) -> None:
        """Keep a state; one that is larger than the limit is not kept. It takes the place of those of its own
        beginnings, unless the memory can only go on from a `whole` state."""
        if not self._states.fits(state):
            return
        beginnings = [
            saved
            for saved in self._states.of(adapters)
            if n_common(saved.tokens, tokens) == len(saved.tokens)
        ]
        self._states.drop([saved for saved in beginnings if not whole or saved.tokens == tokens])
        self._states.add(tokens, adapters, state, n_saved=n_saved)

    def best(self, prompt: list[int], adapters: Adapters, *, whole: bool) -> tuple[SavedState | None, int]:
        """The state that serves a prompt best, and how many of the prompt's tokens it saves."""
        best, n_best = None, 0
        for saved in self._states.of(adapters):
            n = n_common(saved.tokens, prompt)
            if n > n_best and not (whole and (n < len(saved.tokens) or n == len(prompt))):
                best, n_best = saved, n
        return best, n_best

    def unsaved(self, n_least: int, adapters: Adapters) -> SavedState | None:
        """The state whose loss would cost most, of those that are worth a file: see `is_worth_saving`."""
        worth = [
            saved
            for saved in self._states.of(adapters)
            if is_worth_saving(len(saved.tokens), saved.n_saved, n_least)
        ]
        return max(worth, key=lambda saved: len(saved.tokens) - saved.n_saved, default=None)

    def note_saved(self, tokens: list[int], adapters: Adapters) -> None:
        """Note that a state after these tokens is on disk; it does for all that begins like it."""
        for saved in self._states.of(adapters):
            saved.n_saved = max(saved.n_saved, n_common(saved.tokens, tokens))


def is_worth_saving(n_tokens: int, n_saved: int, n_least: int) -> bool:
    """Whether there are `n_least` tokens or more, and at least a quarter of them is not on disk yet."""
    return n_tokens >= n_least and 4 * (n_tokens - n_saved) >= n_tokens
