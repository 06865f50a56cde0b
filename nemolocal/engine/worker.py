"""The child process: takes commands from the pipe, steps the scheduler, sends its events.

Adds what the scheduler must not know: the clock, the pipe, and what is kept in quiet moments.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from nemolocal.engine import child, lora
from nemolocal.engine.backend import Backend
from nemolocal.engine.intake import Intake, Prepared
from nemolocal.engine.messages import (
    Accepted,
    Beat,
    Cancel,
    Chunk,
    Command,
    Count,
    Counted,
    Event,
    Failed,
    Finished,
    LoadSpec,
    ModelInfo,
    Occupancy,
    Rejected,
    Shutdown,
    Submit,
)
from nemolocal.engine.pace import Pace
from nemolocal.engine.scheduler import Ended, Scheduler, StepEvent
from nemolocal.engine.speculation import Drafter
from nemolocal.engine.warm import WarmStore
from nemolocal.engine.warming import IDLE_S, Warming
from nemolocal.errors import ContextLengthError, EngineError, InvalidRequestError
from nemolocal.types import Timings

if TYPE_CHECKING:
    from nemolocal.engine.llama.backend import LlamaBackend

PREPARING_POLL_S = 0.002
BEAT_S = 1.0
PARKING_S = 0.5  # quiet seconds before an idle conversation is copied to RAM
INTAKE_S = 0.02  # for commands between two steps while answers stream; each may hold a prompt to tokenize
OCCUPANCY_EVERY_S = 1.0


def main(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    """Entry of the child process; returns when the parent asks for it, or is gone."""
    from nemolocal.engine.llama.backend import LlamaBackend
    from nemolocal.engine.llama.drafting import open_drafter

    def load(report: Callable[[float], None]) -> _Loaded:
        backend = LlamaBackend(spec, report)
        return _Loaded(backend, open_drafter(spec, backend))

    def run(loaded: _Loaded) -> None:
        # A saved state is of use only to the library that wrote it.
        keyed = replace(spec, warm_key=f"{spec.warm_key} {loaded.info().library}")
        Worker(connection, loaded.backend, keyed, drafter=loaded.drafter).run()

    child.serve(connection, log_path, load=load, run=run)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model and what guesses ahead for it."""

    backend: LlamaBackend
    drafter: Drafter | None

    def info(self) -> ModelInfo:
        return self.backend.info()

    def close(self) -> None:
        if self.drafter:
            self.drafter.close()
        self.backend.close()


@dataclass(slots=True)
class _Clock:
    """When a request came, when its prompt began to be read and when its answer began."""

    submitted: float
    started: float = 0.0
    first: float = 0.0

    def timings(self, now: float) -> Timings:
        started, first = self.started or now, self.first or now
        return Timings(started - self.submitted, first - started, now - first)


