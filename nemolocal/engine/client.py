"""The parent's side of an engine: starts the child process, hands it requests, hands out its events.

Everything public runs on one asyncio loop. Two threads move bytes between the loop and the pipe, so that
neither a full pipe nor a busy child can stop the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from nemolocal.engine import worker
from nemolocal.engine.messages import (
    Accepted,
    Beat,
    Cancel,
    Chunk,
    Command,
    Event,
    Failed,
    Finished,
    LoadFailed,
    LoadProgress,
    LoadSpec,
    ModelInfo,
    Ready,
    Rejected,
    Shutdown,
    Submit,
)
from nemolocal.errors import (
    BusyError,
    ContextLengthError,
    EngineDiedError,
    EngineError,
    InvalidRequestError,
    NemoLocalError,
)
from nemolocal.types import Delta, Finish, GenerationParams, Prompt, Started, StreamItem

log = logging.getLogger(__name__)

CLOSE_S = 5.0  # a child that was told to go, or closed its pipe, and is still there by then is ended
RETRY_AFTER_S = 5
FATAL_WORDS = ("GGML_ASSERT", "CUDA error", "out of memory", "error:", "abort")


class EngineClient:
    """One running engine. `start` makes it; `is_alive` says whether requests can still be served."""

    def __init__(self, spec: LoadSpec, log_path: Path) -> None:
        self.spec = spec
        self.info: ModelInfo
        self._log_path = log_path
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._streams: dict[int, asyncio.Queue[Event]] = {}
        self._outbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._ready: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._on_progress: Callable[[float], None] = lambda fraction: None
        self._gone = asyncio.Event()
        self._is_loaded = False
        self.is_alive = True
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=worker.main, args=(theirs, spec, str(log_path)), name="nemolocal-engine", daemon=True
        )
        self._process.start()
        theirs.close()
        threading.Thread(target=self._receive, args=(self._connection,), daemon=True).start()
        threading.Thread(target=self._transmit, args=(self._connection,), daemon=True).start()

    @classmethod
    async def start(
        cls, spec: LoadSpec, log_path: Path, on_progress: Callable[[float], None] | None = None
    ) -> EngineClient:
        """Load a model in a process of its own.

        `on_progress` gets the loaded share, 0 to 1. Raises EngineError when it cannot be loaded.
        """
        with suppress(OSError):  # the child then writes to our stderr
            log_path.parent.mkdir(parents=True, exist_ok=True)
        client = cls(spec, log_path)
        if on_progress:
            client._on_progress = on_progress
        try:
            client.info = await client._ready
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def n_active(self) -> int:
        """Requests that have not had their last event."""
        return len(self._streams)

    async def generate(self, prompt: Prompt, params: GenerationParams) -> AsyncGenerator[StreamItem, None]:
        """Started, then Deltas, then one Finish. Closing the iterator cancels the request.

        Raises ContextLengthError, InvalidRequestError or BusyError in place of Started, and EngineError or
        EngineDiedError at any time.
        """
        if not self.is_alive:
            raise self._death()
        id = next(self._ids)
        events: asyncio.Queue[Event] = asyncio.Queue()
        self._streams[id] = events
        self._outbox.put(Submit(id, prompt, params))
        is_over = False
        try:
            while not is_over:
                event = await events.get()
                is_over = not isinstance(event, Accepted | Chunk)
                yield _translate(event)
        finally:
            self._streams.pop(id, None)
            if not is_over:
                self._outbox.put(Cancel(id))

    async def close(self) -> None:
        """End the child and free its memory. Streams that still run end with EngineDiedError."""
        self._outbox.put(Shutdown())
        try:
            # A child that is still loading takes no commands.
            await asyncio.wait_for(self._gone.wait(), CLOSE_S if self._is_loaded else 0.0)
        except TimeoutError:
            self._process.kill()
            await self._gone.wait()
        self._outbox.put(None)
        self._connection.close()

    # Between the pipe and the loop ---------------------------------------------------------------

    def _receive(self, connection: Connection) -> None:
        """Thread: events from the child to the loop, until the child is gone."""
        try:
            while True:
                self._loop.call_soon_threadsafe(self._dispatch, connection.recv())
        except (EOFError, OSError):
            pass
        except RuntimeError:
            return  # the loop is closed: nobody waits any more
        self._process.join(CLOSE_S)
        self._process.kill()  # for one that closed its pipe and hangs; it may hold a GPU
        self._process.join()
        try:
            self._loop.call_soon_threadsafe(self._bury)
        except RuntimeError:
            return

    def _transmit(self, connection: Connection) -> None:
        """Thread: commands to the child, in order."""
        while (command := self._outbox.get()) is not None:
            try:
                connection.send(command)
            except OSError:
                return  # the receiver sees the same and tells everyone

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, LoadProgress):
                self._on_progress(event.fraction)
            elif isinstance(event, Ready):
                self._is_loaded = True
                if not self._ready.done():  # else whoever asked for it has left
                    self._ready.set_result(event.info)
            elif isinstance(event, LoadFailed):
                if not self._ready.done():
                    self._ready.set_exception(EngineError(event.message, hint=event.hint))
            elif isinstance(event, Beat):
                pass
            elif stream := self._streams.get(event.id):
                stream.put_nowait(event)

    def _bury(self) -> None:
        """The child is gone: every request that still waits gets its last event."""
        self.is_alive = False
        self._gone.set()
        death = self._death()
        if not self._ready.done():
            self._ready.set_exception(death)
        if self._streams:
            log.error("%s", death)
        for id, stream in self._streams.items():
            stream.put_nowait(Failed(id, death.message))

    def _death(self) -> EngineDiedError:
        code = self._process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        words = _last_words(self._log_path)
        return EngineDiedError(
            f"The engine's process ended ({how}){': ' + words if words else ''}.",
            hint="It is started again with the next request.",
        )


def _translate(event: Event) -> StreamItem:
    """An event as the stream's next item, or the error that it stands for."""
    error: NemoLocalError
    match event:
        case Accepted(_, prompt_tokens):
            return Started(prompt_tokens)
        case Chunk(_, text, n_tokens, logprobs):
            return Delta(text, n_tokens, logprobs)
        case Finished(_, reason, usage, timings):
            return Finish(reason, usage, timings)
        case Rejected(kind="context_length"):
            error = ContextLengthError(n_prompt=event.n_prompt, n_ctx=event.n_ctx)
        case Rejected(kind="busy"):
            error = BusyError(event.message, retry_after_s=RETRY_AFTER_S, hint="Try again in a few seconds.")
        case Rejected():
            error = InvalidRequestError(event.message, param=event.param)
        case Failed(_, message, is_dead=False):
            error = EngineError(message, hint="Send it again when fewer requests run.")
        case Failed(_, message):
            error = EngineDiedError(message, hint="Send the request again; the engine is started anew.")
        case _:
            raise AssertionError(event)
    raise error


def _last_words(path: Path) -> str:
    """The line in which native code said why it gave up, if it did."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-50:]
    except OSError:
        return ""
    telling = [line.strip() for line in lines if any(word in line for word in FATAL_WORDS)]
    return telling[0][:200] if telling else ""
