"""How many cells of the KV cache are taken, where all slots share them. A cell holds one token at one
position; slots whose sequences begin alike share the cells of that beginning, which are taken once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Run:
    """Cells that lie one after another in the same slots."""

    n_cells: int
    n_holders: int = 1


class Cells:
    """The cells of each slot, as runs. Exact, and fast for any length: a run is counted, not its cells."""

    def __init__(self, n_slots: int) -> None:
        self._runs: list[list[Run]] = [[] for _ in range(n_slots)]
        self.n_taken = 0

    def extend(self, slot: int, n_cells: int) -> None:
        """New cells at the end of a slot."""
        runs = self._runs[slot]
        if runs and runs[-1].n_holders == 1:
            runs[-1].n_cells += n_cells
        else:
            runs.append(Run(n_cells))
        self.n_taken += n_cells

    def share(self, source: int, target: int, n_cells: int) -> None:
        """Let an empty slot begin with the first `n_cells` cells of another."""
        self._split(source, n_cells)
        n_left = n_cells
        for run in self._runs[source]:
            if n_left == 0:
                break
            run.n_holders += 1
            self._runs[target].append(run)
            n_left -= run.n_cells

    def truncate(self, slot: int, n_kept: int) -> None:
        """Give up all cells of a slot but the first `n_kept`."""
        self._split(slot, n_kept)
        runs = self._runs[slot]
        n_here = sum(run.n_cells for run in runs)
        while n_here > n_kept:
            run = runs.pop()
            n_here -= run.n_cells
            run.n_holders -= 1
            if run.n_holders == 0:
                self.n_taken -= run.n_cells

    def cut(self, slot: int, start: int, n_cells: int) -> None:
        """Give up `n_cells` cells from `start` on and keep what follows. They must not be shared."""
        self._split(slot, start)
        self._split(slot, start + n_cells)
        kept, at = [], 0
        for run in self._runs[slot]:
            if not start <= at < start + n_cells:
                kept.append(run)
            at += run.n_cells
        self._runs[slot] = kept
        self.n_taken -= n_cells

    def is_shared(self, slot: int, start: int) -> bool:
        """Whether another slot holds any of this slot's cells from `start` on."""
        self._split(slot, start)
        at = 0
        for run in self._runs[slot]:
            if at >= start and run.n_holders > 1:
                return True
            at += run.n_cells
        return False

    def n_taken_by(self, slots: list[int]) -> int:
        """Distinct cells of some slots together."""
        return sum(run.n_cells for run in {run for slot in slots for run in self._runs[slot]})

    def _split(self, slot: int, at: int) -> None:
        """Let a run of the slot end after `at` cells, in every slot that holds it."""
        start = 0
        for run in self._runs[slot]:
            if start < at < start + run.n_cells:
                tail = Run(start + run.n_cells - at, run.n_holders)
                run.n_cells = at - start
                for runs in self._runs:
                    if run in runs:
                        runs.insert(runs.index(run) + 1, tail)
                return
            start += run.n_cells
