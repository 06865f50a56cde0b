"""Tells a child that hangs from a slow one by its signs of life. Knows neither processes nor messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

N_LOOKS = 8
"""Looks that must all have seen nothing. Time alone would not do: while a laptop sleeps, or this program's
own loop is held up, hours may pass in which nobody could have said anything."""


class Watchdog:
    """Calls `on_hang` once when nothing was heard for the time that it was told to wait, while there was
    work. It rests by itself when a look finds no work; the next `watch` wakes it."""

    def __init__(self, *, has_work: Callable[[], bool], on_hang: Callable[[float], None]) -> None:
        self._has_work = has_work
        self._on_hang = on_hang
        self._n_silent = 0
        self._patience_s = 0.0
        self._next: asyncio.TimerHandle | None = None

    def watch(self, patience_s: float) -> None:
        """Wait for signs of life from now on, unless that is being done already. 0 means not to watch."""
        if self._next is None and patience_s > 0:
            self._patience_s = patience_s
            self._n_silent = 0
            self._wait()

    def hear(self) -> None:
        """A sign of life."""
        self._n_silent = 0

    def rest(self) -> None:
        """Stop watching."""
        if self._next:
            self._next.cancel()
            self._next = None

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(self._patience_s / N_LOOKS, self._look)

    def _look(self) -> None:
        self._next = None
        if not self._has_work():
            return
        self._n_silent += 1
        if self._n_silent < N_LOOKS:
            self._wait()
        else:
            self._on_hang(self._patience_s)
