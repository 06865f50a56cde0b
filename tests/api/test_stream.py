"""Streams on a real socket: framing, silence, failures, clients that leave or are slow."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from nemolocal.api import sse
from nemolocal.errors import BusyError, EngineDiedError
from tests.api.serving import (
    CHAT,
    COMPLETIONS,
    assert_error,
    chat,
    client,
    connected,
    raw_post,
    running,
    slow_service,
    until,
    user,
)
from tests.fakes import FakeService, FakeTextModel

pytestmark = pytest.mark.anyio

STREAM = {"messages": user("Hi"), "stream": True}


def payloads(text: str) -> list[Any]:
    """The events of a whole stream; checks that each is one line and an empty line, and DONE the last."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    events = [block for block in blocks if block != ":"]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def streamed(service: FakeService, path: str = CHAT, **fields: Any) -> list[Any]:
    async with client(service) as caller:
        response = await caller.post(path, json={"stream": True} | fields)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    return payloads(response.text)


async def test_a_stream_is_well_formed() -> None:
    chunks = await streamed(FakeService(), messages=user("Hi"))
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"].get("content") for choice in choices[1:]] == ["Hello", " there", ".", None]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]
    assert not any("usage" in chunk for chunk in chunks)


async def test_the_usage_comes_last_when_asked_for() -> None:
    for path, fields in ((CHAT, {"messages": user("Hi")}), (COMPLETIONS, {"prompt": "Hi"})):
        *chunks, last = await streamed(FakeService(), path, stream_options={"include_usage": True}, **fields)
        assert last["choices"] == []
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (1, 3)
        assert last["timings"]["predicted_n"] == 3
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["id"] == chunks[0]["id"]


async def test_no_usage_when_it_is_not_wanted() -> None:
    chunks = await streamed(FakeService(), messages=user("Hi"), stream_options={"include_usage": False})
    assert all(chunk["choices"] for chunk in chunks)


async def test_a_streamed_completion() -> None:
    chunks = await streamed(FakeService(), COMPLETIONS, prompt="1, 2", max_tokens=2)
    assert [c["choices"][0]["text"] for c in chunks] == ["Hello", " there", ""]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "length"]
    assert {c["object"] for c in chunks} == {"text_completion"}


async def test_every_kind_of_character_arrives_as_it_was() -> None:
    pieces = ["€", "🙂", "\ufffd", "x", "\n", "\r\n\r\n", "\u2028\u2029\x85", 'data: "}', "日本", "\x00\x1e"]
    service = FakeService(FakeTextModel(pieces))
    async with client(service) as caller:
        response = await caller.post(COMPLETIONS, json={"prompt": "Hi", "stream": True})
        whole = await caller.post(COMPLETIONS, json={"prompt": "Hi"})
    lines = response.content.split(b"\n")
    assert all(line.decode() is not None for line in lines)  # each decodes on its own
    assert response.text.splitlines() == response.text.split("\n")[:-1]  # for clients that split at any break
    texts = [chunk["choices"][0]["text"] for chunk in payloads(response.text)]
    assert texts[:-1] == pieces
    assert "".join(texts) == whole.json()["choices"][0]["text"]


async def test_the_tail_comes_before_the_end() -> None:
    chunks = await streamed(
        FakeService(FakeTextModel(["ab", "cEN", "dEN"])), COMPLETIONS, prompt="Hi", stop=["END"]
    )
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "abcENdEN"
    assert chunks[-1]["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}


async def test_choices_are_told_apart_by_their_index() -> None:
    service = FakeService()
    service.model.delay_s = 0.001
    chunks = await streamed(service, messages=user("Hi"), n=3, stream_options={"include_usage": True})
    *chunks, last = chunks
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hello there."
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
    order = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["delta"].get("content")]
    assert order != sorted(order)  # they came side by side
    assert last["usage"]["completion_tokens"] == 9
    assert last["usage"]["prompt_tokens"] == 1


async def test_what_is_wrong_before_the_start_is_a_plain_error() -> None:
    service = FakeService()
    service.model.refusal = BusyError("The queue is full.", retry_after_s=3)
    response = await chat(service, stream=True)
    assert_error(response, 429, code="queue_full")
    assert response.headers["retry-after"] == "3"


