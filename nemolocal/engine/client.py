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
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

from nemolocal.engine import embedding, worker
from nemolocal.engine.messages import (
    Accepted,
    Beat,
    Cancel,
    Chunk,
    Command,
    Count,
    Counted,
    Embed,
    Embedded,
    Event,
    Failed,
    Finished,
    LoadFailed,
    LoadProgress,
    LoadSpec,
    ModelInfo,
    Occupancy,
    Rank,
    Ranked,
    Ready,
    Rejected,
    Shutdown,
    Submit,
)
from nemolocal.engine.watchdog import Watchdog
from nemolocal.errors import (
    BusyError,
    ContextLengthError,
    EngineDiedError,
    EngineError,
    InputLengthError,
    InvalidRequestError,
    NemoLocalError,
    OutOfMemoryError,
)
from nemolocal.types import Delta, Finish, GenerationParams, Prompt, Started, StreamItem

log = logging.getLogger(__name__)

CLOSE_S = 5.0  # a child that was told to go, or closed its pipe, and is still there by then is ended
RETRY_AFTER_S = 5
LOAD_SILENCE_S = 600.0  # a load that shows no progress for so long hangs; slow disks show some
N_LAST_LINES = 50
FATAL_WORDS = ("GGML_ASSERT", "CUDA error", "out of memory", "error:", "abort")
SIGKILL = 9
MEMORY_WORDS = ("out of memory", "cudaMalloc failed", "failed to allocate", "unable to allocate", "bad_alloc")
STARTED_ANEW = "It is started again with the next request."


