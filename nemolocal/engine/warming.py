"""Between the slots' memory and the states on disk: what is worth saving, and what is worth reading back.

All work with files runs on threads of its own; the states go in and out of the model between steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from weakref import WeakValueDictionary

from nemolocal.engine.backend import Adapters
from nemolocal.engine.cache import SlotCache, WarmState, is_worth_putting_back
from nemolocal.engine.warm import WarmStore

log = logging.getLogger(__name__)

N_WORTH_SAVING = 1024  # tokens; less is read again in the time that a large file takes
N_WORTH_THAWING = 512  # tokens that the memory does not know by itself
IDLE_S = 2.0  # quiet seconds before anything is saved
CLOSING_S = 3.0  # for what is being written when the process ends


class Warming:
    """Saves what is idle and reads states back, for sequences with the adapters of the load. States that were
    read back and wait for a slot take `limit_bytes` of RAM at most, or are only one."""

    def __init__(
        self,
        store: WarmStore,
        cache: SlotCache,
        adapters: Adapters,
        *,
        can_rollback: bool,
        limit_bytes: int,
    ) -> None:
        self._store = store
        self._cache = cache
        self._adapters = adapters
        self._is_whole = not can_rollback
        self._limit_bytes = limit_bytes
        # By the names of their files; for the reader's thread. Who waits for the same one shares it.
        self._waiting: WeakValueDictionary[str, WarmState] = WeakValueDictionary()
        # Two threads: who waits for a state is not to wait for another one to be written.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="warm-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="warm-writer")
        self._saving: Future[bool] | None = None
        self._is_lost = False

    @property
    def may_save(self) -> bool:
        """Whether a quiet moment may be of use."""
        in_slots = self._cache.unsaved(N_WORTH_SAVING, self._adapters) is not None
        return in_slots or self._cache.has_unsaved_parked(N_WORTH_SAVING, self._adapters)

    @property
    def has_unsaved(self) -> bool:
        """Whether something idle is worth saving and the disk has time for it."""
        is_busy = self._saving is not None and not self._saving.done()
        return self.may_save and not is_busy

    def save_one(self) -> None:
        """Take the state whose loss would cost most, of the slots before those in RAM, and have it
        written."""
        index = self._cache.unsaved(N_WORTH_SAVING, self._adapters)
        warm = (
            self._cache.freeze_parked(N_WORTH_SAVING, self._adapters)
            if index is None
            else self._cache.freeze(index)
        )
        if warm:
            self._saving = self._writer.submit(
                self._store.save, warm.tokens, warm.state, whole=self._is_whole
            )

    def read(
        self, tokens: Sequence[int], adapters: Adapters, then: Callable[[Future[WarmState | None]], None]
    ) -> bool:
        """Look for a state that this prompt begins with; false, and `then` is not called, when none can be of
        use. `then` is called from another thread."""
        if adapters != self._adapters or len(tokens) < N_WORTH_THAWING:
            return False
        n_known = self._cache.n_at_hand(list(tokens), adapters)
        if len(tokens) - n_known < N_WORTH_THAWING:
            return False
        self._reader.submit(self._read, tokens, n_known).add_done_callback(then)
        return True

    def forget(self) -> None:
        """The model failed: what its slots hold is not to be trusted."""
        self._is_lost = True

    def close(self) -> None:
        """Save what is worth it, as far as the time goes; what is half written is swept at the next start."""
        until = time.monotonic() + CLOSING_S
        while self._is_written(until) and self.may_save and not self._is_lost:
            self.save_one()
        if not self._is_written(until):
            log.warning("The warm cache was not written to its end: the disk is too slow.")
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _is_written(self, until: float) -> bool:
        """Wait for what is being written; false when that takes too long."""
        writing = [self._saving] if self._saving else []
        return not wait(writing, max(until - time.monotonic(), 0.0)).not_done

    def _read(self, tokens: Sequence[int], n_known: int) -> WarmState | None:
        entry = self._store.find(tokens[:-1], whole=self._is_whole)
        if entry is None or entry.n_common - n_known < N_WORTH_THAWING:
            return None
        if not is_worth_putting_back(entry.n_tokens, entry.n_common):
            return None
        waiting = dict(self._waiting)
        if entry.name in waiting:
            return waiting[entry.name]
        n_bytes = entry.state_bytes + sum(len(warm.state) for warm in waiting.values())
        if waiting and n_bytes > self._limit_bytes:
            return None  # reading the text anew costs time, and no memory
        loaded = self._store.load(entry)
        if loaded is None:
            return None
        tokens, state = loaded
        self._waiting[entry.name] = warm = WarmState(tokens, state, len(tokens))
        return warm
