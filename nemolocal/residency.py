"""Which models are loaded, and who still needs them: as many as fit. One that nobody needs goes after a
while, or when another one wants its room. Knows how to take turns, not what fits nor how to load.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nemolocal.chat.template import ChatTemplate
from nemolocal.engine.client import EngineClient
from nemolocal.errors import DoesNotFitError, EngineError
from nemolocal.models.plans import Plan
from nemolocal.models.room import Footprint
from nemolocal.models.store import LocalModel

log = logging.getLogger(__name__)

ENDING_HINT = "Start it again and send the request once more."
SETTLE_S = 0.5
"""A driver may take a moment to give back what a process held that has ended."""

Candidates = tuple[LocalModel, ...]
"""The files that one reference may mean, never empty; the plan chooses."""


@dataclass(slots=True, eq=False)
class Resident:
    """A loaded model, and the plan that it was loaded by. It is unloaded only when `n_leases` is 0, and then
    after `keep_alive_s` (negative: never by itself). While `is_leaving`, nobody new gets it. `last_used`
    counts uses, not seconds."""

    model: LocalModel
    engine: EngineClient
    template: ChatTemplate
    device: str
    name: str
    footprint: Footprint = field(default_factory=Footprint)
    plan: Plan | None = None
    log_path: Path = field(default_factory=Path)
    note: str = ""
    keep_alive_s: float = -1.0
    n_leases: int = 0
    last_used: int = 0
    is_leaving: bool = False
    expiry: asyncio.TimerHandle | None = None
    expires_at_s: float = 0.0
    unloading: asyncio.Task[None] | None = None

    @property
    def expires_in_s(self) -> float | None:
        """Seconds until it is unloaded if nobody asks for it; None while it is in use or stays for good. To
        be asked in any thread."""
        return max(self.expires_at_s - time.monotonic(), 0.0) if self.expiry else None


@dataclass(frozen=True, slots=True)
class MakeRoom:
    """What has to go before a model can be loaded, never empty."""

    residents: tuple[Resident, ...]


Start = Callable[[], Awaitable[Resident]]
"""Loads what was decided on."""

Decide = Callable[[Candidates, Sequence[Resident]], Awaitable[Start | MakeRoom]]
"""Whether a model can be loaded beside the residents, which are given in the order in which they would have
to go. Raises what planning raises."""


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way or in the queue, how many requests wait for its outcome, and the last wish for how
    long it is to stay."""

    candidates: Candidates
    outcome: asyncio.Future[Resident]
    task: asyncio.Task[None] | None = None
    n_waiting: int = 0
    keep_alive_s: float | None = None
    is_started: bool = False


