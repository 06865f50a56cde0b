"""Probabilities of tokens: both shapes, whole and streamed, parts of characters, impossible tokens."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from nemolocal.types import (
    Candidate,
    Delta,
    Finish,
    GenerationParams,
    Started,
    StreamItem,
    Timings,
    TokenLogprob,
    Usage,
)
from tests.api.serving import CHAT, COMPLETIONS, assert_error, post, running, user
from tests.fakes import FakeService, FakeTextModel

pytestmark = pytest.mark.anyio

HELLO = Candidate(5, b"Hello", -0.25)
EURO = (Candidate(6, b"\xe2\x82", -1.0), Candidate(7, b"\xac", 0.0))
NEVER = Candidate(8, b"\xff", -math.inf)
STRANGE = Candidate(9, b"x", math.nan)


class Scripted(FakeTextModel):
    """Says "Hello" and a euro sign, which takes two tokens."""

    async def _stream(self, n_prompt: int, params: GenerationParams) -> AsyncIterator[StreamItem]:
        yield Started(n_prompt)
        yield Delta("Hello", 1, (TokenLogprob(HELLO, (HELLO, NEVER)),))
        yield Delta("€", 2, (TokenLogprob(EURO[0], (STRANGE, EURO[0])), TokenLogprob(EURO[1], (HELLO,))))
        yield Delta("Hello", 1, (TokenLogprob(HELLO),))
        yield Finish("stop", Usage(n_prompt, 4), Timings(0.0, 0.01, 0.02))


def scripted() -> FakeService:
    return FakeService(Scripted())


async def streamed(service: FakeService, path: str, **fields: Any) -> list[dict[str, Any]]:
    text = (await post(service, path, {"stream": True} | fields)).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


CHAT_CONTENT = [
    {
        "token": "Hello",
        "logprob": -0.25,
        "bytes": [72, 101, 108, 108, 111],
        "top_logprobs": [
            {"token": "Hello", "logprob": -0.25, "bytes": [72, 101, 108, 108, 111]},
            {"token": "\ufffd", "logprob": -9999.0, "bytes": [255]},
        ],
    },
    {
        "token": "\ufffd",
        "logprob": -1.0,
        "bytes": [0xE2, 0x82],
        "top_logprobs": [
            {"token": "x", "logprob": -9999.0, "bytes": [120]},
            {"token": "\ufffd", "logprob": -1.0, "bytes": [0xE2, 0x82]},
        ],
    },
    {
        "token": "\ufffd",
        "logprob": 0.0,
        "bytes": [0xAC],
        "top_logprobs": [{"token": "Hello", "logprob": -0.25, "bytes": [72, 101, 108, 108, 111]}],
    },
    {"token": "Hello", "logprob": -0.25, "bytes": [72, 101, 108, 108, 111], "top_logprobs": []},
]


async def test_chats_shape() -> None:
    body = (
        await post(scripted(), CHAT, {"messages": user("Hi"), "logprobs": True, "top_logprobs": 2})
    ).json()
    assert body["choices"][0]["logprobs"] == {"content": CHAT_CONTENT, "refusal": None}


async def test_each_chunk_of_a_chat_holds_those_of_its_tokens() -> None:
    opening, *chunks, last = await streamed(
        scripted(), CHAT, messages=user("Hi"), logprobs=True, top_logprobs=2
    )
    assert opening["logprobs"] is None
    assert last["logprobs"] is None
    assert [len(chunk["logprobs"]["content"]) for chunk in chunks] == [1, 2, 1]
    assert [entry for chunk in chunks for entry in chunk["logprobs"]["content"]] == CHAT_CONTENT


LEGACY = {
    "tokens": ["Hello", "bytes:\\xe2\\x82", "bytes:\\xac", "Hello"],
    "token_logprobs": [-0.25, -1.0, 0.0, -0.25],
    "top_logprobs": [
        {"Hello": -0.25, "bytes:\\xff": -9999.0},
        {"bytes:\\xe2\\x82": -1.0, "x": -9999.0},
        {"bytes:\\xac": 0.0, "Hello": -0.25},
        {"Hello": -0.25},
    ],
    "text_offset": [0, 5, 5, 6],
}


async def test_the_older_shape() -> None:
    body = (await post(scripted(), COMPLETIONS, {"prompt": "Hi", "logprobs": 2})).json()
    assert body["choices"][0]["logprobs"] == LEGACY
    assert body["choices"][0]["text"][6:] == "Hello"


async def test_offsets_go_on_over_the_chunks_of_a_completion() -> None:
    *chunks, last = await streamed(scripted(), COMPLETIONS, prompt="Hi", logprobs=2)
    assert last["logprobs"] is None
    for name, values in LEGACY.items():
        assert [value for chunk in chunks for value in chunk["logprobs"][name]] == values


async def test_choices_have_offsets_of_their_own() -> None:
    text = (await post(scripted(), COMPLETIONS, {"prompt": ["a", "b"], "logprobs": 0, "stream": True})).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: {")]
    for index in (0, 1):
        mine = [c for c in (json.loads(line)["choices"][0] for line in lines) if c["index"] == index]
        assert [n for c in mine if c["logprobs"] for n in c["logprobs"]["text_offset"]] == [0, 5, 5, 6]


@pytest.mark.parametrize(
    ("path", "fields", "n_logprobs"),
    [
        (CHAT, {}, None),
        (CHAT, {"logprobs": False}, None),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, None),
        (CHAT, {"logprobs": True}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": 0}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, 20),
        (COMPLETIONS, {}, None),
        (COMPLETIONS, {"logprobs": 0}, 0),
        (COMPLETIONS, {"logprobs": 20}, 20),
    ],
)
async def test_what_the_model_is_asked_for(path: str, fields: dict[str, Any], n_logprobs: int | None) -> None:
    service = FakeService()
    prompt = {"messages": user("Hi")} if path == CHAT else {"prompt": "Hi"}
    body = (await post(service, path, prompt | fields)).json()
    assert service.model.calls[-1][1].n_logprobs == n_logprobs
    assert (body["choices"][0]["logprobs"] is None) == (n_logprobs is None)


@pytest.mark.parametrize("value", [-1, 21, 1.5, "5", True])
async def test_a_wrong_number_for_a_completion_is_refused(value: Any) -> None:
    service = FakeService()
    assert_error(await post(service, COMPLETIONS, {"prompt": "Hi", "logprobs": value}), 400, param="logprobs")
    assert service.model.calls == []


async def test_an_answer_without_a_word_has_an_empty_list() -> None:
    service = FakeService(FakeTextModel([]))
    body = (await post(service, CHAT, {"messages": user("Hi"), "logprobs": True})).json()
    assert body["choices"][0]["logprobs"]["content"] == []


async def test_the_official_client_reads_both() -> None:
    async with (
        running(scripted()) as live,
        openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as caller,
    ):
        answer = await caller.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content or []
        assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == "Hello€Hello"
        assert content[0].top_logprobs[1].logprob == -9999.0
        text = await caller.completions.create(model="fake", prompt="Hi", logprobs=2)
        assert text.choices[0].logprobs is not None
        assert text.choices[0].logprobs.text_offset == [0, 5, 5, 6]
