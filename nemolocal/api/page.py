"""The page's place on the port. The page takes seconds to import, so it is built in a thread while the API
already answers; until it is there a small page says so and reloads itself.

Knows an ASGI app with a lifespan, and nothing of what draws the page.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

_NOTICE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>NemoLocal</title>{refresh}
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark }}
body {{ font: 1.1rem system-ui, sans-serif; display: grid; place-items: center; height: 90vh; margin: 0 }}
</style></head><body><main><p role="status">{text}</p></main></body></html>
"""
STARTING = _NOTICE.format(
    refresh='<meta http-equiv="refresh" content="1">', text="NemoLocal is starting &hellip;"
)
FAILED = _NOTICE.format(
    refresh="", text="The page could not be built; NemoLocal&rsquo;s log file says why. The API works."
)


class Page:
    """An ASGI app that stands in for the page until `build`, called once in a thread, has made it. Once
    `stopping` is set, open answers are cut and the page's lifespan ends."""

    def __init__(self, build: Callable[[], ASGIApp], stopping: asyncio.Event) -> None:
        self._build = build
        self._stopping = stopping
        self._app: ASGIApp | None = None
        self._has_failed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to build; returns at once."""
        self._task = asyncio.create_task(self._live())

    async def close(self) -> None:
        """Wait for the end of the page's lifespan; `stopping` must be set."""
        if self._task is not None:
            if self._app is None:
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            await self._answer_without(scope, receive, send)
            return
        # The page keeps streams open for as long as a tab is; they must not hold up the server's end.
        answer = asyncio.create_task(self._run(self._app, scope, receive, send))
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({answer, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            answer.cancel()
            stopped.cancel()
            await asyncio.gather(answer, stopped, return_exceptions=True)

    async def _run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)

    async def _answer_without(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013, "reason": ""})
        elif self._has_failed:
            await HTMLResponse(FAILED, 500)(scope, receive, send)
        else:
            headers = {"Retry-After": "1", "Cache-Control": "no-store"}
            await HTMLResponse(STARTING, 503, headers=headers)(scope, receive, send)

    async def _live(self) -> None:
        """Build, start up, wait for the end, shut down."""
        try:
            app = await _in_thread(self._build)
            inbox: asyncio.Queue[Message] = asyncio.Queue()
            outbox: asyncio.Queue[Message] = asyncio.Queue()
            scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
            life = asyncio.create_task(self._run(app, scope, inbox.get, outbox.put))
            await inbox.put({"type": "lifespan.startup"})
            answer = asyncio.create_task(outbox.get())
            await asyncio.wait({life, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() or answer.result()["type"] != "lifespan.startup.complete":
                answer.cancel()
                raise RuntimeError("the page's start-up failed")
        except Exception:  # a broken page must not take the API down
            log.exception("the page could not be built")
            self._has_failed = True
            return
        self._app = app
        await self._stopping.wait()
        await inbox.put({"type": "lifespan.shutdown"})
        await asyncio.gather(life, return_exceptions=True)


async def _in_thread(build: Callable[[], ASGIApp]) -> ASGIApp:
    """`build()` in a thread that nobody waits for when the server ends before it does."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[ASGIApp] = loop.create_future()

    def settle(set_: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            set_(value)

    def work() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (result.set_result, build())
        except Exception as error:  # raised again where it is awaited
            outcome = (result.set_exception, error)
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:
            log.debug("the server ended before the page was built")

    threading.Thread(target=work, name="nemolocal-page", daemon=True).start()
    return await result
