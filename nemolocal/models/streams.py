"""One answer over HTTP, read in a thread of its own.

So whoever waits for it can be stopped at any moment: while a name is looked up, while a server is silent.
What is fetched, and what becomes of the bytes, is not known here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2

from nemolocal.errors import DownloadStoppedError

LOOK_S = 0.1
"""How often a wait looks whether it was stopped."""
_N_BLOCKS_AHEAD = 32  # of up to 64 KiB each: the disk may lag behind the network so far


def refuse_stopped(stop: threading.Event) -> None:
    """Raises DownloadStoppedError once `stop` is set."""
    if stop.is_set():
        raise DownloadStoppedError


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer, and its body as it comes. `blocks` raises httpx2.HTTPError when the line fails
    and DownloadStoppedError when stopped."""

    head: httpx2.Response
    blocks: Iterator[bytes]


@contextmanager
def get(
    url: str, *, headers: Mapping[str, str], timeout: httpx2.Timeout, stop: threading.Event
) -> Iterator[Answer]:
    """Ask for `url`, following redirects; a token in the headers stays with the first host.

    Raises what Answer.blocks does. What is left unread when the context ends is not read any more.
    """
    reader = _Reader(url, headers, timeout)
    threading.Thread(target=reader.run, name="http", daemon=True).start()
    try:
        head = reader.next(stop)
        assert isinstance(head, httpx2.Response), head
        yield Answer(head, reader.blocks(stop))
    finally:
        reader.is_left.set()


class _Reader:
    """What the thread reads, handed over piece by piece: the head, blocks of the body, None at its end, or
    what went wrong in place of any of them."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout: httpx2.Timeout) -> None:
        self._url, self._headers, self._timeout = url, headers, timeout
        self._read: queue.Queue[httpx2.Response | bytes | BaseException | None]
        self._read = queue.Queue(_N_BLOCKS_AHEAD)
        self.is_left = threading.Event()

    def run(self) -> None:
        try:
            # A client of the thread's own: nobody else closes it while it waits on its socket.
            with (
                httpx2.Client(follow_redirects=True, timeout=self._timeout, headers=self._headers) as client,
                client.stream("GET", self._url) as response,
            ):
                self._hand_over(response)
                for block in response.iter_bytes():
                    if not self._hand_over(block):
                        return
            self._hand_over(None)
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            self._hand_over(error)

    def _hand_over(self, piece: httpx2.Response | bytes | BaseException | None) -> bool:
        """False when nobody waits for it any more."""
        while not self.is_left.is_set():
            try:
                self._read.put(piece, timeout=LOOK_S)
            except queue.Full:
                continue
            return True
        return False

    def next(self, stop: threading.Event) -> httpx2.Response | bytes | None:
        while True:
            refuse_stopped(stop)
            try:
                piece = self._read.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            if isinstance(piece, BaseException):
                raise piece
            return piece

    def blocks(self, stop: threading.Event) -> Iterator[bytes]:
        while (block := self.next(stop)) is not None:
            assert isinstance(block, bytes), block
            yield block