class Residency:
    """`decide` plans; its errors, and those of the load, go to every request that waited. `on_death` gets
    each resident whose process ended by itself, once, before anything else is decided."""

    def __init__(
        self,
        decide: Decide,
        *,
        keep_alive_s: float = -1.0,
        on_death: Callable[[Resident], None] = lambda resident: None,
    ) -> None:
        self._decide = decide
        self._keep_alive_s = keep_alive_s
        self._on_death = on_death
        self._residents: list[Resident] = []
        self._loads: dict[tuple[Path, ...], _Load] = {}
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()
        self._uses = itertools.count(1)

    @property
    def residents(self) -> list[Resident]:
        """Those that can serve, the last used first."""
        alive = [x for x in self._residents if x.engine.is_alive and not x.unloading]
        return sorted(alive, key=lambda x: -x.last_used)

    def is_alone(self, resident: Resident) -> bool:
        """Whether one request uses this resident, and none another one."""
        return resident.n_leases == sum(x.n_leases for x in self._residents) == 1

    @property
    def fallen(self) -> list[Resident]:
        """Those whose process ended by itself and whose next request has not come yet."""
        return [x for x in self._residents if not x.engine.is_alive and not x.unloading]

    def serving(self, candidates: Candidates) -> Resident | None:
        """The resident that is one of these files, whose process lives and which stays."""
        paths = _paths(candidates)
        return next((x for x in self.residents if not x.is_leaving and x.model.path in paths), None)

    @asynccontextmanager
    async def lease(
        self, candidates: Candidates, *, keep_alive_s: float | None = None
    ) -> AsyncIterator[Resident]:
        """The loaded model, which stays loaded while the lease is held.

        After the last lease it stays for `keep_alive_s` (None: as it was told before). Raises what loading
        raises.
        """
        resident = self.serving(candidates)
        if resident:
            resident.n_leases += 1
            self._touch(resident, keep_alive_s)
        else:
            resident = await self._wait_for(candidates, keep_alive_s)
        try:
            yield resident
        finally:
            self._release(resident)

    async def unload(self, candidates: Candidates) -> None:
        """Unload these files once their requests have ended; later requests load them anew."""
        paths = _paths(candidates)
        async with self._turn:
            try:
                while True:
                    await self._clear_away()
                    named = [x for x in self._residents if x.model.path in paths]
                    if not named:
                        return
                    await self._step_aside(named)
            finally:
                self._keep_all()

    async def close(self) -> None:
        """Unload all; streams that still run end with an error."""
        tasks = [load.task for load in self._loads.values() if load.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._unload(resident) for resident in self._residents))

    # Taking turns --------------------------------------------------------------------------------

    async def _wait_for(self, candidates: Candidates, keep_alive_s: float | None) -> Resident:
        """Join the load of these files, or begin it. The lease is taken before the next turn can begin."""
        load = self._loads.get(_paths(candidates)) or self._queue(candidates)
        load.n_waiting += 1
        load.keep_alive_s = load.keep_alive_s if keep_alive_s is None else keep_alive_s
        try:
            # Shielded: a client that goes away must not stop a load that others wait for.
            return await asyncio.shield(load.outcome)
        except asyncio.CancelledError:
            load.n_waiting -= 1
            if load.outcome.done():
                if not load.outcome.cancelled() and load.outcome.exception() is None:
                    self._release(load.outcome.result())
            elif not load.n_waiting and not load.is_started:
                self._leave_queue(load)  # nobody is to make room for a model that nobody waits for
            raise

    def _queue(self, candidates: Candidates) -> _Load:
        load = _Load(candidates, asyncio.get_running_loop().create_future())
        self._loads[_paths(candidates)] = load
        load.task = asyncio.create_task(self._bring_in(load))
        load.task.add_done_callback(lambda task: _tell(load, task))
        return load

    def _leave_queue(self, load: _Load) -> None:
        self._loads.pop(_paths(load.candidates), None)
        if load.task:
            load.task.cancel()

    async def _bring_in(self, load: _Load) -> None:
        try:
            async with self._turn:
                try:
                    resident = self.serving(load.candidates)
                    if resident is None:
                        resident = await self._load(load)
                        resident.keep_alive_s = self._keep_alive_s
                        self._residents.append(resident)
                    self._grant(load, resident)
                finally:
                    self._keep_all()
        finally:
            if self._loads.get(_paths(load.candidates)) is load:
                del self._loads[_paths(load.candidates)]

    async def _load(self, load: _Load) -> Resident:
        """Make room and load. Where memory ran out, decide once more: the next plan is smaller."""
        for is_last in (False, True):
            start = await self._make_room(load.candidates)
            load.is_started = True
            self._keep_all()
            try:
                return await start()
            except EngineError as error:
                if is_last or not error.is_out_of_memory:
                    raise
        raise AssertionError("the last try returns or raises")

    def _grant(self, load: _Load, resident: Resident) -> None:
        """Give all who wait for this load their lease."""
        resident.n_leases += load.n_waiting
        self._touch(resident, load.keep_alive_s)
        self._expire_later(resident)
        load.outcome.set_result(resident)

    async def _make_room(self, candidates: Candidates) -> Start:
        """Send away whom the decision names, until it names nobody."""
        has_unloaded = False
        while True:
            has_unloaded = await self._clear_away() or has_unloaded
            named: Sequence[Resident] = ()
            try:
                decision = await self._decide(candidates, self._going_order())
                if not isinstance(decision, MakeRoom):
                    return decision
                named = decision.residents
            except DoesNotFitError:
                if not has_unloaded:
                    raise
            if has_unloaded:  # it was told too early, perhaps
                has_unloaded = False
                await asyncio.sleep(SETTLE_S)
            else:
                has_unloaded = await self._step_aside(named)

    async def _step_aside(self, residents: Sequence[Resident]) -> bool:
        """Unload the idle ones of these; where there are none, wait until any resident becomes idle, during
        which nobody new gets these. Returns whether memory was given back."""
        for resident in self._residents:
            resident.is_leaving = resident in residents or resident.unloading is not None
        idle = [x for x in residents if not x.n_leases]
        if idle:
            await asyncio.gather(*(self._unload(resident) for resident in idle))
            return True
        self._released.clear()
        await self._released.wait()
        return False

    async def _clear_away(self) -> bool:
        """Bury the dead, and wait for those that are about to be gone. Returns whether there were any."""
        fallen = self.fallen
        for resident in fallen:
            self._on_death(resident)
        gone = [*fallen, *(x for x in self._residents if x.unloading)]
        await asyncio.gather(*(self._unload(resident) for resident in gone))
        return bool(gone)

    def _going_order(self) -> list[Resident]:
        """The idle ones first, and among both the least recently used; a use that goes on is a use now."""
        return sorted(self._residents, key=lambda x: (x.n_leases > 0, x.last_used))

    def _keep_all(self) -> None:
        """Nobody has to leave any more: who waited for one that stays gets it, without a turn."""
        for resident in self._residents:
            resident.is_leaving = resident.unloading is not None
        for load in list(self._loads.values()):
            resident_or_none = self.serving(load.candidates)
            if resident_or_none and not load.outcome.done() and not load.is_started:
                self._grant(load, resident_or_none)
                self._leave_queue(load)

    # Coming and going ----------------------------------------------------------------------------

    def _touch(self, resident: Resident, keep_alive_s: float | None) -> None:
        resident.last_used = next(self._uses)
        if keep_alive_s is not None:
            resident.keep_alive_s = keep_alive_s
        if resident.expiry:
            resident.expiry.cancel()
            resident.expiry = None

    def _release(self, resident: Resident) -> None:
        resident.n_leases -= 1
        resident.last_used = next(self._uses)
        if not resident.n_leases:
            self._released.set()
            self._expire_later(resident)

    def _expire_later(self, resident: Resident) -> None:
        """Begin the time after which a resident that nobody needs is unloaded."""
        if resident.n_leases or resident.keep_alive_s < 0 or resident.unloading:
            return
        if resident in self._residents and resident.engine.is_alive:
            loop = asyncio.get_running_loop()
            resident.expires_at_s = time.monotonic() + resident.keep_alive_s
            resident.expiry = loop.call_later(resident.keep_alive_s, self._expire, resident)

    def _expire(self, resident: Resident) -> None:
        resident.expiry = None
        if not resident.n_leases and not resident.unloading and resident.engine.is_alive:
            log.info("unloading %s, which was idle for %g s", resident.name, resident.keep_alive_s)
            self._begin_unload(resident)

    def _begin_unload(self, resident: Resident) -> asyncio.Task[None]:
        if resident.unloading is None:
            if resident.expiry:
                resident.expiry.cancel()
                resident.expiry = None
            resident.is_leaving = True
            resident.unloading = asyncio.create_task(self._end(resident))
        return resident.unloading

    async def _unload(self, resident: Resident) -> None:
        """Shielded: whoever waits for it may leave, and it ends all the same."""
        await asyncio.shield(self._begin_unload(resident))

    async def _end(self, resident: Resident) -> None:
        try:
            await resident.engine.close()
        finally:
            self._residents.remove(resident)
            self._released.set()


def _paths(candidates: Candidates) -> tuple[Path, ...]:
    return tuple(model.path for model in candidates)


def _tell(load: _Load, task: asyncio.Task[None]) -> None:
    """How a load ended, to those who still wait for it."""
    if load.outcome.done():
        return
    error = None if task.cancelled() else task.exception()
    if task.cancelled() and load.n_waiting:
        error = EngineError("The model was not loaded: NemoLocal is ending.", hint=ENDING_HINT)
    if error:
        load.outcome.set_exception(error)
    else:
        load.outcome.cancel()
