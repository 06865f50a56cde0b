"""A stream in batches, so that the page is drawn a bounded number of times a second however fast tokens
come. Knows neither gradio nor models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def in_batches(
    stream: AsyncIterator[T], *, every_s: float, beat_s: float, stop: asyncio.Event
) -> AsyncGenerator[list[T], None]:
    """What `stream` yields, gathered into at most one list per `every_s` seconds; an empty list after
    `beat_s` seconds of silence. Ends early, after the items that had come, once `stop` is set.

    The stream is read by a task of its own, and is closed however this ends: at its end, by an error
    (which is raised after the items before it), by `stop`, or when the reader goes away.
    """
    items: list[T] = []
    arrived = asyncio.Event()

    async def read() -> None:
        async for item in stream:
            items.append(item)
            arrived.set()

    reading = asyncio.create_task(read())
    stopping = asyncio.create_task(stop.wait())
    try:
        while not reading.done() and not stop.is_set():
            arriving = asyncio.create_task(arrived.wait())
            await asyncio.wait(
                {reading, stopping, arriving}, timeout=beat_s, return_when=asyncio.FIRST_COMPLETED
            )
            arriving.cancel()
            arrived.clear()
            batch, items[:] = items[:], []
            yield batch
            if batch:
                await asyncio.wait({reading, stopping}, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
        if items:
            yield items
        if reading.done():
            await reading
    finally:
        stopping.cancel()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
