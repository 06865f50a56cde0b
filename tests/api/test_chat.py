"""Chat requests: what is read, what is refused, what the model is asked, what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nemolocal.api.openai.figures import usage
from nemolocal.errors import TemplateError
from nemolocal.types import (
    Finish,
    GenerationParams,
    Message,
    SamplingParams,
    Timings,
    ToolCall,
    Usage,
)
from tests.api.serving import CHAT, COMPLETIONS, assert_error, chat, client, post, user
from tests.fakes import FakeService, FakeTextModel

pytestmark = pytest.mark.anyio

LONG = tuple(f"{index}, " for index in range(30))
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("a", "b")]


def asked(service: FakeService) -> tuple[tuple[Message, ...], GenerationParams]:
    messages, params = service.model.calls[-1]
    assert isinstance(messages, tuple)
    return messages, params  # type: ignore[return-value]


async def test_an_answer_has_openais_shape() -> None:
    response = await chat(FakeService(), model="fake")
    assert response.status_code == 200
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert isinstance(body["created"], int)
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_timings_stand_beside_the_usage() -> None:
    timings = (await chat(FakeService())).json()["timings"]
    assert (timings["prompt_n"], timings["prompt_ms"], timings["prompt_per_second"]) == (1, 10.0, 100.0)
    assert (timings["predicted_n"], timings["predicted_ms"], timings["predicted_per_second"]) == (
        3,
        20.0,
        150.0,
    )


async def test_what_was_cached_and_guessed_is_told() -> None:
    service = FakeService()
    service.model.cached_tokens, service.model.drafted_tokens, service.model.accepted_tokens = 2, 8, 5
    body = (await chat(service, messages=user("one two three"), n=2)).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert body["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 10,
        "rejected_prediction_tokens": 6,
    }
    assert (body["timings"]["draft_n"], body["timings"]["draft_n_accepted"]) == (16, 10)


async def test_where_nothing_was_guessed_nothing_is_told_of_it() -> None:
    assert "draft_n" not in (await chat(FakeService())).json()["timings"]


def test_a_prompt_that_one_choice_read_was_not_cached() -> None:
    """The choices of a prompt share what one of them read, whichever was first."""
    times = Timings(0.0, 0.0, 0.0)
    finishes = [Finish("stop", Usage(9, 1, cached_tokens=n), times) for n in (8, 4, 8, 0, 0, 0)]
    assert usage(finishes, n_per_prompt=3)["prompt_tokens_details"] == {"cached_tokens": 4}
    assert usage(finishes, n_per_prompt=3)["prompt_tokens"] == 18


async def test_no_fingerprint_promises_equal_texts() -> None:
    assert "system_fingerprint" not in (await chat(FakeService(), seed=1)).json()


@pytest.mark.parametrize(
    ("fields", "n_tokens"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 9}, 9),
        ({"max_tokens": 9, "max_completion_tokens": None}, 9),
        ({}, 30),
    ],
)
async def test_either_limit_on_length(fields: dict[str, Any], n_tokens: int) -> None:
    body = (await chat(FakeService(FakeTextModel(LONG)), **fields)).json()
    assert body["usage"]["completion_tokens"] == n_tokens
    assert body["choices"][0]["message"]["content"] == "".join(LONG[:n_tokens])
    assert body["choices"][0]["finish_reason"] == ("stop" if n_tokens == 30 else "length")


async def test_null_is_as_absent() -> None:
    names = (
        "model max_tokens max_completion_tokens stop top_p n seed logit_bias user tools tool_choice "
        "response_format stream_options stream temperature top_k min_p typical_p repeat_penalty logprobs "
        "presence_penalty frequency_penalty cache_prompt functions function_call top_logprobs audio "
        "repeat_last_n dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
        "xtc_probability xtc_threshold mirostat mirostat_tau mirostat_eta ignore_eos context_shift lora "
        "keep_alive"
    )
    plain, nulls = FakeService(), FakeService()
    await chat(plain)
    response = await chat(nulls, **dict.fromkeys(names.split()))
    assert response.status_code == 200
    assert nulls.model.calls == plain.model.calls


async def test_unknown_fields_are_ignored() -> None:
    service = FakeService()
    fields = {
        "store": True,
        "metadata": {"a": 1},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "foo": [1],
    }
    response = await chat(service, **fields)
    assert response.json()["choices"][0]["message"]["content"] == "Hello there."
    assert asked(service) == ((Message("user", "Hi"),), GenerationParams())


async def test_nulls_in_an_earlier_answer_are_ignored() -> None:
    service = FakeService()
    earlier = {"role": "assistant", "content": "Yes", "refusal": None, "audio": None, "function_call": None}
    await chat(service, messages=[*user("A"), earlier, *user("B")])
    assert asked(service)[0] == (Message("user", "A"), Message("assistant", "Yes"), Message("user", "B"))


# Content ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("What is 2+2?", "What is 2+2?"),
        ([{"type": "text", "text": "What is 2+2?"}], "What is 2+2?"),
        ([{"type": "text", "text": "What is"}, {"type": "text", "text": " 2+2?"}], "What is 2+2?"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        ([{"type": "text", "text": "one\n"}, {"type": "text", "text": "two"}], "one\ntwo"),
        ([], ""),
        ("", ""),
        ("a\x00b", "a\x00b"),
    ],
)
async def test_content_as_text_or_parts(content: Any, text: str) -> None:
    service = FakeService()
    response = await chat(service, messages=[{"role": "system", "content": content}, *user(content)])
    assert response.status_code == 200
    assert asked(service)[0] == (Message("system", text), Message("user", text))


@pytest.mark.parametrize(
    "content",
    [
        [{"text": "no type"}],
        [{"type": "text"}],
        [{"type": "text", "text": 5}],
        [{"type": "image_url", "image_url": {"url": "data:,"}}],
        ["text"],
        {"type": "text", "text": "not in a list"},
        5,
        None,
    ],
)
async def test_content_that_cannot_be_read_is_named(content: Any) -> None:
    assert_error(await chat(FakeService(), messages=user(content)), 400, param="messages[0].content")


async def test_the_message_at_fault_is_named() -> None:
    response = await chat(FakeService(), messages=[*user("fine"), {"role": "user"}])
    assert_error(response, 400, param="messages[1].content")


async def test_the_developer_is_the_system() -> None:
    service = FakeService()
    await chat(service, messages=[{"role": "developer", "content": "Be brief"}, *user("Hi")])
    assert asked(service)[0] == (Message("system", "Be brief"), Message("user", "Hi"))


async def test_an_unknown_role_is_named() -> None:
    response = await chat(FakeService(), messages=[{"role": "wizard", "content": "Hi"}])
    assert "wizard" not in assert_error(response, 400, param="messages[0].role")


async def test_a_tool_conversation_reaches_the_model_whole() -> None:
    service = FakeService()
    call = {"id": "c1", "type": "function", "function": {"name": "a", "arguments": '{"x":1}'}}
    await chat(
        service,
        messages=[
            {"role": "user", "content": "Do", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "content": "done", "tool_call_id": "c1"},
        ],
    )
    assert asked(service)[0] == (
        Message("user", "Do", name="ann"),
        Message("assistant", "", reasoning="hm", tool_calls=(ToolCall("c1", "a", '{"x":1}'),)),
        Message("tool", "done", tool_call_id="c1"),
    )


async def test_an_old_function_call_in_the_history_is_refused() -> None:
    message = {"role": "assistant", "content": None, "function_call": {"name": "a", "arguments": "{}"}}
    assert_error(await chat(FakeService(), messages=[message]), 400, param="messages[0].function_call")


# Sampling ---------------------------------------------------------------------------------------


async def test_every_sampling_field_reaches_the_model() -> None:
    service = FakeService()
    await chat(
        service,
        temperature=1,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        typical_p=0.9,
        repeat_penalty=1.1,
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        seed=3,
        logit_bias={"5": 1, "6": -100},
        stop="END",
        max_tokens=8,
        cache_prompt=False,
        repeat_last_n=-1,
        dry_multiplier=0.8,
        dry_base=2,
        dry_allowed_length=3,
        dry_penalty_last_n=128,
        dry_sequence_breakers=["\n", "。"],
        xtc_probability=0.5,
        xtc_threshold=0.2,
        mirostat=2,
        mirostat_tau=4,
        mirostat_eta=0.2,
        ignore_eos=True,
        context_shift=True,
        logprobs=True,
        top_logprobs=4,
        lora=[{"id": "style", "scale": 0.5}, {"id": 1}],
    )
    assert asked(service)[1] == GenerationParams(
        sampling=SamplingParams(
            temperature=1.0,
            top_p=0.5,
            top_k=7,
            min_p=0.1,
            typical_p=0.9,
            repeat_penalty=1.1,
            presence_penalty=-1.5,
            frequency_penalty=0.5,
            seed=3,
            logit_bias=((5, 1.0), (6, -100.0)),
            penalty_last_n=8192,
            dry_multiplier=0.8,
            dry_base=2.0,
            dry_allowed_length=3,
            dry_last_n=128,
            dry_breakers=("\n", "。"),
            xtc_probability=0.5,
            xtc_threshold=0.2,
            mirostat_tau=4.0,
            mirostat_eta=0.2,
            ignore_eos=True,
        ),
        max_tokens=8,
        stop=("END",),
        reuse_cache=False,
        n_logprobs=4,
        shift_context=True,
        adapters=(("style", 0.5), ("1", 1.0)),
    )


async def test_zero_is_a_value_and_not_the_default() -> None:
    service = FakeService()
    await chat(service, temperature=0, top_p=0, seed=0, top_k=0, min_p=0, presence_penalty=0)
    sampling = asked(service)[1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k, sampling.min_p) == (
        0,
        0,
        0,
        0,
        0,
    )


async def test_what_a_request_leaves_open_the_settings_say() -> None:
    service = FakeService(temperature=0.1, top_p=0.2, top_k=3, min_p=0.4)
    await chat(service)
    await chat(service, temperature=0.9)
    first, second = (params.sampling for _, params in service.model.calls)
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.1, 0.2, 3, 0.4)
    assert (second.temperature, second.top_p) == (0.9, 0.2)
    assert first.seed is None


@pytest.mark.parametrize(
    ("fields", "tau"),
    [
        ({}, 0.0),
        ({"mirostat": 0, "mirostat_tau": 3}, 0.0),
        ({"mirostat_tau": 3}, 0.0),
        ({"mirostat": 2}, 5.0),
        ({"mirostat": 2, "mirostat_tau": 3}, 3.0),
    ],
)
async def test_mirostat_is_on_only_where_it_was_asked_for(fields: dict[str, Any], tau: float) -> None:
    service = FakeService()
    await chat(service, **fields)
    assert asked(service)[1].sampling.mirostat_tau == tau


async def test_the_first_mirostat_is_refused_with_the_way_out() -> None:
    message = assert_error(
        await chat(FakeService(), mirostat=1), 400, param="mirostat", code="unsupported_parameter"
    )
    assert "Send 2" in message


@pytest.mark.parametrize(("value", "n"), [(None, 64), (0, 0), (7, 7), (-1, 512), (100_000, 512)])
async def test_a_penalty_looks_back_no_further_than_the_context(value: int | None, n: int) -> None:
    service = FakeService(FakeTextModel(n_ctx=512))
    await chat(service, repeat_last_n=value)
    assert asked(service)[1].sampling.penalty_last_n == n


async def test_no_adapter_and_none_named_are_told_apart() -> None:
    service = FakeService()
    for fields in ({}, {"lora": None}, {"lora": []}):
        await chat(service, **fields)
    assert [params.adapters for _, params in service.model.calls] == [None, None, ()]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0.0),
        (90, 90.0),
        (0.5, 0.5),
        ("0", 0.0),
        ("300", 300.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        (-1, -1.0),
        ("-1", -1.0),
        ("-1m", -1.0),
        (-0.5, -1.0),
    ],
)
async def test_how_long_the_model_stays_loaded(value: Any, seconds: float | None) -> None:
    service = FakeService()
    assert (await chat(service, keep_alive=value)).status_code == 200
    assert (await post(service, COMPLETIONS, {"prompt": "Hi", "keep_alive": value})).status_code == 200
    assert service.kept_alive_s == [seconds, seconds]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", -1),
        ("temperature", 2.5),
        ("temperature", 1e400),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("min_p", 2),
        ("typical_p", -1),
        ("top_k", 1.5),
        ("top_k", -2),
        ("repeat_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 5.5),
        ("max_completion_tokens", 0),
        ("n", 0),
        ("n", 1000),
        ("seed", "1"),
        ("seed", 1.5),
        ("seed", -2),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", ["x"] * 65),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"16439": 1000}),
        ("logit_bias", {"16439": "x"}),
        ("logit_bias", {"16439": None}),
        ("logit_bias", [1]),
        ("repeat_last_n", -2),
        ("repeat_last_n", 2**31),
        ("repeat_last_n", 1.5),
        ("dry_multiplier", -0.1),
        ("dry_multiplier", "1"),
        ("dry_base", 0.9),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -2),
        ("dry_penalty_last_n", 2**31),
        ("dry_sequence_breakers", "\n"),
        ("dry_sequence_breakers", [5]),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", ["a\0b"]),
        ("dry_sequence_breakers", ["€" * 14]),
        ("dry_sequence_breakers", ["x"] * 65),
        ("xtc_probability", 1.1),
        ("xtc_probability", -0.1),
        ("xtc_threshold", 2),
        ("mirostat", 3),
        ("mirostat", -1),
        ("mirostat", "2"),
        ("mirostat_tau", 0),
        ("mirostat_tau", -1),
        ("mirostat_eta", 1.5),
        ("ignore_eos", 1),
        ("context_shift", "yes"),
        ("logprobs", 1),
        ("top_logprobs", -1),
        ("top_logprobs", 21),
        ("top_logprobs", True),
        ("top_logprobs", 3),  # without logprobs
        ("lora", "style"),
        ("lora", [{"id": 0}, {"id": 0}]),
        ("lora", [{"id": n} for n in range(65)]),
        ("keep_alive", "soon"),
        ("keep_alive", "5 minutes"),
        ("keep_alive", ""),
        ("keep_alive", "m"),
        ("keep_alive", True),
        ("keep_alive", [5]),
        ("stream", "yes"),
        ("stream_options", 5),
        ("cache_prompt", "no"),
        ("model", 5),
        ("messages", {}),
        ("messages", []),
        ("messages", "Hi"),
        ("messages", None),
    ],
)
async def test_a_wrong_value_is_refused_by_its_fields_name(field: str, value: Any) -> None:
    service = FakeService()
    body = json.dumps({"messages": user("Hi")} | {field: value}).replace("Infinity", "1e400")
    async with client(service) as caller:
        response = await caller.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert_error(response, 400, param=field)
    assert service.model.calls == []


@pytest.mark.parametrize(
    ("entry", "place"),
    [
        ({}, ".id"),
        ({"id": -1}, ".id"),
        ({"id": ""}, ".id"),
        ({"id": 1.5}, ".id"),
        ({"id": True}, ".id"),
        ({"id": 0, "scale": "1"}, ".scale"),
        (5, ""),
    ],
)
async def test_an_adapter_that_cannot_be_read_is_named(entry: Any, place: str) -> None:
    response = await chat(FakeService(), lora=[{"id": 1, "scale": 1}, entry])
    assert_error(response, 400, param=f"lora[1]{place}")


async def test_a_list_of_stops_and_empty_ones() -> None:
    service = FakeService()
    for stop in (["a", "b"], ["", "a"], "", [], "x" * 500):
        await chat(service, stop=stop)
    assert [params.stop for _, params in service.model.calls] == [("a", "b"), ("a",), (), (), ("x" * 500,)]


async def test_a_seed_of_minus_one_means_any() -> None:
    service = FakeService()
    await chat(service, seed=-1)
    assert asked(service)[1].sampling.seed is None


@pytest.mark.parametrize(("value", "reuses"), [(True, True), (False, False), (None, None)])
async def test_the_prompt_cache_can_be_asked_for(value: bool | None, reuses: bool | None) -> None:
    service = FakeService()
    await chat(service, cache_prompt=value)
    assert asked(service)[1].reuse_cache is reuses


# Several choices --------------------------------------------------------------------------------


async def test_several_choices_with_a_seed_each() -> None:
    service = FakeService()
    body = (await chat(service, n=3, seed=10, messages=user("one two"))).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [params.sampling.seed for _, params in service.model.calls] == [10, 11, 12]
    assert body["usage"]["prompt_tokens"] == 2  # one prompt, whatever is made of it
    assert body["usage"]["completion_tokens"] == 9


async def test_choices_run_side_by_side() -> None:
    service = FakeService()
    n_running, most = 0, 0

    class Counting(FakeTextModel):
        async def _stream(self, n_prompt: int, params: GenerationParams) -> Any:
            nonlocal n_running, most
            n_running += 1
            most = max(most, n_running)
            try:
                async for item in super()._stream(n_prompt, params):
                    yield item
            finally:
                n_running -= 1

    service.model = Counting()
    service.model.delay_s = 0.001
    await chat(service, n=8)
    assert (most, n_running) == (8, 0)


async def test_one_choice_that_fails_fails_the_answer_and_ends_the_others() -> None:
    service = FakeService()

    class Uneven(FakeTextModel):
        async def _stream(self, n_prompt: int, params: GenerationParams) -> Any:
            if params.sampling.seed == 1:
                raise TemplateError("The template refuses.")
            async for item in super()._stream(n_prompt, params):
                yield item

    service.model = Uneven()
    service.model.delay_s = 5.0
    assert_error(await chat(service, n=3, seed=0), 400, param="messages", code="template_error")
    assert service.model.n_closed_early == 2


# What this version does not serve ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "a"}}}, "tools"),
        ({"functions": [{"name": "a"}]}, "functions"),
        ({"function_call": {"name": "a"}}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": {}}}},
            "response_format",
        ),
        ({"mirostat": 1}, "mirostat"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ],
)
async def test_a_field_that_would_change_the_answer_is_not_dropped(
    fields: dict[str, Any], param: str
) -> None:
    service = FakeService()
    for stream in (False, True):
        assert_error(
            await chat(service, stream=stream, **fields), 400, param=param, code="unsupported_parameter"
        )
    assert service.model.calls == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "zzz"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "banana"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "a"}}}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tools": "a"}, "tools"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
    ],
)
async def test_a_wrong_form_is_named(fields: dict[str, Any], param: str) -> None:
    response = await chat(FakeService(), **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in (param, f"{param}.type")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"logprobs": False},
        {"top_logprobs": 0},
        {"functions": [], "function_call": "none"},
        {"chat_template_kwargs": {}},
    ],
)
async def test_a_field_that_changes_nothing_is_fine(fields: dict[str, Any]) -> None:
    response = await chat(FakeService(), **fields)
    assert response.json()["choices"][0]["message"]["content"] == "Hello there."


async def test_the_models_own_refusal_of_messages_is_told() -> None:
    service = FakeService()
    service.model.refusal = TemplateError("The chat template says: roles must alternate.")
    message = assert_error(
        await post(service, CHAT, {"messages": user("Hi")}), 400, param="messages", code="template_error"
    )
    assert "roles must alternate" in message
