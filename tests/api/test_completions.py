"""Raw completions: forms of the prompt, several prompts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.serving import COMPLETIONS, assert_error, post
from tests.fakes import FakeService, FakeTextModel

pytestmark = pytest.mark.anyio


async def complete(service: FakeService, **fields: Any) -> Any:
    return await post(service, COMPLETIONS, {"prompt": "1, 2, 3"} | fields)


async def test_an_answer_has_openais_shape() -> None:
    body = (await complete(FakeService(), max_tokens=2)).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "Hello there", "logprobs": None, "finish_reason": "length"}
    ]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 2)
    assert body["timings"]["predicted_n"] == 2


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", ["one"]),
        ("", [""]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
async def test_forms_of_the_prompt(prompt: Any, prompts: list[Any]) -> None:
    service = FakeService()
    response = await complete(service, prompt=prompt)
    assert response.status_code == 200
    assert [asked for asked, _ in service.model.calls] == prompts
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(len(prompts)))


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], 5, {}, ["a", 1], [1, "a"], [[1], "a"], [-1], [1.5], [[1, "a"]], [True], [None]]
)
async def test_a_prompt_that_cannot_be_read_is_refused(prompt: Any) -> None:
    assert_error(await complete(FakeService(), prompt=prompt), 400, param="prompt")


async def test_a_prompt_is_needed() -> None:
    assert_error(await post(FakeService(), COMPLETIONS, {"max_tokens": 1}), 400, param="prompt")


async def test_choices_count_on_over_prompts() -> None:
    service = FakeService()
    body = (await complete(service, prompt=["a", "b c"], n=2, seed=5)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [asked for asked, _ in service.model.calls] == ["a", "a", "b c", "b c"]
    assert [params.sampling.seed for _, params in service.model.calls] == [5, 6, 5, 6]
    assert body["usage"]["prompt_tokens"] == 3


async def test_more_answers_than_one_request_may_ask_for() -> None:
    service = FakeService()
    assert_error(await complete(service, prompt=["a"] * 65, n=2), 400, param="prompt")
    assert service.model.calls == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "\n\nprint(add(1, 2))"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"mirostat": 1}, "mirostat"),
    ],
)
async def test_a_field_that_would_change_the_answer_is_not_dropped(
    fields: dict[str, Any], param: str
) -> None:
    assert_error(await complete(FakeService(), **fields), 400, param=param, code="unsupported_parameter")


async def test_a_suffix_is_refused_for_what_the_model_lacks() -> None:
    response = await complete(FakeService(), suffix="x")
    assert "no fill-in-the-middle support" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": ""},
        {"suffix": None},
        {"echo": False},
        {"best_of": 2, "n": 2},
        {"logprobs": None},
        {"logprobs": False},
    ],
)
async def test_a_field_that_changes_nothing_is_fine(fields: dict[str, Any]) -> None:
    assert (await complete(FakeService(), **fields)).json()["choices"][0]["text"] == "Hello there."


async def test_a_prompt_beyond_the_context_names_the_prompt() -> None:
    service = FakeService(FakeTextModel(n_ctx=8))
    for stream in (False, True):
        response = await complete(service, prompt="word " * 20, stream=stream)
        message = assert_error(response, 400, param="prompt", code="context_length_exceeded")
        assert "20" in message
        assert "8" in message
