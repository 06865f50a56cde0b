"""Requests of all kinds at the same time, through the real port and the page's own code, on real engines with
small models: an answer that is being written, others beside it, inputs to embed, a chat on the page."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import psutil
import pytest
from starlette.types import ASGIApp

from nemolocal import config
from nemolocal.service import Service
from nemolocal.ui.answer import Frame, answer
from nemolocal.ui.conversation import sent
from nemolocal.ui.options import Options
from tests import synthetic, synthetic_embedders
from tests.api.serving import CHAT, Live, assert_error, running, user
from tests.profiles import machine

pytestmark = [pytest.mark.model, pytest.mark.anyio]

N_SLOTS = 8
N_QUEUE = 100
TOLERANCE = 0.015  # in log probability: what rounding changes
TALE = {"messages": user("Tell me a tale."), "max_tokens": 120, "ignore_eos": True}
WORD = {"messages": user("Hi"), "max_tokens": 16, "ignore_eos": True}
GREEDY = {"model": "talker", "temperature": 0, "logprobs": True}


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    folder = config.load().models_dir
    folder.mkdir(parents=True)
    shape = replace(synthetic.TINY["llama"], n_ctx_train=8192)
    synthetic.write(folder / "talker.gguf", shape)
    synthetic_embedders.write(folder / "embedder.gguf", "bert")
    flags = {"ctx": 8192, "slots": N_SLOTS, "threads": 1, "queue": N_QUEUE}
    made = Service(config.load(flags), detect=machine)
    await made.load("talker")
    await made.load("embedder")
    yield made
    await made.close()


@contextlib.asynccontextmanager
async def calling(
    service: Service, *, page: Callable[[], ASGIApp] | None = None
) -> AsyncIterator[tuple[Live, httpx.AsyncClient]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        running(service, page=page) as live,
        httpx.AsyncClient(base_url=live.url, timeout=120, limits=limits) as caller,
    ):
        yield live, caller


Said = list[tuple[str, float]]
"""The tokens of an answer and how likely each was."""


async def ask(caller: httpx.AsyncClient, body: dict[str, Any]) -> Said:
    response = await caller.post(CHAT, json=GREEDY | body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    return _said(choice)


async def stream(caller: httpx.AsyncClient, body: dict[str, Any], third: asyncio.Event | None = None) -> Said:
    """The same, streamed; `third` is set when as many pieces of it have come."""
    said: Said = []
    reasons = []
    async with caller.stream("POST", CHAT, json=GREEDY | body | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    said += _said(choice)
                    reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            if third and len(said) >= 3:
                third.set()
    assert reasons == ["length"]
    return said


def _said(choice: dict[str, Any]) -> Said:
    told = choice["logprobs"] or {"content": []}
    return [(entry["token"], entry["logprob"]) for entry in told["content"]]


def assert_same(alone: Said, beside: Said) -> None:
    """The same text, but for ties that rounding breaks."""
    assert len(alone) == len(beside)
    for (one, logprob), (other, its_logprob) in zip(alone, beside, strict=True):
        assert abs(logprob - its_logprob) < TOLERANCE
        if one != other:
            return


async def on_the_page(service: Service) -> Frame:
    """The last state of a chat on the page."""
    options = Options(temperature=0, max_tokens=40)
    asking = answer(service, sent((), "Tell me a joke."), options, ref="talker", stop=asyncio.Event())
    return [frame async for frame in asking][-1]


async def embed(caller: httpx.AsyncClient) -> list[float]:
    body = {"model": "embedder", "input": "the thing and another"}
    response = await caller.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    vector: list[float] = response.json()["data"][0]["embedding"]
    return vector


async def test_newer_requests_leave_a_running_answer_alone_and_do_not_wait_for_it(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [psutil.Process(resident.engine.pid) for resident in service._residency.residents]
    async with calling(service) as (_, caller):
        tale, word = await ask(caller, TALE), await ask(caller, WORD)
        vector, page = await embed(caller), await on_the_page(service)
        before_bytes = 0
        for n_rounds in range(10):
            third = asyncio.Event()
            telling = asyncio.create_task(stream(caller, TALE, third))
            await third.wait()
            chatting = asyncio.create_task(on_the_page(service))
            beside = await asyncio.gather(stream(caller, WORD), ask(caller, WORD), embed(caller))
            assert_same(tale, await telling)
            assert_same(word, beside[0])
            assert_same(word, beside[1])
            assert beside[2] == pytest.approx(vector, abs=1e-4)
            chat = await chatting
            assert (chat.is_last, chat.problem) == (page.is_last, page.problem) == (True, "")
            assert chat.meter.new_tokens > 0
            if n_rounds == 2:
                before_bytes = sum(engine.memory_info().rss for engine in engines)
        assert sum(engine.memory_info().rss for engine in engines) <= 1.05 * before_bytes
        third = asyncio.Event()
        endless = asyncio.create_task(stream(caller, TALE | {"max_tokens": 8000}, third))
        await third.wait()
        await asyncio.gather(stream(caller, WORD), ask(caller, WORD), embed(caller))
        assert not endless.done(), "it was waited for"
        endless.cancel()
        await asyncio.gather(endless, return_exceptions=True)
    assert "lock" not in caplog.text.lower()


async def test_conversations_do_not_leak(service: Service) -> None:
    """One after another, after one that nearly fills the context, and at the same time."""
    secret = [{"role": "system", "content": "The secret word is ZEBRA-12."}, *user("Say the secret word.")]
    short = GREEDY | {"messages": secret, "max_tokens": 40}
    long = short | {"messages": [secret[0], *user("the " * 3000)]}
    sky = GREEDY | {"messages": user("What colour is the sky?"), "max_tokens": 40, "ignore_eos": True}
    async with calling(service) as (_, caller):
        alone = (await caller.post(CHAT, json=sky)).json()

        async def check() -> None:
            again = (await caller.post(CHAT, json=sky)).json()
            assert_same(_said(alone["choices"][0]), _said(again["choices"][0]))
            assert again["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]

        for before in (short, short, long):
            told = (await caller.post(CHAT, json=before)).json()
            await check()
        assert told["usage"]["prompt_tokens"] > 6000
        for _ in range(5):
            await asyncio.gather(caller.post(CHAT, json=short), check())


async def test_two_hundred_at_once_in_their_order(service: Service) -> None:
    """As many as slots and queue take are answered, those who came first before the others; who is refused is
    told when to come again. The page is served meanwhile."""
    from nemolocal.ui import app

    body = GREEDY | {"messages": user("Hi"), "max_tokens": 4, "ignore_eos": True}
    sent_in_order: list[int] = []
    ended: list[int] = []

    async def one(i: int, caller: httpx.AsyncClient) -> int:
        async def trace(event: str, _: dict[str, Any]) -> None:  # connections are not made in their order
            if event == "http11.send_request_body.complete":
                sent_in_order.append(i)

        request = caller.build_request("POST", CHAT, json=body | {"stream": i % 2 == 0})
        request.extensions["trace"] = trace
        response = await caller.send(request)
        if response.status_code == 200:
            ended.append(i)
        else:
            assert_error(response, 429, code="queue_full")
            assert int(response.headers["retry-after"]) > 0
        return response.status_code

    async def watch(caller: httpx.AsyncClient) -> None:
        while True:
            for path in ("/health", "/v1/models", "/"):
                assert (await caller.get(path)).status_code == 200
            await asyncio.sleep(0.05)

    page = await asyncio.to_thread(app.page, service)
    async with calling(service, page=lambda: page) as (_, caller):
        while (await caller.get("/")).status_code == 503:
            await asyncio.sleep(0.05)
        watching = asyncio.create_task(watch(caller))
        statuses = await asyncio.gather(*(one(i, caller) for i in range(200)))
        assert not watching.done()
        watching.cancel()
        assert statuses.count(200) >= N_QUEUE
        turn = {i: place for place, i in enumerate(sent_in_order)}
        turns = [turn[i] for i in ended]
        n_overtaken = [sum(later > i for later in turns[:place]) for place, i in enumerate(turns)]
        assert max(n_overtaken) < 50
        assert await ask(caller, WORD)
