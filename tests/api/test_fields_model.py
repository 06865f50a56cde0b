"""What requests say, on the starter model: seeds, zeros, biases, limits, and the fields beside them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import llama_cpp
import numpy as np
import openai
import pytest

from tests.api.serving import CHAT, COMPLETIONS, assert_error, user
from tests.real_server import Server, starter_server

pytestmark = [pytest.mark.model, pytest.mark.anyio]

FLAGS = ("--slots", "4", "--ctx", "1024", "--threads", "1")  # one: fast beside other work too
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
    texts = [await say(caller, WORD, max_tokens=12, **fields) for _ in range(5)]
    assert texts == [texts[0]] * 5


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


# The engine's further abilities ---------------------------------------------------------------------


async def test_probabilities_are_the_models_own(caller: httpx.AsyncClient, starter_path: Path) -> None:
    """Whatever the temperature and the filters; checked against a plain evaluation of the same text."""
    prompt, n = "The capital of France is", 6
    body = {"prompt": prompt, "max_tokens": n, "logprobs": 3, "seed": 3, "temperature": 1.5, "top_k": 5}
    answer = (await caller.post(COMPLETIONS, json=body)).json()["choices"][0]
    told = answer["logprobs"]
    assert len(told["tokens"]) == n
    assert "".join(told["tokens"]) == answer["text"]
    assert [
        answer["text"].find(token, at) for token, at in zip(told["tokens"], told["text_offset"], strict=True)
    ] == (told["text_offset"])
    model = llama_cpp.Llama(str(starter_path), n_ctx=128, flash_attn=True, verbose=False, n_threads=2)
    tokens = model.tokenize(prompt.encode(), add_bos=False)
    for token, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        model.reset()
        model.eval(tokens)
        logits = np.ctypeslib.as_array(model._ctx.get_logits(), (model.n_vocab(),)).astype(np.float64)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        (said,) = model.tokenize(token.encode(), add_bos=False)
        assert math.isclose(logprobs[said], logprob, abs_tol=0.05)
        assert math.isclose(logprobs.max(), max(top.values()), abs_tol=0.05)
        assert 3 <= len(top) <= 4
        tokens.append(said)


async def test_probabilities_of_a_streamed_chat(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        ask = client.chat.completions.create
        how: dict[str, Any] = {
            "model": "starter",
            "messages": user(COUNT),
            "temperature": 0,
            "max_tokens": 12,
        }
        stream = await ask(**how, logprobs=True, top_logprobs=2, stream=True)
        text, entries = "", []
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                entries += choice.logprobs.content or [] if choice.logprobs else []
        whole = (await ask(**how, logprobs=True, top_logprobs=2)).choices[0]
    assert len(entries) == 12
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == text
    assert all(entry.top_logprobs[0].bytes == entry.bytes for entry in entries)  # greedy says the likeliest
    assert [entry.token for entry in whole.logprobs.content] == [entry.token for entry in entries]


async def test_an_answer_that_may_not_end(caller: httpx.AsyncClient) -> None:
    how = {"logit_bias": {"2": 100}, "max_tokens": 5}  # the end is the likeliest token by far
    assert (await ask(caller, COUNT, **how))["choices"][0]["finish_reason"] == "stop"
    went_on = await ask(caller, COUNT, ignore_eos=True, **how)
    assert (went_on["usage"]["completion_tokens"], went_on["choices"][0]["finish_reason"]) == (5, "length")


async def test_dry_ends_a_repetition(caller: httpx.AsyncClient) -> None:
    async def repeats(**fields: Any) -> bool:
        body = {"prompt": "a b c d " * 4 + "a b", "max_tokens": 6, "temperature": 0} | fields
        text: str = (await caller.post(COMPLETIONS, json=body)).json()["choices"][0]["text"]
        return text == " c d a b c d"

    strong = {"dry_multiplier": 4, "dry_allowed_length": 1}
    assert await repeats()
    assert not await repeats(**strong)
    assert await repeats(**strong, dry_penalty_last_n=0)
    assert await repeats(**strong, dry_sequence_breakers=[" a", " b", " c", " d"])


async def test_an_adapter_that_is_not_loaded_is_named(caller: httpx.AsyncClient) -> None:
    for stream in (False, True):
        body = {"messages": user("Hi"), "lora": [{"id": "style"}], "max_tokens": 2, "stream": stream}
        assert "'style'" in assert_error(await caller.post(CHAT, json=body), 400, param="lora")
    assert await say(caller, "Hi", lora=[], max_tokens=2)


@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": 2},
        {"mirostat": 2, "mirostat_tau": 2, "mirostat_eta": 0.5},
        {"xtc_probability": 1, "xtc_threshold": 0.05},
        {"dry_multiplier": 0.8, "dry_penalty_last_n": -1},
        {"repeat_penalty": 1.3, "repeat_last_n": -1},
        {"typical_p": 0.5, "keep_alive": "5m"},
    ],
)
async def test_each_way_of_sampling_answers_and_obeys_its_seed(
    caller: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    how = {"temperature": 0.9, "seed": 7, "max_tokens": 16} | fields
    first = await say(caller, WORD, **how)
    assert first
    assert await say(caller, WORD, **how) == first


async def test_excluding_the_top_choices_shuns_the_likeliest(caller: httpx.AsyncClient) -> None:
    how = {"temperature": 1, "seed": 1, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}

    async def is_likeliest(**fields: Any) -> bool:
        entry = (await ask(caller, "Hello", **how, **fields))["choices"][0]["logprobs"]["content"][0]
        return bool(entry["bytes"] == entry["top_logprobs"][0]["bytes"])

    assert await is_likeliest(top_k=1)
    assert not await is_likeliest(xtc_probability=1, xtc_threshold=0.001)


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


async def test_a_full_context_is_gone_past_only_where_it_was_asked_for(
    starter_path: Path, tmp_path: Path
) -> None:
    with starter_server(starter_path, tmp_path, "--slots", "1", "--ctx", "256", "--threads", "1") as small:
        async with httpx.AsyncClient(base_url=small.url, timeout=120) as caller:
            how = {"ignore_eos": True, "max_tokens": 260}
            cut = await ask(caller, COUNT, **how)
            assert cut["usage"]["total_tokens"] == 256
            assert cut["choices"][0]["finish_reason"] == "length"
            shifted = await ask(caller, COUNT, context_shift=True, **how)
            assert shifted["usage"]["completion_tokens"] == 260
