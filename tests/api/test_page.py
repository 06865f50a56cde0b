"""The page's place on the port: built in a thread, started late, no burden on the API."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.api.serving import running, until
from tests.fakes import FakeService

pytestmark = pytest.mark.anyio


class StandIn:
    """A page that is built when the test says so, and records its life."""

    def __init__(self) -> None:
        self.may_build = threading.Event()
        self.events: list[str] = []
        self.n_open = 0
        self.main = threading.get_ident()

    def build(self) -> ASGIApp:
        self.events.append("built elsewhere" if threading.get_ident() != self.main else "built on the loop")
        assert self.may_build.wait(10)
        routes = [Route("/", self.home), Route("/forever", self.forever)]
        return Starlette(routes=routes, lifespan=self.live)

    @contextlib.asynccontextmanager
    async def live(self, app: Starlette) -> AsyncIterator[None]:
        self.events.append(
            "started on the loop" if threading.get_ident() == self.main else "started elsewhere"
        )
        yield
        self.events.append("ended")

    async def home(self, request: Request) -> Response:
        return PlainTextResponse("the page")

    async def forever(self, request: Request) -> Response:
        async def beats() -> AsyncIterator[str]:
            self.n_open += 1
            try:
                while True:
                    yield "beat "
                    await asyncio.sleep(0.01)
            finally:
                self.n_open -= 1

        return StreamingResponse(beats())


async def test_the_api_answers_while_the_page_is_built() -> None:
    page = StandIn()
    async with (
        running(FakeService(), page=page.build) as live,
        httpx.AsyncClient(base_url=live.url) as caller,
    ):
        for path in ("/", "/assets/x.js"):
            waiting = await caller.get(path)
            assert waiting.status_code == 503
            assert waiting.headers["retry-after"] == "1"
        assert 'http-equiv="refresh"' in waiting.text
        assert "http" not in waiting.text.replace("http-equiv", "")  # nothing is loaded from anywhere
        assert (await caller.get("/health")).json() == {"status": "ok"}
        page.may_build.set()
        while (answer := await caller.get("/")).status_code == 503:
            await asyncio.sleep(0.01)
        assert answer.text == "the page"
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert (await caller.get("/v1/nope")).json()["error"]["code"] == "unknown_route"
        assert (await caller.post("/v1/models", json={})).status_code == 405
    assert page.events == ["built elsewhere", "started on the loop", "ended"]


async def test_a_page_that_cannot_be_built_leaves_the_api_standing(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> ASGIApp:
        raise ImportError("no such module")

    async with running(FakeService(), page=broken) as live, httpx.AsyncClient(base_url=live.url) as caller:
        while (answer := await caller.get("/")).status_code == 503:
            await asyncio.sleep(0.01)
        assert answer.status_code == 500
        assert "no such module" not in answer.text
        assert (await caller.get("/health")).status_code == 200
    assert "no such module" in caplog.text


@pytest.mark.parametrize("is_silent", [True, False])
async def test_a_page_whose_start_fails(is_silent: bool) -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        if not is_silent:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": "no"})

    async with (
        running(FakeService(), page=lambda: failing) as live,
        httpx.AsyncClient(base_url=live.url) as caller,
    ):
        while (answer := await caller.get("/")).status_code == 503:
            await asyncio.sleep(0.01)
        assert answer.status_code == 500


async def test_open_pages_do_not_hold_up_the_end() -> None:
    page = StandIn()
    page.may_build.set()
    service = FakeService()
    async with running(service, page=page.build) as live, httpx.AsyncClient(base_url=live.url) as caller:
        while (await caller.get("/")).status_code == 503:
            await asyncio.sleep(0.01)
        async with caller.stream("GET", "/forever") as answer:
            pieces = answer.aiter_text()
            await anext(pieces)
            assert page.n_open == 1
            live.server.should_exit = True
            await until(lambda: service.n_closed == 1, within_s=1.5)
            assert page.n_open == 0
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in pieces:
                    pass
    assert page.events[-1] == "ended"


async def test_a_visitor_who_leaves_ends_the_pages_answer() -> None:
    page = StandIn()
    page.may_build.set()
    async with (
        running(FakeService(), page=page.build) as live,
        httpx.AsyncClient(base_url=live.url) as caller,
    ):
        while (await caller.get("/")).status_code == 503:
            await asyncio.sleep(0.01)
        async with caller.stream("GET", "/forever") as answer:
            await anext(answer.aiter_text())
        await until(lambda: page.n_open == 0, within_s=1.0)


async def test_the_server_can_end_before_the_page_is_built() -> None:
    page = StandIn()
    service = FakeService()
    async with running(service, page=page.build):
        pass
    assert service.n_closed == 1
    page.may_build.set()
