"""What requests say, on the starter model: seeds, zeros, biases, limits, and the fields beside them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.serving import CHAT, assert_error, user
from tests.real_server import Server, starter_server

pytestmark = [pytest.mark.model, pytest.mark.anyio]

FLAGS = ("--slots", "4", "--ctx", "2048")
WORD = "Tell me a random word"
COUNT = "Count from 1 to 12, numbers only, separated by commas."
REPEAT = "Repeat exactly: one two three four five six seven eight"
GAMMA = "16439"  # the token " gamma"


@pytest.fixture(scope="module")
def server(starter_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with starter_server(starter_path, tmp_path_factory.mktemp("home"), *FLAGS) as started:
        yield started


@pytest.fixture
async def caller(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as made:
        yield made


async def ask(caller: httpx.AsyncClient, text: str, **fields: Any) -> Any:
    response = await caller.post(CHAT, json={"messages": user(text), "temperature": 0} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def say(caller: httpx.AsyncClient, text: str, **fields: Any) -> str:
    content: str = (await ask(caller, text, **fields))["choices"][0]["message"]["content"]
    return content


# Seeds and zeros ----------------------------------------------------------------------------------


async def test_a_seed_decides_the_text(caller: httpx.AsyncClient, starter_path: Path, tmp_path: Path) -> None:
    """Again, after another request, and in another process; other seeds and no seed give other texts."""
    how = {"temperature": 1.0, "max_tokens": 12}
    first = await ask(caller, WORD, seed=1, **how)
    assert "system_fingerprint" not in first
    texts = [first["choices"][0]["message"]["content"], await say(caller, WORD, seed=1, **how)]
    await say(caller, "An unrelated tale. " + "word " * 500, max_tokens=2)
    texts.append(await say(caller, WORD, seed=1, **how))
    with starter_server(starter_path, tmp_path, *FLAGS) as other:
        async with httpx.AsyncClient(base_url=other.url, timeout=120) as elsewhere:
            texts.append(await say(elsewhere, WORD, seed=1, **how))
    assert texts == [texts[0]] * 4
    assert len({await say(caller, WORD, seed=seed, **how) for seed in range(2, 6)} | set(texts)) >= 2
    assert len({await say(caller, WORD, **how) for _ in range(5)}) >= 2


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 1, "seed": 0}, {"temperature": 1, "top_p": 0}]
)
async def test_zero_is_a_value(caller: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    how = {"max_tokens": 12, "cache_prompt": False} | fields
    texts = [await say(caller, WORD, **how) for _ in range(3)]
    assert texts == [texts[0]] * 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("max_tokens", -5), ("temperature", -1), ("temperature", 2.5), ("top_p", 1.5)],
)
async def test_what_is_out_of_range_is_refused(caller: httpx.AsyncClient, field: str, value: float) -> None:
    body = {"messages": user(WORD), "max_tokens": 12} | {field: value}
    assert_error(await caller.post(CHAT, json=body), 400, param=field)


async def test_biases_by_the_ids_as_strings(caller: httpx.AsyncClient) -> None:
    how = {"max_tokens": 3, "cache_prompt": False}
    plain = await say(caller, "Say hello", **how)
    assert (await say(caller, "Say hello", logit_bias={GAMMA: 100}, **how)).strip() == "gamma gamma gamma"
    for nothing in (None, {}):
        assert await say(caller, "Say hello", logit_bias=nothing, **how) == plain
    for bad in ({"abc": 1}, {"999999": 1}, {GAMMA: 1000}, {GAMMA: "x"}):
        body = {"messages": user("Say hello"), "logit_bias": bad} | how
        assert_error(await caller.post(CHAT, json=body), 400, param="logit_bias")
    how = {"max_tokens": 24, "cache_prompt": False}
    unbiased = await say(caller, REPEAT, **how)
    assert await say(caller, REPEAT, logit_bias={GAMMA: -100}, **how) == unbiased


# Limits and what may be there -----------------------------------------------------------------------


async def test_either_limit_and_none(caller: httpx.AsyncClient) -> None:
    cut = await ask(caller, COUNT, max_completion_tokens=5)
    assert (cut["usage"]["completion_tokens"], cut["choices"][0]["finish_reason"]) == (5, "length")
    assert cut["choices"][0]["message"]["content"].rstrip(", ") == "1, 2"
    both = await ask(caller, COUNT, max_tokens=9, max_completion_tokens=5)
    assert both["usage"]["completion_tokens"] == 5
    names = "max_tokens stop top_p n seed logit_bias user tools tool_choice response_format stream_options"
    for fields in ({}, dict.fromkeys(names.split())):
        body = {"messages": user(COUNT), "temperature": 0, "stream": True} | fields
        async with caller.stream("POST", CHAT, json=body) as answer:
            said = [line async for line in _first(answer.aiter_lines(), 40)]
        assert sum('"content":' in line for line in said) > 16, "it ended by itself"
        assert not any('"length"' in line for line in said)


async def _first(lines: AsyncIterator[str], n: int) -> AsyncIterator[str]:
    async for line in lines:
        yield line
        n -= 1
        if not n:
            return


async def test_fields_that_mean_nothing_here_change_nothing(caller: httpx.AsyncClient) -> None:
    how = {"max_tokens": 24, "cache_prompt": False}
    plain = await say(caller, COUNT, **how)
    others = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "foo": 1,
    }
    assert await say(caller, COUNT, **others, **how) == plain
    history = [*user("Hi"), {"role": "assistant", "content": "Hello!"}, *user(COUNT)]
    nulls = [history[0], history[1] | {"refusal": None, "audio": None, "function_call": None}, history[2]]
    texts = [await say(caller, "", messages=messages, **how) for messages in (history, nulls)]
    assert texts[0] == texts[1]


# What is counted -------------------------------------------------------------------------------------


async def test_the_metrics_count_what_was_done(caller: httpx.AsyncClient) -> None:
    async def figure(name: str) -> float:
        lines = (await caller.get("/metrics")).text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith(f'nemolocal_{name}{{model="starter"}}')
        )

    before = [await figure(name) for name in ("requests_total", "tokens_predicted_total")]
    answer = await ask(caller, "Hi", max_tokens=4)
    after = [await figure(name) for name in ("requests_total", "tokens_predicted_total")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, answer["usage"]["completion_tokens"]]
    again = (await ask(caller, "Hi", max_tokens=4))["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] > 0
    assert await figure("prompt_tokens_cached_total") > 0
