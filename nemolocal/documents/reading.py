"""Reading documents in a process of its own: what a broken file does to a reader, it does to that process.

Time and memory are limited; a reader that hangs or dies is a DocumentError like any other, and the next file
gets a new process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from nemolocal.documents.limits import Limits
from nemolocal.documents.parts import Document
from nemolocal.errors import DocumentError, DocumentFault

MEMORY_BYTES = 900 << 20
"""What a reading process may take, where the system can be told so."""
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Order:
    path: Path
    name: str
    limits: Limits
    password: str


@dataclass(frozen=True, slots=True)
class Pages:
    """So many pages are read, of so many."""

    n_done: int
    n_all: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The document cannot be read."""

    message: str
    kind: DocumentFault
    hint: str


class Reader:
    """Reads one document after another. Its process starts with the first and ends with `close`."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._turn = threading.Lock()

    async def read(
        self,
        path: Path,
        *,
        name: str = "",
        password: str = "",
        on_page: Callable[[int, int], None] = lambda n_done, n_all: None,
    ) -> Document:
        """One document. `on_page` is called on the loop. Cancelling ends the process.
        Raises DocumentError."""
        loop = asyncio.get_running_loop()
        order = Order(path.absolute(), name or path.name, self.limits, password)

        def tell(n_done: int, n_all: int) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody looks any more
                loop.call_soon_threadsafe(on_page, n_done, n_all)

        try:
            return await asyncio.to_thread(self._read, order, tell)
        except asyncio.CancelledError:
            self._end()
            raise

    async def close(self) -> None:
        await asyncio.to_thread(self._end)

    def _read(self, order: Order, tell: Callable[[int, int], None]) -> Document:
        with self._turn:
            connection = self._start()
            try:
                connection.send(order)
                while connection.poll(order.limits.seconds):
                    said = connection.recv()
                    if isinstance(said, Document):
                        return said
                    if isinstance(said, Refused):
                        raise DocumentError(said.message, kind=said.kind, hint=said.hint)
                    tell(said.n_done, said.n_all)
            except (EOFError, OSError):
                self._end()
                raise DocumentError(
                    f"{order.name} is not read: it broke its reader, or needs too much memory.",
                    kind="damaged",
                    hint="Open and save it with the program that made it.",
                ) from None
            self._end()
            raise DocumentError(
                f"{order.name} is not read: nothing came of it for {order.limits.seconds:.0f} s.",
                kind="too_slow",
            )

    def _start(self) -> Connection:
        if self._connection is None or self._process is None or not self._process.is_alive():
            self._end()
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(
                target=serve, args=(theirs,), name="nemolocal-reader", daemon=True
            )
            self._process.start()
            theirs.close()
        return self._connection

    def _end(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection:
            connection.close()
        if process:
            process.kill()
            process.join(CLOSE_S)


def serve(connection: Connection) -> None:
    """The process: reads what it is told until the parent is gone."""
    import signal

    from nemolocal.documents.load import load

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    _limit_memory()
    with suppress(EOFError, OSError):
        while True:
            order: Order = connection.recv()
            try:
                said: Document | Refused = load(
                    order.path,
                    name=order.name,
                    limits=order.limits,
                    password=order.password,
                    on_page=lambda n_done, n_all: connection.send(Pages(n_done, n_all)),
                )
            except DocumentError as error:
                said = Refused(error.message, error.kind, error.hint)
            except Exception as error:  # what a library throws at a broken file is an answer, too
                what = f"{order.name} is not read: {type(error).__name__} in its reader."
                said = Refused(what, "damaged", "Open and save it with the program that made it.")
            connection.send(said)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
