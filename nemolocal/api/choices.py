"""The generations of one request, run at the same time: `n` choices, or several prompts, or both.

Knows the stream of a TextModel and nothing of any dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from nemolocal.types import Delta, Finish, Started, StreamItem, TokenLogprob

N_WAITING = 256  # items read ahead of a slow client, over all choices


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice as a whole. `logprobs` describes its tokens where the request asked for it."""

    text: str
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()


class Choices:
    """Call `start` first; then `take` until every choice has had its Finish; `close` in any case."""

    def __init__(self, streams: Sequence[AsyncIterator[StreamItem]]) -> None:
        self._streams = tuple(streams)
        self._items: asyncio.Queue[tuple[int, StreamItem | Exception]] = asyncio.Queue(N_WAITING)
        self._early: list[tuple[int, Delta | Finish]] = []
        self._failure: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def n(self) -> int:
        return len(self._streams)

    async def start(self) -> None:
        """Begin all and wait until the engine has accepted every prompt. Raises what the first one that
        fails raises, with all of them closed."""
        self._tasks = [
            asyncio.create_task(self._pump(index, stream)) for index, stream in enumerate(self._streams)
        ]
        n_started = 0
        try:
            while n_started < self.n:
                index, item = _unpack(await self._items.get())
                if isinstance(item, Started):
                    n_started += 1
                else:
                    self._early.append((index, item))
        except BaseException:
            await self.close()
            raise

    async def take(self, wait_s: float) -> list[tuple[int, Delta | Finish]]:
        """All items that are there, at least one, or [] when none came within `wait_s` seconds. What came
        before a failure is handed out before that is raised."""
        if self._failure:
            raise self._failure
        items, self._early = self._early, []
        if not items and self._items.empty():
            try:
                async with asyncio.timeout(wait_s):
                    items.append(_running(await self._items.get()))
            except TimeoutError:
                return []
        while not self._items.empty():
            index, item = self._items.get_nowait()
            if isinstance(item, Exception) and items:
                self._failure = item
                break
            items.append(_running((index, item)))
        return items

    async def collect(self) -> list[Answer]:
        """Start, wait for the end, close: every choice as a whole, in order."""
        await self.start()
        deltas: list[list[Delta]] = [[] for _ in self._streams]
        finishes: dict[int, Finish] = {}
        try:
            while len(finishes) < self.n:
                for index, item in await self.take(3600.0):
                    if isinstance(item, Finish):
                        finishes[index] = item
                    else:
                        deltas[index].append(item)
        finally:
            await self.close()
        return [_joined(deltas[index], finishes[index]) for index in range(self.n)]

    async def close(self) -> None:
        """End every generation that still runs; returns when the engine has been told."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, index: int, stream: AsyncIterator[StreamItem]) -> None:
        item: StreamItem | None = None
        try:
            async for item in stream:
                await self._items.put((index, item))
            if not isinstance(item, Finish):
                raise RuntimeError("a stream ended without its last item")
        except Exception as error:  # carried over to the request's own task and raised there
            await self._items.put((index, error))
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()


def _joined(deltas: Sequence[Delta], finish: Finish) -> Answer:
    text = "".join(delta.text for delta in deltas)
    return Answer(text, finish, tuple(token for delta in deltas for token in delta.logprobs))


def _unpack(entry: tuple[int, StreamItem | Exception]) -> tuple[int, StreamItem]:
    index, item = entry
    if isinstance(item, Exception):
        raise item
    return index, item


def _running(entry: tuple[int, StreamItem | Exception]) -> tuple[int, Delta | Finish]:
    index, item = _unpack(entry)
    assert not isinstance(item, Started), "a stream started twice"
    return index, item
