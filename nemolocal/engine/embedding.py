"""The child process of a model that embeds or ranks: takes commands from the pipe, reads whole inputs in
batches, sends vectors or scores. The generating models have worker.py.

Knows the clock and the pipe; sees the model only through `EmbeddingBackend`.
"""

from __future__ import annotations

import queue
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from nemolocal.engine import child
from nemolocal.engine.backend import Row
from nemolocal.engine.messages import (
    Beat,
    Cancel,
    Embed,
    Embedded,
    EmbeddingCommand,
    Event,
    Failed,
    LoadSpec,
    Rank,
    Ranked,
    Rejected,
    Shutdown,
)
from nemolocal.engine.packing import Item, Job, Packer
from nemolocal.errors import EngineError
from nemolocal.types import Timings, Usage

N_CHARS_INLINE = 20_000  # longer inputs are tokenized beside the running batches
TOKENIZING_POLL_S = 0.002
BEAT_S = 1.0


class EmbeddingBackend(Protocol):
    """A loaded model that pools: inputs of up to `n_ctx` tokens, `n_slots` and `n_batch` tokens of them at
    once. More than `n_packed` tokens at once gain nothing. Only an input above `n_batch` comes in parts.

    `on_life` is called now and then while a batch takes long, from the thread that computes.
    """

    n_ctx: int
    n_slots: int
    n_batch: int
    n_packed: int
    can_rank: bool
    on_life: Callable[[], None]

    def tokenize(self, text: str | tuple[int, ...]) -> list[int]:
        """The tokens of an input with the special ones that the model wants around it; may be called from
        another thread. Raises ValueError for ids outside the vocabulary."""

    def tokenize_pair(self, query: str, document: str) -> list[int]:
        """The same for a query and a document in the layout that the model ranks."""

    def compute(self, rows: list[Row]) -> list[bytes]:
        """Read rows, and give what is pooled of each: a vector, or one score where `can_rank`, in float32;
        b"" where that is not a finite number.

        A batch holds rows that begin at 0, or a single one that goes on where the last batch ended. Raises
        EngineError when the model can no longer be used.
        """

    def close(self) -> None:
        """Free the model and its memory."""