class Worker:
    """The loop of the child process over one backend."""

    def __init__(
        self,
        connection: Connection,
        backend: Backend,
        spec: LoadSpec,
        *,
        drafter: Drafter | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._connection = connection
        self._is_async = backend.is_async
        self._n_queue = spec.n_queue
        self._now = now
        self._pace = Pace(backend.n_batch)
        self._scheduler = Scheduler(
            backend,
            drafter=drafter,
            step_cost=self._pace.step_s,
            state_bytes=spec.state_bytes,
        )
        self._warming = self._open_warming(backend, spec)
        self._intake = Intake(
            backend.vocab, n_ctx=backend.n_ctx, adapters=spec.adapters, warming=self._warming
        )
        self._clocks: dict[int, _Clock] = {}
        self._unsent: list[Event] = []
        self._stepped = 0.0
        self._beaten = 0.0
        self._occupancy = Occupancy()
        self._occupancy_told = 0.0

    def run(self) -> None:
        """Until Shutdown, or until the model fails: a context that failed cannot be trusted again.

        Raises EOFError, BrokenPipeError or ConnectionResetError when the parent is gone. After it nothing
        uses the backend any more.
        """
        try:
            self._loop()
        finally:
            self._intake.close()
            if self._warming:
                self._warming.close()

    def _loop(self) -> None:
        while True:
            if not self._scheduler.has_work():
                self._flush()
            self._tell_occupancy()
            patience_s = self._patience_s()
            if self._connection.poll(patience_s):
                command: Command = self._connection.recv()
                if isinstance(command, Shutdown):
                    return
                self._obey(command)
                if not self._is_step_due():
                    continue  # take in all commands that wait before the next step
            for item in self._intake.take():
                self._add(item)
            self._show_life()
            if self._scheduler.has_work():
                try:
                    self._step()
                except EngineError as error:
                    if self._warming:
                        self._warming.forget()
                    self._flush()
                    self._send([self._stamp(event) for event in self._scheduler.fail_all(str(error))])
                    return
            elif patience_s in (PARKING_S, IDLE_S):
                self._use_the_quiet()

    def _is_step_due(self) -> bool:
        """Whether answers that stream have waited long enough while commands came in one after another."""
        return self._scheduler.is_flowing() and self._now() - self._stepped >= INTAKE_S

    def _patience_s(self) -> float | None:
        """How long to wait for a command: not at all while there is work, for ever when idle."""
        if self._scheduler.has_work() or self._intake.has_news:
            return 0.0
        if self._intake.n_pending:
            return PREPARING_POLL_S
        if self._scheduler.cache.can_park():
            return PARKING_S
        return IDLE_S if self._warming is not None and self._warming.may_save else None

    def _use_the_quiet(self) -> None:
        """Keep what is idle for later: first in RAM, then on disk."""
        if self._scheduler.cache.can_park():
            self._scheduler.cache.park_one()
        elif self._warming and self._warming.has_unsaved:
            self._warming.save_one()

    def _obey(self, command: Submit | Count | Cancel) -> None:
        if isinstance(command, Cancel):
            self._intake.cancel(command.id)
            self._scheduler.cancel(command.id)
            self._clocks.pop(command.id, None)
        elif isinstance(command, Count):
            self._intake.count(command)
        elif self._scheduler.n_waiting + self._intake.n_pending >= self._n_queue:
            self._send([Rejected(command.id, "busy", f"{self._n_queue} requests are waiting already.")])
        else:
            self._clocks[command.id] = _Clock(self._now())
            self._intake.begin(command)

    def _add(self, item: Prepared | Rejected | Counted) -> None:
        if isinstance(item, Rejected):
            self._reject(item)
            return
        if isinstance(item, Counted):
            self._send([item])
            return
        id, params = item.command.id, item.command.params
        try:
            self._scheduler.add(id, item.tokens, params, adapters=item.adapters, warm=item.warm)
        except ContextLengthError as error:
            self._reject(Rejected(id, "context_length", n_prompt=error.n_prompt, n_ctx=error.n_ctx))
            return
        except InvalidRequestError as error:
            self._reject(Rejected(id, "invalid", error.message, error.param))
            return
        self._send([Accepted(id, len(item.tokens))])

    def _reject(self, event: Rejected) -> None:
        self._clocks.pop(event.id, None)
        self._send([event])

    def _step(self) -> None:
        """One step. What the step before it had to tell is sent while the device computes this one."""
        scheduler = self._scheduler
        is_flowing = scheduler.is_flowing()
        if scheduler.has_prompts():
            self._flush()  # launching a prompt takes long itself, and nobody is to wait for that
        before = self._now()
        scheduler.launch(self._pace.budget(is_flowing=is_flowing))
        self._flush()
        events = scheduler.collect()
        self._stepped = after = self._now()
        self._pace.observe(n_prefill=scheduler.n_prefilled, n_rows=scheduler.n_rows, seconds=after - before)
        for id in scheduler.admitted:
            self._clocks[id].started = self._clocks[id].started or before
        told = [self._stamp(event) for event in events] or [Beat()]
        self._unsent = told
        if not self._is_async:
            self._flush()

    def _stamp(self, event: StepEvent) -> Event:
        """Add the times to a request's last event."""
        clock = self._clocks.get(event.id)
        if isinstance(event, Chunk):
            if clock and not clock.first:
                clock.first = self._now()
            return event
        if isinstance(event, Ended) and clock:
            del self._clocks[event.id]
            return Finished(event.id, event.reason, event.usage, clock.timings(self._now()))
        if isinstance(event, Failed):
            self._clocks.pop(event.id, None)
        assert not isinstance(event, Ended)
        return event

    def _show_life(self) -> None:
        """A long prompt is being made ready, which takes no steps."""
        if self._intake.n_pending and self._now() - self._beaten >= BEAT_S:
            self._beaten = self._now()
            self._send([Beat()])

    def _tell_occupancy(self) -> None:
        scheduler, n_waiting = self._scheduler, self._scheduler.n_waiting + self._intake.n_pending
        is_idle = not (scheduler.has_work() or n_waiting)
        if not is_idle and self._now() - self._occupancy_told < OCCUPANCY_EVERY_S:
            return
        now = Occupancy(scheduler.n_running, n_waiting, scheduler.n_cells, scheduler.n_taken_cells)
        if now != self._occupancy:
            self._occupancy, self._occupancy_told = now, self._now()
            self._send([now])

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        self._send(unsent)

    def _send(self, events: list[Event]) -> None:
        if events:
            self._connection.send(events)

    def _open_warming(self, backend: Backend, spec: LoadSpec) -> Warming | None:
        if not spec.warm_folder:
            return None
        store = WarmStore(spec.warm_folder, key=spec.warm_key, limit_bytes=spec.warm_bytes)
        adapters = lora.scales(spec.adapters, None)
        return Warming(
            store,
            self._scheduler.cache,
            adapters,
            can_rollback=backend.memory.can_rollback,
            limit_bytes=spec.state_bytes,
        )
