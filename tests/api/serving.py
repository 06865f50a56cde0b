"""What the port's tests share: a client straight into the app, a server on a real socket, a raw request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.types import ASGIApp

from nemolocal.api.app import Port, create
from nemolocal.api.listen import listen
from nemolocal.api.serve import Server
from nemolocal.service import Service
from tests.fakes import FakeService, FakeTextModel

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def client(service: FakeService, **options: Any) -> httpx.AsyncClient:
    """A client that calls the app without a socket."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(create(service, **options)), base_url="http://127.0.0.1:6366"
    )


async def post(service: FakeService, path: str, body: Any) -> httpx.Response:
    async with client(service) as caller:
        return await caller.post(path, json=body)


async def chat(service: FakeService, **fields: Any) -> httpx.Response:
    return await post(service, CHAT, {"messages": user("Hi")} | fields)


def assert_error(
    response: httpx.Response, status: int, *, param: str | None = None, code: str | None = None
) -> str:
    """The answer is an error in OpenAI's shape and nothing else; returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) <= 1000
    assert "Traceback" not in error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] == param
    assert error["code"] == code
    return error["message"]


@dataclass(frozen=True)
class Live:
    """A server on a real socket."""

    port: Port
    server: Server
    number: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.number}"


@contextlib.asynccontextmanager
async def running(service: Service, *, page: Callable[[], ASGIApp] | None = None) -> AsyncIterator[Live]:
    """The real server around a service, mostly a fake one, on a free port and on the test's own loop."""
    listener = listen("127.0.0.1", 0, has_key=False)
    port = create(service, page=page)
    answers = asyncio.Event()
    server = Server(port, answers.set)
    task = asyncio.create_task(server.serve(list(listener.sockets)))
    try:
        await answers.wait()
        yield Live(port, server, listener.port)
    finally:
        server.should_exit = True
        await task
        listener.close()


@contextlib.asynccontextmanager
async def connected(live: Live) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", live.number)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def raw_post(path: str, body: Any) -> bytes:
    """A POST as it goes over the wire."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
    """Wait for something that another task brings about."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def slow_service(n_pieces: int = 1000, *, delay_s: float = 0.01) -> FakeService:
    """A service whose answer takes long enough to be interrupted."""
    model = FakeTextModel([f"{index} " for index in range(n_pieces)])
    model.delay_s = delay_s
    return FakeService(model)