def main(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    """Entry of the child process; returns when the parent asks for it, or is gone."""
    from nemolocal.engine.llama.embedding import LlamaEmbedder

    child.serve(
        connection,
        log_path,
        load=lambda report: LlamaEmbedder(spec, report),
        run=lambda backend: EmbeddingWorker(connection, backend, n_queue=spec.n_queue).run(),
    )


@dataclass(slots=True)
class _Request:
    """A request from its command to its last event; `job` is None until it is tokenized."""

    command: Embed | Rank
    submitted: float
    job: Job | None = None
    started: float = 0.0


Tokens = list[list[int]]


class EmbeddingWorker:
    """The loop of the child process over one backend."""

    def __init__(
        self,
        connection: Connection,
        backend: EmbeddingBackend,
        *,
        n_queue: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._connection = connection
        self._backend = backend
        self._backend.on_life = self._show_life
        self._beaten = now()
        self._n_queue = n_queue
        self._now = now
        self._packer = Packer(
            n_slots=backend.n_slots, n_packed=backend.n_packed, n_batch=min(backend.n_batch, backend.n_ctx)
        )
        self._requests: dict[int, _Request] = {}
        self._n_tokenizing = 0
        self._tokenized: queue.SimpleQueue[tuple[int, Future[Tokens | Rejected]]] = queue.SimpleQueue()
        self._tokenizer = ThreadPoolExecutor(1)

    def run(self) -> None:
        """Until Shutdown, or until the model fails. Raises EOFError, BrokenPipeError or ConnectionResetError
        when the parent is gone. After it nothing uses the backend any more."""
        try:
            self._loop()
        finally:
            self._tokenizer.shutdown(cancel_futures=True)

    def _loop(self) -> None:
        while True:
            if self._connection.poll(self._patience_s()):
                command: EmbeddingCommand = self._connection.recv()
                if isinstance(command, Shutdown):
                    return
                self._obey(command)
                continue  # take in all commands that wait before the next batch
            self._take_tokenized()
            if self._n_tokenizing:
                self._show_life()
            if self._packer.has_work:
                try:
                    self._step()
                except EngineError as error:
                    self._send([Failed(id, str(error)) for id in self._requests])
                    return

    def _patience_s(self) -> float | None:
        """How long to wait for a command: not at all while there is work, for ever when idle."""
        if self._packer.has_work:
            return 0.0
        return TOKENIZING_POLL_S if self._n_tokenizing else None

    # Requests ------------------------------------------------------------------------------------

    def _obey(self, command: Embed | Rank | Cancel) -> None:
        if isinstance(command, Cancel):
            request = self._requests.pop(command.id, None)
            if request and request.job:
                self._packer.drop(request.job)
            return
        if len(self._requests) >= self._n_queue:
            self._send([Rejected(command.id, "busy", f"{self._n_queue} requests are waiting already.")])
            return
        self._requests[command.id] = _Request(command, self._now())
        if _n_chars(command) <= N_CHARS_INLINE:
            self._admit(command.id, self._tokenize(command))
            return
        self._n_tokenizing += 1
        future = self._tokenizer.submit(self._tokenize, command)
        future.add_done_callback(lambda done: self._tokenized.put((command.id, done)))

    def _take_tokenized(self) -> None:
        while not self._tokenized.empty():
            id, done = self._tokenized.get()
            self._n_tokenizing -= 1
            if id in self._requests:  # else it was cancelled meanwhile
                self._admit(id, done.result())

    def _tokenize(self, command: Embed | Rank) -> Tokens | Rejected:
        """The tokens of all inputs, or why the model cannot take them."""
        backend, id = self._backend, command.id
        if isinstance(command, Rank) != backend.can_rank:
            does = "ranks documents and embeds nothing" if backend.can_rank else "embeds and ranks nothing"
            return Rejected(id, "invalid", f"This model {does}.", param="model")
        found: Tokens = []
        for index in range(_n_inputs(command)):
            try:
                if isinstance(command, Rank):
                    tokens = backend.tokenize_pair(command.query, command.documents[index])
                else:
                    tokens = backend.tokenize(command.inputs[index])
            except ValueError as error:
                return Rejected(id, "invalid", str(error), index=index)
            if not tokens:
                return Rejected(id, "invalid", "The input is empty.", index=index)
            if len(tokens) > backend.n_ctx:
                return Rejected(id, "context_length", n_prompt=len(tokens), n_ctx=backend.n_ctx, index=index)
            found.append(tokens)
        return found

    def _admit(self, id: int, tokens: Tokens | Rejected) -> None:
        if isinstance(tokens, Rejected):
            del self._requests[id]
            self._send([tokens])
            return
        request = self._requests[id]
        request.job = Job(id, tokens)
        if tokens:
            self._packer.add(request.job)
        else:
            self._send([self._last_event(request, request.job)])

    # Batches -------------------------------------------------------------------------------------

    def _step(self) -> None:
        before = self._now()
        items = self._packer.next()
        results = self._backend.compute([item.row for item in items])
        events: list[Event] = []
        for item, result in zip(items, results, strict=True):
            request = self._requests.get(item.job.id)
            if request is None:
                continue  # another of its inputs, in the same batch, has failed it
            request.started = request.started or before
            if item.is_last:
                events += self._settle(request, item, result)
        self._send(events or [Beat()])

    def _settle(self, request: _Request, item: Item, result: bytes) -> list[Event]:
        """Keep what came of an input; the request's last event if that was its last."""
        job = item.job
        if not result:
            self._packer.drop(job)
            del self._requests[job.id]
            message = f"The model gave no finite numbers for input {item.index}."
            return [Failed(job.id, message, is_dead=False)]
        job.results[item.index] = result
        return [self._last_event(request, job)] if job.is_done else []

    def _last_event(self, request: _Request, job: Job) -> Embedded | Ranked:
        del self._requests[job.id]
        now = self._now()
        started = request.started or now
        timings = Timings(started - request.submitted, now - started, 0.0)
        usage = Usage(job.n_tokens, 0)
        results = tuple(job.results[index] for index in range(len(job.inputs)))
        if isinstance(request.command, Rank):
            scores = tuple(float(struct.unpack("<f", result)[0]) for result in results)
            return Ranked(job.id, scores, usage, timings)
        return Embedded(job.id, results, usage, timings)

    def _show_life(self) -> None:
        """Something takes long, but goes on."""
        if self._now() - self._beaten >= BEAT_S:
            self._beaten = self._now()
            with suppress(OSError):  # a parent that is gone is met by the next event or command
                self._connection.send([Beat()])

    def _send(self, events: list[Event]) -> None:
        if events:
            self._connection.send(events)


def _n_inputs(command: Embed | Rank) -> int:
    return len(command.documents if isinstance(command, Rank) else command.inputs)


def _n_chars(command: Embed | Rank) -> int:
    if isinstance(command, Rank):
        return sum(map(len, command.documents)) + len(command.query) * len(command.documents)
    return sum(map(len, command.inputs))
