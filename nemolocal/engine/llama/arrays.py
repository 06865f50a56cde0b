"""The C arrays of a batch, made once; a step only overwrites their beginning."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from nemolocal.engine.backend import Row


class BatchArrays:
    """Room for `n_batch` tokens. `batch` is what llama.cpp takes, and `outputs` says for each token whether
    something is wanted of it."""

    def __init__(self, library: Any, n_batch: int) -> None:
        self._tokens = (library.llama_token * n_batch)()
        self._positions = (library.llama_pos * n_batch)()
        self._counts = (ctypes.c_int32 * n_batch)(*([1] * n_batch))
        self._slots = (library.llama_seq_id * n_batch)()
        self.outputs = (ctypes.c_int8 * n_batch)()
        pointer = ctypes.POINTER(library.llama_seq_id)
        start, size = ctypes.addressof(self._slots), ctypes.sizeof(library.llama_seq_id)
        self._slot_pointers = (pointer * n_batch)(
            *(ctypes.cast(start + i * size, pointer) for i in range(n_batch))
        )
        self.batch = library.llama_batch(
            n_tokens=0,
            token=self._tokens,
            embd=None,
            pos=self._positions,
            n_seq_id=self._counts,
            seq_id=self._slot_pointers,
            logits=self.outputs,
        )

    def write(self, rows: Sequence[Row], *, is_output: bool) -> list[int]:
        """Put in the rows, with something wanted of each token or of none; where each row ends."""
        at, ends = 0, []
        for row in rows:
            n = len(row.tokens)
            end = at + n
            self._tokens[at:end] = row.tokens
            self._positions[at:end] = range(row.start, row.start + n)
            self._slots[at:end] = [row.slot] * n
            self.outputs[at:end] = [int(is_output)] * n
            ends.append(end)
            at = end
        self.batch.n_tokens = at
        return ends
