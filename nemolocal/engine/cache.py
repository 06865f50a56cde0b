"""Who holds which slot of the KV cache, and what the idle slots still remember.

A slot whose sequence has ended keeps its tokens, so that the next turn of the same conversation, or another
prompt that begins alike, reads only what is new. The least recently used one gives way first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nemolocal.engine.backend import Backend
from nemolocal.engine.cells import Cells


@dataclass(slots=True)
class Slot:
    """`tokens` are those whose cells are in the cache. A slot in use belongs to a running sequence."""

    index: int
    tokens: list[int] = field(default_factory=list)
    is_used: bool = False
    last_used: int = 0


class SlotCache:
    """All slots of one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._cells = Cells(backend.n_slots)
        self._clock = 0
        self._slots = [Slot(index) for index in range(backend.n_slots)]

    @property
    def n_free(self) -> int:
        """Cells that hold nothing."""
        return self._backend.n_ctx - self._cells.n_taken

    @property
    def n_busy(self) -> int:
        """Cells that running sequences hold, shared ones counted once."""
        return self._cells.n_taken_by([slot.index for slot in self._slots if slot.is_used])

    def has_idle_slot(self) -> bool:
        return any(not slot.is_used for slot in self._slots)

    def n_known(self, prompt: list[int], slots: Iterable[int]) -> int:
        """Tokens of the prompt's beginning that one of these slots holds.

        0 where the memory cannot share or roll back, so that this would be no promise.
        """
        if not self._backend.can_rollback:
            return 0
        return max((n_common(self._slots[index].tokens, prompt) for index in slots), default=0)

    def take(self, prompt: list[int], *, reuse: bool) -> tuple[int, int]:
        """Give an idle slot to a new sequence: (its index, how many tokens of the prompt it holds already).

        At least one token of the prompt is always left to be computed, since its logits are needed.
        """
        idle = [slot for slot in self._slots if not slot.is_used]
        oldest = min(idle, key=lambda slot: (bool(slot.tokens), slot.last_used))
        slot, n_reused = oldest, 0
        if reuse and self._backend.can_rollback:
            slot, n_reused = self._share(prompt, oldest)
        elif reuse:
            slot, n_reused = self._continue(prompt, idle, oldest)
        self._truncate(slot, n_reused)
        slot.is_used = True
        self._touch(slot)
        return slot.index, len(slot.tokens)

    def extend(self, index: int, tokens: list[int]) -> None:
        """Record that `tokens` were computed at the end of a slot."""
        self._slots[index].tokens.extend(tokens)
        self._cells.extend(index, len(tokens))

    def release(self, index: int) -> None:
        """The sequence has ended; its tokens are remembered until their cells are needed."""
        slot = self._slots[index]
        slot.is_used = False
        self._touch(slot)

    def make_room(self, n_cells: int) -> bool:
        """Forget idle slots, the least recently used first, until `n_cells` are free."""
        while self.n_free < n_cells:
            remembering = self._remembering()
            if not remembering:
                return False
            self._truncate(min(remembering, key=lambda slot: slot.last_used), 0)
        return True

    def forget_idle(self) -> bool:
        """Forget what every idle slot holds; false when there was nothing to forget."""
        remembering = self._remembering()
        for slot in remembering:
            self._truncate(slot, 0)
        return bool(remembering)

    def _remembering(self) -> list[Slot]:
        """Idle slots that hold something."""
        return [slot for slot in self._slots if not slot.is_used and slot.tokens]

    def _share(self, prompt: list[int], oldest: Slot) -> tuple[Slot, int]:
        """The slot to use and its known beginning, taken over or copied from the slot that knows most."""
        source = max(self._slots, key=lambda slot: n_common(slot.tokens, prompt))
        n_known = min(n_common(source.tokens, prompt), len(prompt) - 1)
        if n_known == 0:
            return oldest, 0
        if source is oldest or (not source.is_used and n_known == len(source.tokens)):
            return source, n_known
        # Copying keeps what the other conversation remembers; the cells are shared, not doubled.
        self._truncate(oldest, 0)
        self._backend.copy(source.index, oldest.index, n_known)
        self._cells.share(source.index, oldest.index, n_known)
        oldest.tokens = source.tokens[:n_known]
        return oldest, n_known

    def _continue(self, prompt: list[int], idle: list[Slot], oldest: Slot) -> tuple[Slot, int]:
        """The same where state cannot go back: only a slot whose whole content the prompt begins with."""
        whole = [
            slot
            for slot in idle
            if 0 < len(slot.tokens) < len(prompt) and slot.tokens == prompt[: len(slot.tokens)]
        ]
        if not whole:
            return oldest, 0
        longest = max(whole, key=lambda slot: len(slot.tokens))
        return longest, len(longest.tokens)

    def _truncate(self, slot: Slot, n_kept: int) -> None:
        if len(slot.tokens) == n_kept:
            return
        if not self._backend.remove(slot.index, n_kept):
            self._backend.remove(slot.index, 0)
            n_kept = 0
        del slot.tokens[n_kept:]
        self._cells.truncate(slot.index, n_kept)

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock


def n_common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning. Halves the interval, since comparing slices runs in C."""
    low, high = 0, min(len(a), len(b)) + 1  # a[:low] == b[:low] always; high is the first length that differs
    if a[: high - 1] == b[: high - 1]:
        return high - 1
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
