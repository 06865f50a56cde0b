"""The official client against a real socket: what it makes of answers, streams and errors."""

from __future__ import annotations

import asyncio

import openai
import pytest

from nemolocal.errors import EngineDiedError
from tests.api.serving import running
from tests.fakes import FakeService, FakeTextModel

pytestmark = pytest.mark.anyio

PIECES = tuple(f"{index} €🙂\n" for index in range(20))


def official(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


async def test_answers_streams_and_models() -> None:
    async with running(FakeService()) as live, official(live.url) as caller:
        assert [model.id async for model in caller.models.list()] == ["fake"]
        assert (await caller.models.retrieve("fake")).owned_by == "tests"
        answer = await caller.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}], n=2, max_completion_tokens=2
        )
        assert [choice.message.content for choice in answer.choices] == ["Hello there"] * 2
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert answer.model_extra is not None
        assert answer.model_extra["timings"]["predicted_n"] == 4
        text = await caller.completions.create(model="fake", prompt=["a", "b"], max_tokens=1)
        assert [choice.text for choice in text.choices] == ["Hello", "Hello"]
        raw = [
            chunk async for chunk in await caller.completions.create(model="fake", prompt="a", stream=True)
        ]
        assert "".join(chunk.choices[0].text for chunk in raw) == "Hello there."


async def test_32_streams_at_once() -> None:
    service = FakeService(FakeTextModel(PIECES))
    service.model.delay_s = 0.001

    async def one(caller: openai.AsyncOpenAI) -> tuple[str, list[str | None], int]:
        text, reasons, n_tokens = "", [], 0
        stream = await caller.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            if chunk.usage:
                n_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
        return text, reasons, n_tokens

    async with running(service) as live, official(live.url) as caller:
        results = await asyncio.gather(*(one(caller) for _ in range(32)))
    assert results == [("".join(PIECES), ["stop"], 20)] * 32


async def test_errors_arrive_as_the_clients_own() -> None:
    service = FakeService()
    async with running(service) as live, official(live.url) as caller:
        with pytest.raises(openai.NotFoundError) as missing:
            await caller.chat.completions.create(model="nope", messages=[{"role": "user", "content": "Hi"}])
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await caller.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "word " * 9000}], stream=True
            )
        assert long.value.code == "context_length_exceeded"
        service.model.error = EngineDiedError("The engine's process ended.")
        stream = await caller.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="process ended"):
            async for _ in stream:
                pass


async def test_the_key_that_the_client_sends() -> None:
    service = FakeService(api_key="s3cret")
    async with running(service) as live:
        async with official(live.url, "s3cret") as caller:
            assert (await caller.models.retrieve("fake")).id == "fake"
        async with official(live.url, "wrong") as caller:
            with pytest.raises(openai.AuthenticationError):
                await caller.models.retrieve("fake")


async def test_closing_the_clients_stream_frees_the_engine() -> None:
    service = FakeService(FakeTextModel(PIECES))
    service.model.delay_s = 0.05
    async with running(service) as live, official(live.url) as caller:
        stream = await caller.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        async with asyncio.timeout(1):
            while not service.model.n_closed_early:
                await asyncio.sleep(0.01)
