"""Who holds which slot of the KV cache, and what the idle slots still remember.

A slot whose sequence has ended keeps its tokens, so that the next turn of the same conversation, or another
prompt that begins alike, reads only what is new. The least recently used one gives way first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nemolocal.engine.backend import Backend


@dataclass(slots=True)
class Slot:
    """`tokens` are those whose cells are in the cache. A slot in use belongs to a running sequence."""

    index: int
    tokens: list[int] = field(default_factory=list)
    is_used: bool = False
    last_used: int = 0


class SlotCache:
    """All slots of one backend. Cells that two slots share are counted for both, so `n_free` is a safe
    lower bound."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._clock = 0
        self.slots = [Slot(index) for index in range(backend.n_slots)]

    @property
    def n_free(self) -> int:
        """Cells that hold nothing."""
        return self._backend.n_ctx - sum(len(slot.tokens) for slot in self.slots)

    def has_idle_slot(self) -> bool:
        return any(not slot.is_used for slot in self.slots)

    def take(self, prompt: list[int], *, reuse: bool) -> tuple[int, int]:
        """Give an idle slot to a new sequence: (its index, how many tokens of the prompt it holds already).

        At least one token of the prompt is always left to be computed, since its logits are needed.
        """
        idle = [slot for slot in self.slots if not slot.is_used]
        oldest = min(idle, key=lambda slot: (bool(slot.tokens), slot.last_used))
        slot, n_reused = oldest, 0
        if reuse:
            slot, n_reused = self._best(prompt, idle, oldest)
        self._truncate(slot, n_reused)
        slot.is_used = True
        self._touch(slot)
        return slot.index, len(slot.tokens)

    def extend(self, index: int, tokens: list[int]) -> None:
        """Record that `tokens` were computed at the end of a slot."""
        self.slots[index].tokens.extend(tokens)

    def release(self, index: int) -> None:
        """The sequence has ended; its tokens are remembered until their cells are needed."""
        slot = self.slots[index]
        slot.is_used = False
        self._touch(slot)

    def make_room(self, n_cells: int) -> bool:
        """Forget idle slots, the least recently used first, until `n_cells` are free."""
        while self.n_free < n_cells:
            kept = [slot for slot in self.slots if not slot.is_used and slot.tokens]
            if not kept:
                return False
            self._truncate(min(kept, key=lambda slot: slot.last_used), 0)
        return True

    def forget_idle(self) -> bool:
        """Forget what every idle slot holds; false when there was nothing to forget."""
        kept = [slot for slot in self.slots if not slot.is_used and slot.tokens]
        for slot in kept:
            self._truncate(slot, 0)
        return bool(kept)

    def _best(self, prompt: list[int], idle: list[Slot], oldest: Slot) -> tuple[Slot, int]:
        n_most = len(prompt) - 1
        if not self._backend.can_rollback:
            # State that cannot go back serves only a prompt that goes on from its very end.
            whole = [s for s in idle if s.tokens and s.tokens == prompt[: len(s.tokens)]]
            whole = [s for s in whole if len(s.tokens) <= n_most]
            best = max(whole, key=lambda slot: len(slot.tokens), default=oldest)
            return best, len(best.tokens) if whole else 0
        source = max(self.slots, key=lambda slot: _n_common(slot.tokens, prompt))
        n_common = min(_n_common(source.tokens, prompt), n_most)
        if n_common == 0:
            return oldest, 0
        if source is oldest or (not source.is_used and n_common == len(source.tokens)):
            return source, n_common
        # Copying keeps what the other conversation remembers; the cells are shared, not doubled.
        self._truncate(oldest, 0)
        self._backend.copy(source.index, oldest.index, n_common)
        oldest.tokens = source.tokens[:n_common]
        return oldest, n_common

    def _truncate(self, slot: Slot, n_kept: int) -> None:
        if len(slot.tokens) == n_kept:
            return
        if not self._backend.remove(slot.index, n_kept):
            self._backend.remove(slot.index, 0)
            n_kept = 0
        del slot.tokens[n_kept:]

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock


def _n_common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning. Halves the interval, since comparing slices runs in C."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n  # a[:low] == b[:low] always, a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
