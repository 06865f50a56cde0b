"""The child process: takes commands from the pipe, steps the scheduler, sends its events.

Adds what the scheduler must not know: the clock, the pipe and the thread that tokenizes long prompts.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

from nemolocal.engine.backend import Backend
from nemolocal.engine.messages import (
    Accepted,
    Cancel,
    Chunk,
    Command,
    Event,
    Failed,
    Finished,
    LoadFailed,
    LoadProgress,
    LoadSpec,
    Ready,
    Rejected,
    Shutdown,
    Submit,
)
from nemolocal.engine.pace import Pace
from nemolocal.engine.scheduler import Ended, Scheduler, StepEvent
from nemolocal.errors import ContextLengthError, EngineError, InvalidRequestError
from nemolocal.types import Segment, Timings

N_CHARS_INLINE = 20_000  # a longer prompt is tokenized beside the running streams
TOKENIZING_POLL_S = 0.002
PROGRESS_EVERY_S = 0.1


def main(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    """Entry of the child process; returns when the parent asks for it, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which tells us
    _redirect_stderr(log_path)
    # On an abort llama.cpp would run a debugger, which writes on the user's stdout and takes seconds.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    from nemolocal.engine.llama import LlamaBackend

    try:
        backend = LlamaBackend(spec, _report_progress(connection))
        connection.send([Ready(backend.info())])
    except (BrokenPipeError, ConnectionResetError):
        return  # the parent is gone; there is nobody to tell
    except EngineError as error:
        connection.send([LoadFailed(error.message, error.hint)])
        return
    except Exception as error:  # whatever a broken library or driver throws is an answer too
        connection.send([LoadFailed(f"The engine did not start: {type(error).__name__}: {error}.")])
        return
    try:
        Worker(connection, backend, n_queue=spec.n_queue).run()
    except (BrokenPipeError, EOFError, ConnectionResetError):
        pass
    finally:
        backend.close()


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
        *,
        n_queue: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._connection = connection
        self._backend = backend
        self._n_queue = n_queue
        self._now = now
        self._scheduler = Scheduler(backend)
        self._pace = Pace(backend.n_batch)
        self._clocks: dict[int, _Clock] = {}
        self._tokenizing: set[int] = set()
        self._tokenized: queue.SimpleQueue[tuple[Submit, Future[list[int] | str]]] = queue.SimpleQueue()
        self._tokenizer = ThreadPoolExecutor(1)

    def run(self) -> None:
        """Until Shutdown, or until the model fails: a context that failed cannot be trusted again.

        Raises EOFError, BrokenPipeError or ConnectionResetError when the parent is gone. After it nothing
        uses the backend any more.
        """
        try:
            self._loop()
        finally:
            self._tokenizer.shutdown(cancel_futures=True)

    def _loop(self) -> None:
        while True:
            if self._connection.poll(self._patience_s()):
                command: Command = self._connection.recv()
                if isinstance(command, Shutdown):
                    return
                self._obey(command)
                continue  # take in all commands that wait before the next step
            self._take_tokenized()
            if self._scheduler.has_work():
                try:
                    self._step()
                except EngineError as error:
                    self._send([self._stamp(event) for event in self._scheduler.fail_all(str(error))])
                    return

    def _patience_s(self) -> float | None:
        """How long to wait for a command: not at all while there is work, for ever when idle."""
        if self._scheduler.has_work():
            return 0.0
        return TOKENIZING_POLL_S if self._tokenizing else None

    def _obey(self, command: Submit | Cancel) -> None:
        if isinstance(command, Cancel):
            self._tokenizing.discard(command.id)
            self._scheduler.cancel(command.id)
            self._clocks.pop(command.id, None)
            return
        if self._scheduler.n_waiting + len(self._tokenizing) >= self._n_queue:
            self._send([Rejected(command.id, "busy", f"{self._n_queue} requests are waiting already.")])
            return
        self._clocks[command.id] = _Clock(self._now())
        n_chars = sum(len(part.text) for part in command.prompt if isinstance(part, Segment))
        if n_chars <= N_CHARS_INLINE:
            self._add(command, self._tokenize(command))
            return
        self._tokenizing.add(command.id)
        future = self._tokenizer.submit(self._tokenize, command)
        future.add_done_callback(lambda done: self._tokenized.put((command, done)))

    def _tokenize(self, command: Submit) -> list[int] | str:
        """The prompt's tokens, or why it has none."""
        try:
            return self._backend.tokenize(command.prompt) or "The prompt is empty."
        except ValueError as error:
            return str(error)

    def _take_tokenized(self) -> None:
        while not self._tokenized.empty():
            command, done = self._tokenized.get()
            if command.id in self._tokenizing:  # else it was cancelled meanwhile
                self._tokenizing.discard(command.id)
                self._add(command, done.result())

    def _add(self, command: Submit, tokens: list[int] | str) -> None:
        if isinstance(tokens, str):
            self._reject(Rejected(command.id, "invalid", tokens, param="prompt"))
            return
        try:
            self._scheduler.add(command.id, tokens, command.params)
        except ContextLengthError as error:
            refusal = Rejected(command.id, "context_length", n_prompt=error.n_prompt, n_ctx=error.n_ctx)
            self._reject(refusal)
            return
        except InvalidRequestError as error:
            self._reject(Rejected(command.id, "invalid", error.message, error.param))
            return
        self._send([Accepted(command.id, len(tokens))])

    def _reject(self, event: Rejected) -> None:
        self._clocks.pop(event.id, None)
        self._send([event])

    def _step(self) -> None:
        scheduler = self._scheduler
        is_flowing = scheduler.is_flowing()
        before = self._now()
        events = scheduler.step(self._pace.n_prefill(is_flowing=is_flowing))
        after = self._now()
        self._pace.observe(n_prefill=scheduler.n_prefilled, seconds=after - before)
        for id in scheduler.admitted:
            self._clocks[id].started = self._clocks[id].started or before
        self._send([self._stamp(event) for event in events])

    def _stamp(self, event: StepEvent) -> Event:
        """Add the times to a request's last event."""
        clock, now = self._clocks.get(event.id), self._now()
        if isinstance(event, Ended) and clock:
            del self._clocks[event.id]
            return Finished(event.id, event.reason, event.usage, clock.timings(now))
        if isinstance(event, Chunk) and clock and not clock.first:
            clock.first = now
        if isinstance(event, Failed):
            self._clocks.pop(event.id, None)
        assert not isinstance(event, Ended)
        return event

    def _send(self, events: list[Event]) -> None:
        if events:
            self._connection.send(events)


def _report_progress(connection: Connection) -> Callable[[float], None]:
    last = 0.0

    def report(fraction: float) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_EVERY_S:
            last = time.monotonic()
            connection.send([LoadProgress(fraction)])

    return report


def _redirect_stderr(path: str) -> None:
    """Native code that aborts writes its last words to stderr; keep them where the parent can quote them.
    Where that cannot be written, they go to the parent's stderr."""
    try:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError:
        return
    os.dup2(target, 2)
    os.close(target)
