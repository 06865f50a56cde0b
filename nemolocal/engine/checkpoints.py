"""Saved states of memories that cannot be rolled back (recurrent state, sliding windows), so that an edited
or regenerated turn goes on from the nearest border instead of from the start.

Where they are worth it is in `borders`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nemolocal.engine.backend import Adapters
from nemolocal.engine.prefixes import n_common
from nemolocal.engine.states import SavedState, SavedStates

N_WORTH_KEEPING = 64  # tokens; a shorter beginning is read as fast as its state is put back
N_BETWEEN = 4096  # tokens from one checkpoint of a long text to the next
N_QUESTION = 256  # tokens; a long prompt mostly ends with a question, and the next one asks another


class Checkpoints:
    """All checkpoints of one model, `limit_bytes` in all."""

    def __init__(self, limit_bytes: int) -> None:
        self._states = SavedStates(limit_bytes)

    @property
    def is_open(self) -> bool:
        """Whether any may be kept."""
        return self._states.is_open

    def has(self, tokens: list[int], adapters: Adapters) -> bool:
        return self._states.find(tokens, adapters) is not None

    def add(self, tokens: list[int], adapters: Adapters, state: memoryview) -> None:
        """Keep the state after reading `tokens`; one that is larger than the limit is not kept."""
        if self._states.fits(state):
            self._states.add(list(tokens), adapters, state)

    def best(self, prompt: list[int], adapters: Adapters, *, n_most: int) -> SavedState | None:
        """The longest one, of `n_most` tokens at most, that the prompt begins with and goes on from."""
        n_most = min(n_most, len(prompt) - 1)
        fitting = [saved for saved in self._of_text(prompt, adapters) if len(saved.tokens) <= n_most]
        best = max(fitting, key=_length, default=None)
        if best:
            self._states.touch(best)
        return best

    def before_question(self, tokens: list[int], adapters: Adapters) -> SavedState | None:
        """The longest one of a text that leaves its closing question out, so that it serves another question
        about the same text."""
        own = self._of_text(tokens, adapters)
        longest = max(map(_length, own), default=0)
        shorter = [saved for saved in own if len(saved.tokens) <= longest - N_QUESTION // 2]
        return max(shorter or own, key=_length, default=None)

    def _of_text(self, text: list[int], adapters: Adapters) -> list[SavedState]:
        """Those that the text begins with."""
        kept = self._states.of(adapters)
        return [saved for saved in kept if n_common(saved.tokens, text) == len(saved.tokens)]


def _length(saved: SavedState) -> int:
    return len(saved.tokens)


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
