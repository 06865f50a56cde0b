"""Which model is loaded, and who still needs it. One at a time: a request for another one waits until the
running requests have ended, then the models are swapped. Knows how to take turns, not how to load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from nemolocal.chat.template import ChatTemplate
from nemolocal.engine.client import EngineClient
from nemolocal.models.store import LocalModel

Candidates = tuple[LocalModel, ...]
"""The files that one reference may mean, never empty; the plan chooses."""


@dataclass(slots=True)
class Resident:
    """The loaded model. It is unloaded only when `n_leases` is 0."""

    model: LocalModel
    engine: EngineClient
    template: ChatTemplate
    device: str
    name: str = ""
    n_leases: int = 0


@dataclass(slots=True)
class _Load:
    """A load under way, and how many requests wait for it."""

    task: asyncio.Task[Resident]
    n_waiting: int = 0


class Residency:
    """`load` plans and starts a model; it is called when nothing is loaded, and its errors go to every
    request that waited."""

    def __init__(self, load: Callable[[Candidates], Awaitable[Resident]]) -> None:
        self._load = load
        self._loads: dict[tuple[Path, ...], _Load] = {}
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()
        self.resident: Resident | None = None

    def serving(self, candidates: Candidates) -> Resident | None:
        """The resident when it is one of these files and its process lives."""
        resident = self.resident
        if resident and resident.engine.is_alive and resident.model.path in _paths(candidates):
            return resident
        return None

    @asynccontextmanager
    async def lease(self, candidates: Candidates) -> AsyncIterator[Resident]:
        """The loaded model, which stays loaded while the lease is held. Raises what loading raises."""
        resident = self.serving(candidates)
        if resident and not self._turn.locked():
            resident.n_leases += 1
        else:
            resident = await self._wait_for(candidates)
        try:
            yield resident
        finally:
            self._release(resident)

    async def close(self) -> None:
        """Unload; streams that still run end with an error."""
        tasks = [load.task for load in self._loads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._unload()

    async def _wait_for(self, candidates: Candidates) -> Resident:
        """Join the load of these files, or begin it. The lease is taken before the next swap can begin."""
        key = _paths(candidates)
        if key not in self._loads:
            self._loads[key] = _Load(asyncio.create_task(self._swap_in(candidates)))
        load = self._loads[key]
        load.n_waiting += 1
        try:
            # Shielded: a client that goes away must not stop a load that others wait for.
            return await asyncio.shield(load.task)
        except asyncio.CancelledError:
            load.n_waiting -= 1
            if load.task.done() and not load.task.cancelled() and load.task.exception() is None:
                self._release(load.task.result())
            raise

    async def _swap_in(self, candidates: Candidates) -> Resident:
        key = _paths(candidates)
        try:
            async with self._turn:
                resident = self.serving(candidates)
                if resident is None:
                    while self.resident and self.resident.n_leases:
                        self._released.clear()
                        await self._released.wait()
                    await self._unload()
                    resident = self.resident = await self._load(candidates)
                resident.n_leases += self._loads[key].n_waiting
                return resident
        finally:
            del self._loads[key]

    def _release(self, resident: Resident) -> None:
        resident.n_leases -= 1
        self._released.set()

    async def _unload(self) -> None:
        if self.resident:
            await self.resident.engine.close()
            self.resident = None


def _paths(candidates: Candidates) -> tuple[Path, ...]:
    return tuple(model.path for model in candidates)
