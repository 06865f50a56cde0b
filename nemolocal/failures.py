"""Models that failed, and when they may be tried again. Knows neither engines nor plans.

A model that dies, hangs or does not load, `N_FAILURES_MOST` times in a row, is left alone for `PAUSE_S`; then
one more failure is enough. An answer that ended well forgets the row. Want of memory is remembered longer:
the next plan is to leave more of it free, on the device that lacked it where that is known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nemolocal.errors import EngineError, EngineGaveUpError

N_FAILURES_MOST: Final = 3
PAUSE_S: Final = 300.0
CAUTION_BYTES: Final = 1 << 30
"""What is kept free beyond the margin for each time that memory ran out and nothing told how much of it."""


@dataclass(slots=True)
class _Record:
    n_in_a_row: int = 0
    n_out_of_memory: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    problem: str = ""
    retry_at: float = 0.0


class Failures:
    """The failures of each model file. `now` is a clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._of: dict[Path, _Record] = {}

    def add(self, path: Path, error: Exception, *, missing: Mapping[str, int] | None = None) -> None:
        """A load that failed, or an engine that died or hung. `missing` is what the next plan is to leave
        free for it, by a GPU's UUID or "" for the RAM, where that is known."""
        record = self._of.setdefault(path, _Record())
        record.n_in_a_row += 1
        record.problem = " ".join(str(error).split()) or type(error).__name__
        if missing:
            record.missing.update(missing)
        elif isinstance(error, EngineError) and error.is_out_of_memory:
            record.n_out_of_memory += 1
        if record.n_in_a_row >= N_FAILURES_MOST:
            record.retry_at = self._now() + PAUSE_S

    def end_row(self, path: Path) -> None:
        """An answer ended well."""
        if path in self._of:
            self._of[path].n_in_a_row = 0
            self._of[path].retry_at = 0.0

    def forget(self, paths: Iterable[Path]) -> None:
        """Somebody asks for a fresh try, whatever was."""
        for path in paths:
            self._of.pop(path, None)

    def check(self, path: Path, name: str) -> None:
        """Raise EngineGaveUpError when the model of this name is not to be tried now."""
        record = self._of.get(path)
        wait_s = record.retry_at - self._now() if record else 0.0
        if record and wait_s > 0:
            raise EngineGaveUpError(
                f"{name} failed {record.n_in_a_row} times in a row, and is left alone for now. "
                f"The last time: {record.problem}",
                retry_after_s=math.ceil(wait_s),
                hint=f"It is tried again in {math.ceil(wait_s)} s, or at once when it is chosen on the page "
                "or at a restart.",
            )

    def caution_bytes(self, path: Path) -> int:
        """What the next plan is to leave free on each device, beyond its margin."""
        record = self._of.get(path)
        return record.n_out_of_memory * CAUTION_BYTES if record else 0

    def missing_bytes(self, path: Path) -> Mapping[str, int]:
        """What it is to leave free besides on single devices, each a GPU's UUID or "" for the RAM."""
        record = self._of.get(path)
        return dict(record.missing) if record else {}