class EngineClient:
    """One running engine. `start` makes it; `is_alive` says whether requests can still be served, `death`
    how it ended where it ended by itself. `occupancy` is how full it is, as last told."""

    def __init__(self, spec: LoadSpec, log_path: Path, *, watchdog_s: float = 0.0) -> None:
        self.spec = spec
        self.death: EngineDiedError | None = None
        self.info: ModelInfo
        self.occupancy = Occupancy()
        self._log_path = log_path
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._streams: dict[int, asyncio.Queue[Event]] = {}
        self._outbox: queue.SimpleQueue[Command | Embed | Rank | None] = queue.SimpleQueue()
        self._ready: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._on_progress: Callable[[float], None] = lambda fraction: None
        self._gone = asyncio.Event()
        self._is_loaded = False
        self._is_closing = False
        self._last_failure = ""  # of the model, after which the child exits
        self._watchdog_s = watchdog_s
        self._watchdog = Watchdog(has_work=self._has_work, on_hang=self._end_hanging)
        self.is_alive = True
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=embedding.main if spec.pooling else worker.main,
            args=(theirs, spec, str(log_path)),
            name="nemolocal-engine",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        threading.Thread(target=self._receive, args=(self._connection,), daemon=True).start()
        threading.Thread(target=self._transmit, args=(self._connection,), daemon=True).start()
        self._watchdog.watch(LOAD_SILENCE_S if watchdog_s else 0.0)

    @classmethod
    async def start(
        cls,
        spec: LoadSpec,
        log_path: Path,
        on_progress: Callable[[float], None] | None = None,
        *,
        watchdog_s: float = 0.0,
    ) -> EngineClient:
        """Load a model in a process of its own.

        `on_progress` gets the loaded share, 0 to 1. A process that says nothing for `watchdog_s` seconds
        while requests wait for it hangs, and is ended like one that died; 0 lets it. Raises EngineError when
        the model cannot be loaded.
        """
        with suppress(OSError):  # the child then writes to our stderr
            log_path.parent.mkdir(parents=True, exist_ok=True)
        client = cls(spec, log_path, watchdog_s=watchdog_s)
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
        async with aclosing(self._exchange(lambda id: Submit(id, prompt, params))) as events:
            async for event in events:
                yield _translate(event)

    async def embed(self, inputs: Sequence[str | Sequence[int]]) -> Embedded:
        """The vectors of all inputs, texts or token ids. Cancelling the task cancels the request.

        Raises InputLengthError, InvalidRequestError, BusyError, EngineError and EngineDiedError.
        """
        parts = tuple(part if isinstance(part, str) else tuple(part) for part in inputs)
        event = await self._ask(lambda id: Embed(id, parts), field="input")
        assert isinstance(event, Embedded)
        return event

    async def rank(self, query: str, documents: Sequence[str]) -> Ranked:
        """The scores of all documents. Cancelling and errors as with `embed`."""
        event = await self._ask(lambda id: Rank(id, query, tuple(documents)), field="documents")
        assert isinstance(event, Ranked)
        return event

    async def count(self, texts: Sequence[str]) -> list[int]:
        """The tokens of each text, with no control tokens in it. Cancelling as with `embed`.

        Raises EngineError and EngineDiedError.
        """
        async with aclosing(self._exchange(lambda id: Count(id, tuple(texts)))) as events:
            event = await anext(events)
        if not isinstance(event, Counted):
            _translate(event)
        assert isinstance(event, Counted)
        return list(event.counts)

    async def _ask(self, command: Callable[[int], Embed | Rank], *, field: str) -> Event:
        """A request that has one event only. Raises the error that it stands for, which blames an entry of
        `field`."""
        assert self.spec.pooling, "this engine generates"
        async with aclosing(self._exchange(command)) as events:
            event = await anext(events)
        match event:
            case Rejected(kind="context_length"):
                raise InputLengthError(
                    param=f"{field}[{event.index}]",
                    n_prompt=event.n_prompt,
                    n_ctx=event.n_ctx,
                    can_grow=event.n_ctx < self.info.n_ctx_train,
                )
            case Rejected(kind="invalid"):
                raise InvalidRequestError(event.message, param=event.param or f"{field}[{event.index}]")
            case Failed(_, message, is_dead=False):
                raise EngineError(message)
            case Rejected() | Failed():
                _translate(event)
        return event

    async def _exchange(
        self, command: Callable[[int], Submit | Embed | Rank | Count]
    ) -> AsyncGenerator[Event, None]:
        """Send a request under an id of its own; its events, until the last one. Closing cancels it."""
        if not self.is_alive:
            ending = self._ending()
            raise EngineDiedError(ending.message, hint=ending.hint)
        id = next(self._ids)
        events: asyncio.Queue[Event] = asyncio.Queue()
        self._streams[id] = events
        self._outbox.put(command(id))
        self._watchdog.watch(self._watchdog_s)
        is_over = False
        try:
            while not is_over:
                event = await events.get()
                is_over = not isinstance(event, Accepted | Chunk)
                yield event
        finally:
            self._streams.pop(id, None)
            if not is_over:
                self._outbox.put(Cancel(id))

    async def close(self) -> None:
        """End the child and free its memory. Streams that still run end with EngineDiedError."""
        self._is_closing = True
        self._watchdog.rest()
        self._outbox.put(Shutdown())
        # A child that is still loading takes no commands, and neither does one that hangs.
        can_obey = self._is_loaded and self.is_alive
        if not await self._is_gone_within(CLOSE_S if can_obey else 0.0):
            self._process.kill()
            if not await self._is_gone_within(CLOSE_S):
                log.error("process %s cannot be ended; it may hold memory until a reboot", self.pid)
        self._outbox.put(None)
        self._connection.close()

    async def _is_gone_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._gone.wait(), seconds)
        except TimeoutError:
            return False
        return True

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
        self._watchdog.hear()
        for event in events:
            if isinstance(event, LoadProgress):
                self._on_progress(event.fraction)
            elif isinstance(event, Ready):
                self._is_loaded = True
                self._watchdog.rest()
                if not self._ready.done():  # else whoever asked for it has left
                    self._ready.set_result(event.info)
            elif isinstance(event, LoadFailed):
                if not self._ready.done():
                    self._ready.set_exception(self._load_failure(event))
            elif isinstance(event, Occupancy):
                self.occupancy = event
            elif not isinstance(event, Beat):
                if isinstance(event, Failed) and event.is_dead:
                    self._last_failure = event.message
                if stream := self._streams.get(event.id):
                    stream.put_nowait(event)

    def _has_work(self) -> bool:
        return self.is_alive and (not self._is_loaded or bool(self._streams))

    def _end_hanging(self, silent_s: float) -> None:
        """Give the child up. A driver that does not come back may keep even a killed process, so that nobody
        is to wait for its end."""
        self._process.kill()
        doing = "while requests waited for it" if self._is_loaded else "while it loaded the model"
        message = f"The engine gave no sign of life for {silent_s:.0f} s {doing}, and was ended."
        self._fail_all(EngineDiedError(message, hint=STARTED_ANEW))

    def _bury(self) -> None:
        """The child is gone."""
        self._gone.set()
        if self.is_alive:
            self._fail_all(self._ending())

    def _fail_all(self, death: EngineDiedError) -> None:
        """Every request that still waits gets its last event."""
        self.is_alive = False
        self.death = death
        self._watchdog.rest()
        if not self._ready.done():
            self._ready.set_exception(death)
        if self._streams:
            log.error("%s", death)
        for id, stream in self._streams.items():
            stream.put_nowait(Failed(id, death.message))

    def _ending(self) -> EngineDiedError:
        """How the process ended, in its own last words where it had any."""
        if self.death:
            return self.death
        if self._is_closing:
            return EngineDiedError("The engine was shut down.", hint=STARTED_ANEW)
        code, lines = self._process.exitcode, _last_lines(self._log_path)
        is_out_of_memory = _speaks_of_memory([self._last_failure, *lines])
        if self._last_failure:
            return EngineDiedError(self._last_failure, hint=STARTED_ANEW, is_out_of_memory=is_out_of_memory)
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        if code == -SIGKILL:
            how += ", which a system out of memory sends"
        words = next((line.strip()[:200] for line in lines if any(word in line for word in FATAL_WORDS)), "")
        return EngineDiedError(
            f"The engine's process ended ({how}){': ' + words if words else ''}.",
            hint=STARTED_ANEW,
            is_out_of_memory=is_out_of_memory,
        )

    def _load_failure(self, event: LoadFailed) -> EngineError:
        if event.shortage:
            return OutOfMemoryError(event.message, hint=event.hint, **asdict(event.shortage))
        lines = [event.message, *_last_lines(self._log_path)]
        return EngineError(event.message, hint=event.hint, is_out_of_memory=_speaks_of_memory(lines))


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


def _last_lines(path: Path) -> list[str]:
    """The end of what native code wrote to the child's log; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-N_LAST_LINES:]
    except OSError:
        return []


def _speaks_of_memory(lines: Sequence[str]) -> bool:
    return any(word in line for line in lines for word in MEMORY_WORDS)
