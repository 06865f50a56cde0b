"""Who holds which slot of the model's memory, and what the idle slots still remember.

A slot whose sequence has ended keeps its tokens, so that the next turn of the same conversation, or another
prompt that begins alike, reads only what is new. The least recently used one gives way first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nemolocal.engine.backend import Adapters, Memory
from nemolocal.engine.cells import Cells
from nemolocal.engine.checkpoints import Checkpoints
from nemolocal.engine.parking import N_WORTH_PARKING, Parking, is_worth_saving
from nemolocal.engine.prefixes import n_common
from nemolocal.engine.states import SavedState

N_IDLE_CELLS = 4096  # parked cells that may stay all the same, for the conversations that go on
N_PUT_BACK_PER_USED = 16
"""Tokens of a saved state that may be put back for each one that a prompt begins with: reading one anew takes
a GPU about as long as putting back so many."""


@dataclass(slots=True)
class Slot:
    """`tokens` are those whose state is in the memory, computed with `adapters`. A slot in use belongs to a
    running sequence. The first `n_saved` tokens are in a warm cache on disk. After a shift only `n_whole`
    tokens were computed after what stands before them."""

    index: int
    tokens: list[int] = field(default_factory=list)
    adapters: Adapters = ()
    is_used: bool = False
    last_used: int = 0
    n_saved: int = 0
    n_parked: int = 0  # of these a copy was made in RAM, which may have been given up since
    n_whole: int | None = None


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class WarmState:
    """The saved state of a sequence, of which the first `n_saved` tokens are on disk."""

    tokens: list[int]
    state: memoryview
    n_saved: int = 0


class SlotCache:
    """All slots of one backend."""

    def __init__(self, memory: Memory, n_slots: int, *, state_bytes: int = 0) -> None:
        self._memory = memory
        self._cells = Cells(n_slots) if memory.is_shared else None
        self._clock = 0
        self._slots = [Slot(index) for index in range(n_slots)]
        # What can be rolled back needs no checkpoints.
        self._checkpoints = Checkpoints(0 if memory.can_rollback else state_bytes // 2)
        self._parking = Parking(state_bytes if memory.can_rollback else state_bytes // 2)

    @property
    def keeps_checkpoints(self) -> bool:
        return not self._memory.can_rollback and self._checkpoints.is_open

    @property
    def n_free(self) -> int:
        """Cells that hold nothing and that any slot may take."""
        return self._memory.n_cells - (self._cells.n_taken if self._cells else 0)

    @property
    def n_taken(self) -> int:
        """Cells that hold something, each counted once."""
        return self._cells.n_taken if self._cells else sum(len(slot.tokens) for slot in self._slots)

    @property
    def n_busy(self) -> int:
        """Shared cells that running sequences hold, each counted once."""
        used = [slot.index for slot in self._slots if slot.is_used]
        return self._cells.n_taken_by(used) if self._cells else 0

    def has_idle_slot(self) -> bool:
        return any(not slot.is_used for slot in self._slots)

    def n_known(self, prompt: list[int], adapters: Adapters, slots: Iterable[int] | None = None) -> int:
        """Tokens of the prompt's beginning that one of these slots (None: any) holds.

        0 where the memory cannot share or roll back, so that this would be no promise.
        """
        if not self._memory.can_rollback:
            return 0
        held = self._slots if slots is None else [self._slots[index] for index in slots]
        return max((_n_shared(slot, prompt, adapters) for slot in held), default=0)

    def n_at_hand(self, prompt: list[int], adapters: Adapters) -> int:
        """Tokens of the prompt's beginning that would not have to be read if it began now."""
        _, n_parked = self._parking.best(prompt, adapters, whole=not self._memory.can_rollback)
        return max(n_parked, self._n_in_slots(prompt, adapters))

    def _n_in_slots(self, prompt: list[int], adapters: Adapters) -> int:
        if self._memory.can_rollback:
            return self.n_known(prompt, adapters)
        longest = self._longest_whole(prompt, adapters)
        _, found = self._nearest_checkpoint(prompt, adapters)
        return max(len(longest.tokens) if longest else 0, len(found.tokens) if found else 0)

    def take(
        self, prompt: list[int], adapters: Adapters, *, reuse: bool, warm: WarmState | None = None
    ) -> tuple[int, int]:
        """Give an idle slot to a new sequence: (its index, how many tokens of the prompt it holds already).

        At least one token of the prompt is always left to be computed, since its logits are needed.
        """
        idle = [slot for slot in self._slots if not slot.is_used]
        oldest = min(idle, key=lambda slot: (bool(slot.tokens), slot.last_used, slot.index))
        slot, n_reused = oldest, 0
        warm = self._warmest(prompt, adapters, warm) if reuse else None
        if warm and self._thaw(oldest, warm, prompt, adapters):
            n_reused = min(n_common(oldest.tokens, prompt), len(prompt) - 1)
        elif reuse and self._memory.can_rollback:
            slot, n_reused = self._share(prompt, adapters, oldest)
        elif reuse:
            slot, n_reused = self._continue(prompt, adapters, oldest)
        self.truncate(slot.index, n_reused)
        slot.adapters = adapters
        slot.is_used = True
        slot.n_whole = None
        self._touch(slot)
        self._clear_parked()
        return slot.index, len(slot.tokens)

    def extend(self, index: int, tokens: list[int]) -> None:
        """Record that `tokens` were computed at the end of a slot."""
        self._slots[index].tokens.extend(tokens)
        if self._cells:
            self._cells.extend(index, len(tokens))

    def truncate(self, index: int, n_kept: int) -> None:
        """Forget all but the first `n_kept` tokens of a slot, or all where the memory cannot do that."""
        slot = self._slots[index]
        if len(slot.tokens) == n_kept:
            return
        if not self._memory.remove(index, n_kept):
            self._memory.remove(index, 0)
            n_kept = 0
        self._cut(slot, n_kept)

    def shift(self, index: int, start: int, n: int) -> bool:
        """Forget `n` tokens inside a slot and close the gap; false when others hold what follows."""
        if self._cells and self._cells.is_shared(index, start):
            self.forget_idle()
            if self._cells.is_shared(index, start):
                return False
        self._memory.shift(index, start, n)
        slot = self._slots[index]
        del slot.tokens[start : start + n]
        slot.n_whole = start
        _cap(slot, start)
        if self._cells:
            self._cells.cut(index, start, n)
        return True

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
            self.truncate(min(remembering, key=lambda slot: slot.last_used).index, 0)
        return True

    def forget_idle(self) -> bool:
        """Forget what every idle slot holds; false when there was nothing to forget."""
        remembering = self._remembering()
        for slot in remembering:
            self.truncate(slot.index, 0)
        return bool(remembering)

    def idle_lengths(self) -> dict[int, int]:
        """How many tokens each idle slot remembers."""
        return {slot.index: len(slot.tokens) for slot in self._slots if not slot.is_used}

    # States that are saved -----------------------------------------------------------------------

    def checkpoint(self, index: int) -> None:
        """Keep the state of a slot as it is now, for prompts that begin like it."""
        slot = self._slots[index]
        if self._checkpoints.is_open and not self._checkpoints.has(slot.tokens, slot.adapters):
            state = self._memory.save(index, is_partial=True)
            self._checkpoints.add(slot.tokens, slot.adapters, state)

    def unsaved(self, n_least: int, adapters: Adapters) -> int | None:
        """The slot whose loss would cost most: idle, with `n_least` tokens or more, and at least a quarter of
        them not on disk yet."""
        worth = [
            slot
            for slot in self._remembering()
            if slot.adapters == adapters and is_worth_saving(len(slot.tokens), slot.n_saved, n_least)
        ]
        return max(worth, key=lambda slot: len(slot.tokens) - slot.n_saved).index if worth else None

    def freeze(self, index: int) -> WarmState:
        """The whole state of an idle slot, to be saved on disk. It counts as saved from now on: where that
        fails, the next try would too."""
        slot = self._slots[index]
        slot.n_saved = len(slot.tokens)
        parked = self._parking.find(slot.tokens, slot.adapters)
        if parked:
            parked.n_saved = len(parked.tokens)
        state = parked.state if parked else self._memory.save(index, is_partial=False)
        self._note_saved(slot.tokens, slot.adapters)
        return WarmState(list(slot.tokens), state, slot.n_saved)

    def has_unsaved_parked(self, n_least: int, adapters: Adapters) -> bool:
        """Whether the RAM alone holds what is worth a file."""
        return self._parking.unsaved(n_least, adapters) is not None

    def freeze_parked(self, n_least: int, adapters: Adapters) -> WarmState | None:
        """The same for a state that is in RAM."""
        parked = self._parking.unsaved(n_least, adapters)
        if parked is None:
            return None
        parked.n_saved = len(parked.tokens)
        self._note_saved(parked.tokens, adapters)
        return WarmState(parked.tokens, parked.state, parked.n_saved)

    def _note_saved(self, tokens: list[int], adapters: Adapters) -> None:
        """What others begin with alike is saved with it, where a beginning of a state is of use."""
        if not self._memory.can_rollback:
            return
        for slot in self._slots:
            slot.n_saved = max(slot.n_saved, _n_shared(slot, tokens, adapters))
        self._parking.note_saved(tokens, adapters)

    def can_park(self) -> bool:
        """Whether an idle slot holds what is worth a copy in RAM."""
        return self._parking.is_open and any(map(_is_worth_parking, self._remembering()))

    def park_one(self) -> None:
        """Copy the state of the idle slot that was used last to RAM."""
        slot = max(filter(_is_worth_parking, self._remembering()), key=lambda slot: slot.last_used)
        state = self._memory.save(slot.index, is_partial=False)
        slot.n_parked = len(slot.tokens)
        whole = not self._memory.can_rollback
        self._parking.add(list(slot.tokens), slot.adapters, state, whole=whole, n_saved=slot.n_saved)
        if whole:
            self._park_beginning(slot, state)

    def _park_beginning(self, slot: Slot, state: memoryview) -> None:
        """Where there is no way back from the state after an answer: park the one before the question, too.
        It is made in a slot that holds nothing, from the whole state and a checkpoint."""
        found = self._checkpoints.before_question(slot.tokens, slot.adapters)
        spare = next((other for other in self._slots if not other.is_used and not other.tokens), None)
        if found is None or spare is None or self.n_free < len(slot.tokens):
            return
        n = len(found.tokens)
        is_there = (
            self._memory.restore(spare.index, state, is_partial=False)
            and self._memory.restore(spare.index, found.state, is_partial=True)
            and self._memory.remove(spare.index, n)
        )
        if is_there:
            beginning = self._memory.save(spare.index, is_partial=False)
            self._parking.add(found.tokens, slot.adapters, beginning, whole=True)
        self._memory.remove(spare.index, 0)

    def _clear_parked(self) -> None:
        """Let idle slots that are parked give up cells that every step would have to look past."""
        parked = [slot for slot in self._remembering() if self._is_parked(slot)]
        n_held = sum(len(slot.tokens) for slot in parked)
        for slot in sorted(parked, key=lambda slot: slot.last_used):
            if not self._memory.is_shared or n_held <= N_IDLE_CELLS:
                return
            n_held -= len(slot.tokens)
            self.truncate(slot.index, 0)

    def _is_parked(self, slot: Slot) -> bool:
        """Whether the RAM still holds just what the slot holds."""
        is_copied = slot.n_parked == len(slot.tokens)
        return is_copied and self._parking.find(slot.tokens, slot.adapters) is not None

    def _warmest(self, prompt: list[int], adapters: Adapters, warm: WarmState | None) -> WarmState | None:
        """The saved state that serves a prompt best, the parked one or the one from disk."""
        parked, n_parked = self._parking.best(prompt, adapters, whole=not self._memory.can_rollback)
        if parked is None or (warm and n_common(warm.tokens, prompt) > n_parked):
            return warm
        if n_parked - self._n_in_slots(prompt, adapters) < N_WORTH_PARKING:
            return None
        self._parking.touch(parked)
        return WarmState(parked.tokens, parked.state, parked.n_saved)

    def _thaw(self, slot: Slot, warm: WarmState, prompt: list[int], adapters: Adapters) -> bool:
        """Put a saved state into an idle slot, where it saves more than the slots already know."""
        n_of_use = n_common(warm.tokens, prompt)
        if not self._memory.can_rollback and n_of_use < len(warm.tokens):
            return False
        if n_of_use <= self._n_in_slots(prompt, adapters) or not is_worth_putting_back(
            len(warm.tokens), n_of_use
        ):
            return False
        if self.n_busy + len(warm.tokens) > self._memory.n_cells:
            return False  # not even without all that idle slots remember
        self.truncate(slot.index, 0)
        if not self.make_room(len(warm.tokens)):
            return False
        if not self._memory.restore(slot.index, warm.state, is_partial=False):
            return False
        slot.adapters = adapters
        self.extend(slot.index, warm.tokens)
        slot.n_saved = warm.n_saved
        slot.n_parked = len(warm.tokens) if self._parking.find(warm.tokens, adapters) else 0
        return True

    # Prefixes ------------------------------------------------------------------------------------

    def _share(self, prompt: list[int], adapters: Adapters, oldest: Slot) -> tuple[Slot, int]:
        """The slot to use and its known beginning, taken over or copied from the slot that knows most."""
        source = max(self._slots, key=lambda slot: _n_shared(slot, prompt, adapters))
        n_known = min(_n_shared(source, prompt, adapters), len(prompt) - 1)
        if n_known == 0:
            return oldest, 0
        if source is oldest or (not source.is_used and n_known == len(source.tokens)):
            return source, n_known
        # Copying keeps what the other conversation remembers; shared cells are not doubled by it.
        self._copy(source, oldest, n_known)
        return oldest, n_known

    def _continue(self, prompt: list[int], adapters: Adapters, oldest: Slot) -> tuple[Slot, int]:
        """The same where state cannot go back: an idle slot whose whole content the prompt begins with, or
        the nearest checkpoint, in a slot that holds the rest of it."""
        longest = self._longest_whole(prompt, adapters)
        n_known = len(longest.tokens) if longest else 0
        source, found = self._nearest_checkpoint(prompt, adapters)
        if found is None or len(found.tokens) <= n_known:
            return (longest, n_known) if longest else (oldest, 0)
        n_known = len(found.tokens)
        target = source
        if source.is_used or (source is not oldest and n_known < len(source.tokens)):
            # As above: the other conversation is remembered.
            target = oldest
            self._copy(source, target, n_known)
        is_back = self._memory.restore(target.index, found.state, is_partial=True)
        if not (is_back and self._memory.remove(target.index, n_known)):
            self.truncate(target.index, 0)
            return target, 0
        self._cut(target, n_known)
        return target, n_known

    def _longest_whole(self, prompt: list[int], adapters: Adapters) -> Slot | None:
        """The idle slot that holds most of the prompt's beginning, and nothing else."""
        shorter = [slot for slot in self._remembering() if len(slot.tokens) < len(prompt)]
        whole = [slot for slot in shorter if _n_shared(slot, prompt, adapters) == len(slot.tokens)]
        return max(whole, key=lambda slot: len(slot.tokens), default=None)

    def _nearest_checkpoint(self, prompt: list[int], adapters: Adapters) -> tuple[Slot, SavedState | None]:
        """The slot that shares most with the prompt, and the last state of it that can be gone back to."""
        source = max(self._slots, key=lambda slot: (_n_shared(slot, prompt, adapters), not slot.is_used))
        n_most = _n_shared(source, prompt, adapters)
        return source, self._checkpoints.best(prompt, adapters, n_most=n_most)

    def _copy(self, source: Slot, target: Slot, n: int) -> None:
        self.truncate(target.index, 0)
        self._memory.copy(source.index, target.index, n)
        if self._cells:
            self._cells.share(source.index, target.index, n)
        target.tokens = source.tokens[:n]
        target.n_saved, target.n_parked = min(source.n_saved, n), min(source.n_parked, n)

    def _cut(self, slot: Slot, n_kept: int) -> None:
        """Record that the memory holds only the first `n_kept` tokens of a slot."""
        del slot.tokens[n_kept:]
        _cap(slot, n_kept)
        if self._cells:
            self._cells.truncate(slot.index, n_kept)

    def _remembering(self) -> list[Slot]:
        """Idle slots that hold something."""
        return [slot for slot in self._slots if not slot.is_used and slot.tokens]

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock


def is_worth_putting_back(n_tokens: int, n_common: int) -> bool:
    """Whether a state of `n_tokens` is worth it for a prompt that begins with `n_common` of them."""
    return N_PUT_BACK_PER_USED * n_common >= n_tokens


def _n_shared(slot: Slot, prompt: list[int], adapters: Adapters) -> int:
    if slot.adapters != adapters:
        return 0
    n = n_common(slot.tokens, prompt)
    return n if slot.n_whole is None else min(n, slot.n_whole)


def _is_worth_parking(slot: Slot) -> bool:
    return len(slot.tokens) >= N_WORTH_PARKING and slot.n_parked < len(slot.tokens)


def _cap(slot: Slot, n_kept: int) -> None:
    """Of what was saved, only the first tokens still stand in the slot."""
    slot.n_saved = min(slot.n_saved, n_kept)
    slot.n_parked = min(slot.n_parked, n_kept)
