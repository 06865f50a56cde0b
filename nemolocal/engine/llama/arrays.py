"""The C arrays of a batch, made once; a step only overwrites their beginning."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from nemolocal.engine.backend import Row


class BatchArrays:
    """Room for `n_batch` tokens. `batch` is what llama.cpp takes."""

    def __init__(self, library: Any, n_batch: int) -> None:
        self._tokens = (library.llama_token * n_batch)()
        self._positions = (library.llama_pos * n_batch)()
        self._counts = (ctypes.c_int32 * n_batch)(*([1] * n_batch))
        self._slots = (library.llama_seq_id * n_batch)()
        self._wanted = (ctypes.c_int8 * n_batch)()
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
            logits=self._wanted,
        )

    def write(self, rows: Sequence[Row], n_wanted: Sequence[int]) -> None:
        """Put in the rows; something is wanted of the last `n_wanted` tokens of each."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[ctypes.c_int8 | int] = []
        for row, n_last in zip(rows, n_wanted, strict=True):
            n = len(row.tokens)
            tokens += row.tokens
            positions += range(row.start, row.start + n)
            slots += [row.slot] * n
            wanted += [0] * (n - n_last) + [1] * n_last
        n = len(tokens)
        # Once for all rows: each of these takes as long as a few dozen tokens.
        self._tokens[:n], self._positions[:n] = tokens, positions
        self._slots[:n], self._wanted[:n] = slots, wanted
        self.batch.n_tokens = n
