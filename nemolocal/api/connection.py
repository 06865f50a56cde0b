"""Work that lasts no longer than someone waits for it: a client that hangs up, or the server's own end,
stops it at once, so that a slot in the engine is free for the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from nemolocal.api.errors import ClientGoneError, ShuttingDownError

Result = TypeVar("Result")


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. Raises what it raises, ClientGoneError or ShuttingDownError; in the last two
    cases the work has been cancelled and has ended."""
    return await attend(work, receive=request.receive, stopping=request.app.state.stopping)


async def attend(work: Coroutine[Any, Any, Result], *, receive: Receive, stopping: asyncio.Event) -> Result:
    task = asyncio.create_task(work)
    gone = asyncio.create_task(until_gone(receive))
    stopped = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({task, gone, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError if gone.done() else ShuttingDownError
    finally:
        for each in (task, gone, stopped):
            each.cancel()
        await asyncio.gather(task, gone, stopped, return_exceptions=True)
