"""The server as a process: what it prints, how it ends, what it does when it cannot begin."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from nemolocal.api.listen import listen
from nemolocal.api.serve import serve
from nemolocal.errors import ModelNotFoundError, PortError, UsageError
from tests.api.serving import CHAT, user
from tests.fakes import FakeService

SCRIPT = """
import sys
from nemolocal.api.serve import serve
from tests.fakes import FakeService, FakeTextModel

model = FakeTextModel([f"{index} " for index in range(1000)])
model.delay_s = 0.01
service = FakeService(model, port=int(sys.argv[1]))
serve(service, ["one"], announce=lambda listener: print(listener.url, flush=True))
print("ended", service.started, service.n_closed, flush=True)
"""


@contextlib.contextmanager
def process(port: int = 0) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(port)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="a child cannot be sent Ctrl-C alone on Windows")
def test_ctrl_c_ends_a_running_stream_and_the_process() -> None:
    with process() as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        body = {"messages": user("Hi"), "stream": True}
        with httpx.stream("POST", url + CHAT, json=body, timeout=10) as answer:
            text = ""
            for piece in answer.iter_text():
                if not text:
                    os.kill(server.pid, signal.SIGINT)
                text += piece
        assert '"code":"shutting_down"' in text
        out, err = server.communicate(timeout=10)
        assert out == "ended [('one',)] 1\n"
        assert err == ""
        assert server.returncode == 0


def test_a_port_in_use_is_told_before_anything_starts() -> None:
    listener = listen("127.0.0.1", 0, has_key=False)
    service = FakeService(port=listener.port)
    try:
        with pytest.raises(PortError, match=f"Port {listener.port} is in use"):
            serve(service, ["one"])
    finally:
        listener.close()
    assert service.started == []


def test_an_open_address_without_a_key_does_not_start() -> None:
    service = FakeService(host="0.0.0.0", port=0)
    with pytest.raises(UsageError, match="an API key is needed"):
        serve(service, ["one"])
    assert service.started == []


def test_what_the_service_cannot_start_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService(port=0)

    async def fail(refs: object) -> None:
        raise ModelNotFoundError("No model named 'one' is here.")

    monkeypatch.setattr(service, "start", fail)
    announced: list[object] = []
    with pytest.raises(ModelNotFoundError, match="No model named 'one'"):
        serve(service, ["one"], announce=announced.append)
    assert announced == []
    assert service.n_closed == 1


def test_a_service_that_fails_once_the_page_is_there_ends_the_server_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = FakeService(port=0)
    life: list[str] = []

    @contextlib.asynccontextmanager
    async def live(app: Starlette) -> AsyncIterator[None]:
        life.append("started")
        yield
        life.append("ended")

    async def fail(refs: object) -> None:
        while not life:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        raise ModelNotFoundError("No model named 'one' is here.")

    monkeypatch.setattr(service, "start", fail)
    with pytest.raises(ModelNotFoundError):
        serve(service, ["one"], page=lambda: Starlette(lifespan=live))
    assert life == ["started", "ended"]