async def test_headers_and_signs_of_life_while_the_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)
    service = FakeService()
    service.model.read_delay_s = 0.5
    async with running(service) as live, connected(live) as (reader, writer):
        writer.write(raw_post(COMPLETIONS, {"prompt": "Hi", "stream": True}))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 0.4)
        assert head.startswith(b"HTTP/1.1 200 ")
        signs = await asyncio.wait_for(reader.readuntil(b":\n\n"), 0.4)
        assert b"data:" not in signs
        assert b"[DONE]" in await asyncio.wait_for(reader.readuntil(b"[DONE]"), 5)


def test_signs_of_life_are_frequent_enough_for_any_client() -> None:
    assert sse.KEEP_ALIVE_S <= 10


@pytest.mark.parametrize("error", [EngineDiedError("The engine's process ended."), ValueError("xyzzy")])
async def test_a_failure_amid_a_stream_is_an_event_and_the_end(error: Exception) -> None:
    service = FakeService()
    service.model.error = error
    async with running(service) as live, httpx.AsyncClient(base_url=live.url) as caller:
        response = await caller.post(CHAT, json=STREAM)
        assert response.status_code == 200
        *_, last, rest = response.text.split("\n\n")
        assert rest == ""
        assert "[DONE]" not in response.text
        assert "xyzzy" not in response.text
        code = "engine_died" if isinstance(error, EngineDiedError) else "internal_error"
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
        service.model.error = None
        assert (await caller.post(CHAT, json=STREAM)).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_generations_at_once(stream: bool, n: int) -> None:
    service = slow_service()
    async with running(service) as live:
        async with connected(live) as (reader, writer):
            writer.write(raw_post(CHAT, {"messages": user("Hi"), "stream": stream, "n": n}))
            if stream:
                await reader.readuntil(b"2 ")
            else:
                await until(lambda: len(service.model.calls) == n)
                await asyncio.sleep(0.05)
            assert service.model.n_closed_early == 0
        await until(lambda: service.model.n_closed_early == n, within_s=1.0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_the_model_loads(stream: bool) -> None:
    service = FakeService()
    service.model.accept_delay_s = 30.0
    async with running(service) as live:
        async with connected(live) as (_, writer):
            writer.write(raw_post(CHAT, {"messages": user("Hi"), "stream": stream}))
            await until(lambda: len(service.model.calls) == 1)
        await until(lambda: service.model.n_closed_early == 1, within_s=1.0)


async def test_many_that_leave_hold_up_nobody() -> None:
    service = slow_service()
    async with running(service) as live, httpx.AsyncClient(base_url=live.url) as caller:
        for _ in range(20):
            async with connected(live) as (reader, writer):
                writer.write(raw_post(COMPLETIONS, {"prompt": "Hi", "stream": True}))
                await reader.readuntil(b"data: ")
        await until(lambda: service.model.n_closed_early == 20, within_s=1.0)
        body = (await caller.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 2})).json()
        assert body["choices"][0]["text"] == "0 1 "


async def test_a_slow_reader_loses_nothing_and_blocks_nobody() -> None:
    pieces = ["x" * 8000 + f" {index} " for index in range(1000)]  # more than the socket's buffers hold
    service = FakeService(FakeTextModel(pieces))
    async with (
        running(service) as live,
        connected(live) as (reader, writer),
        httpx.AsyncClient(base_url=live.url) as caller,
    ):
        writer.write(raw_post(COMPLETIONS, {"prompt": "Hi", "stream": True}))
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.2)
        other = await caller.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 3, "stream": True})
        assert other.text.endswith("data: [DONE]\n\n")
        content = b""
        while size := int((await reader.readline()).strip(), 16):
            content += await reader.readexactly(size)
            await reader.readline()
    texts = [chunk["choices"][0]["text"] for chunk in payloads(content.decode())]
    assert texts[:-1] == pieces


async def test_a_stopping_server_ends_answers_with_a_reason() -> None:
    service = slow_service()
    async with running(service) as live, httpx.AsyncClient(base_url=live.url) as caller:
        stream = asyncio.create_task(caller.post(CHAT, json=STREAM))
        whole = asyncio.create_task(caller.post(CHAT, json={"messages": user("Hi")}))
        await until(lambda: len(service.model.calls) == 2)
        live.server.should_exit = True
        async with asyncio.timeout(2):
            streamed_text = (await stream).text
            assert_error(await whole, 503, code="shutting_down")
    *_, last, _ = streamed_text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert service.model.n_closed_early == 2
    assert service.n_closed == 1
