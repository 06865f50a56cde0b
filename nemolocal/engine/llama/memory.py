"""`Memory` on llama.cpp: the KV cache and the recurrent state, by slot (which llama.cpp calls a sequence)."""

from __future__ import annotations

import ctypes
from typing import Any

PARTIAL_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: recurrent state and sliding windows


class LlamaMemory:
    """The memory of one context."""

    def __init__(self, library: Any, model: Any, context: Any, *, n_slots: int, is_shared: bool) -> None:
        self._library = library
        self._context = context
        self._memory = library.llama_get_memory(context)
        n_ctx = int(library.llama_n_ctx(context))
        self.is_shared = is_shared
        self.n_cells = n_ctx
        self.n_ctx_slot = n_ctx if is_shared else n_ctx // n_slots
        self.has_window = library.llama_model_n_swa(model) > 0
        self.can_rollback = not (
            library.llama_model_is_recurrent(model) or library.llama_model_is_hybrid(model) or self.has_window
        )
        self._copying: dict[int, int] = {}  # target to source, of copies that the next batch will make
        self.can_shift = self.can_rollback and bool(library.llama_memory_can_shift(self._memory))

    def remove(self, slot: int, start: int) -> bool:
        return bool(self._library.llama_memory_seq_rm(self._memory, slot, start, -1))

    def copy(self, source: int, target: int, end: int) -> None:
        if self.is_shared:
            self._library.llama_memory_seq_cp(self._memory, source, target, 0, end)
            return
        if self.has_window:
            # llama.cpp would copy with the next batch, over what is put back into the window until then.
            self.restore(target, self.save(source, is_partial=False), is_partial=False)
            return
        # Between the cells of two slots only all of them can be copied.
        self._library.llama_memory_seq_cp(self._memory, source, target, 0, -1)
        self._copying[target] = source
        if self.can_rollback:
            self.remove(target, end)

    def settle(self) -> None:
        """A batch was begun, and with it all copies are made."""
        self._copying.clear()

    def shift(self, slot: int, start: int, n: int) -> None:
        self._library.llama_memory_seq_rm(self._memory, slot, start, start + n)
        self._library.llama_memory_seq_add(self._memory, slot, start + n, -1, -n)

    def save(self, slot: int, *, is_partial: bool) -> memoryview:
        if slot in self._copying:  # it is not there yet
            return memoryview(b"")
        flags = PARTIAL_ONLY if is_partial else 0
        size = self._library.llama_state_seq_get_size_ext(self._context, slot, flags)
        try:
            state = (ctypes.c_uint8 * size)()
        except MemoryError:
            return memoryview(b"")
        n = self._library.llama_state_seq_get_data_ext(self._context, state, size, slot, flags)
        return memoryview(state).cast("B")[:n]

    def restore(self, slot: int, state: memoryview, *, is_partial: bool) -> bool:
        is_copied = slot in self._copying or slot in self._copying.values()
        if not is_partial and is_copied:  # with the next batch, from what it was or over what is put back
            self.remove(slot, 0)
            return False
        flags = PARTIAL_ONLY if is_partial else 0
        # A view where possible, not a copy: a state may be gigabytes.
        array = ctypes.c_uint8 * len(state)
        data = array.from_buffer_copy(state) if state.readonly else array.from_buffer(state)
        n = self._library.llama_state_seq_set_data_ext(self._context, data, len(state), slot, flags)
        if n != len(state):
            self.remove(slot, 0)
            return False
        return True

    def clear(self) -> None:
        self._library.llama_memory_clear(self._memory, True)
