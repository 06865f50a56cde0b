"""Faults of all kinds: one shape, the right status, nothing of the request or the program in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nemolocal import errors
from nemolocal.api.body import MAX_BODY_BYTES
from nemolocal.api.errors import FAULTS, fault_of
from tests.api.serving import CHAT, COMPLETIONS, assert_error, chat, client, running, user
from tests.fakes import FakeService, FakeTextModel

pytestmark = pytest.mark.anyio

JSON = {"Content-Type": "application/json"}
SECRET = "xyzzy-secret"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1,2",
        b"null",
        b'"hi"',
        b"[]",
        b"{'messages': 1}",
        b'{"messages": [{"role": "user", "content": "xyzzy-secret \xff"}]}',
        b'{"messages": [{"role": "user", "content": "xyzzy-secret \\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "xyzzy-secret"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "xyzzy-secret"}], "foo": Infinity}',
        b'{"messages": [{"role": "user", "content": "xyzzy-secret"}], "seed": ' + b"9" * 5000 + b"}",
        b"[" * 10_000,
        b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"\x1f\x8b\x08garbage",
        '{"messages": []}'.encode("utf-16"),
    ],
)
async def test_a_body_that_is_no_request(body: bytes) -> None:
    service = FakeService()
    async with client(service) as caller:
        for path in (CHAT, COMPLETIONS):
            response = await caller.post(path, content=body, headers=JSON)
            message = assert_error(response, 400)
            assert SECRET not in message
        assert service.model.calls == []
        response = await caller.post(CHAT, json={"messages": user("Hi")})
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [([{}], "messages[0].role"), ([{"role": "user"}], "messages[0].content"), ([5], "messages[0]")],
)
async def test_a_message_that_is_none(messages: Any, param: str) -> None:
    assert_error(await chat(FakeService(), messages=messages), 400, param=param)


async def test_a_byte_order_mark_is_no_fault() -> None:
    body = b"\xef\xbb\xbf" + json.dumps({"messages": user("Hi")}).encode()
    async with client(FakeService()) as caller:
        assert (await caller.post(CHAT, content=body, headers=JSON)).status_code == 200


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json", None],
)
async def test_a_body_that_is_not_declared_as_json(content_type: str | None) -> None:
    service = FakeService()
    headers = {"Content-Type": content_type} if content_type else {}
    async with client(service) as caller:
        response = await caller.post(CHAT, content=json.dumps({"messages": user("Hi")}), headers=headers)
    assert_error(response, 415, code="unsupported_media_type")
    assert service.model.calls == []


async def test_a_charset_beside_the_content_type_is_fine() -> None:
    async with client(FakeService()) as caller:
        response = await caller.post(
            CHAT,
            content=json.dumps({"messages": user("Hi")}),
            headers={"Content-Type": "Application/JSON; charset=utf-8"},
        )
    assert response.status_code == 200


async def test_a_compressed_body_is_refused() -> None:
    async with client(FakeService()) as caller:
        response = await caller.post(CHAT, content=b"\x1f\x8bxx", headers=JSON | {"Content-Encoding": "gzip"})
    assert_error(response, 415, code="unsupported_encoding")


async def test_a_body_that_is_too_large() -> None:
    service = FakeService()
    content = b'{"messages": [{"role": "user", "content": "' + b"word " * (MAX_BODY_BYTES // 5 + 1) + b'"}]}'

    async def in_pieces() -> Any:
        for start in range(0, len(content), 1 << 20):
            yield content[start : start + (1 << 20)]

    async with running(service) as live:
        import httpx

        async with httpx.AsyncClient(base_url=live.url) as caller:
            for body in (content, in_pieces()):
                response = await caller.post(CHAT, content=body, headers=JSON)
                assert_error(response, 413, code="request_too_large")
            assert (await caller.post(CHAT, json={"messages": user("Hi")})).status_code == 200
    assert len(service.model.calls) == 1


async def test_an_unknown_model() -> None:
    for path, body in ((CHAT, {"messages": user("Hi")}), (COMPLETIONS, {"prompt": "Hi"})):
        async with client(FakeService()) as caller:
            response = await caller.post(path, json=body | {"model": "nope\nnope\x00"})
        message = assert_error(response, 404, param="model", code="model_not_found")
        assert "\n" not in message


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nope", 404, "unknown_route"),
        ("POST", "/v1/chat/completion", 404, "unknown_route"),
        ("GET", "/v1", 404, "unknown_route"),
        ("GET", "/v1/models/", 404, None),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
async def test_routes_and_methods_that_are_not_there(
    method: str, path: str, status: int, code: str | None
) -> None:
    async with client(FakeService()) as caller:
        response = await caller.request(method, path, headers=JSON)
    if code:
        assert_error(response, status, code=code)
    assert response.status_code == status
    assert ("allow" in response.headers) == (status == 405)


async def test_a_prompt_beyond_the_context_is_told_with_both_counts() -> None:
    service = FakeService()
    cases = [(9000, False), (9000, True), (8192, False), (8192, True)]
    for n_words, stream in cases * 2:
        response = await chat(service, messages=user("word " * n_words), stream=stream, temperature=0)
        message = assert_error(response, 400, param="messages", code="context_length_exceeded")
        assert str(n_words) in message
        assert "8192" in message
    history = [*user("word " * 9000), {"role": "assistant", "content": "Yes"}, *user("Hi")]
    assert_error(await chat(service, messages=history), 400, param="messages", code="context_length_exceeded")
    assert (await chat(service)).status_code == 200


async def test_a_prompt_that_just_fits_gets_one_token() -> None:
    body = (await chat(FakeService(), messages=user("word " * 8191))).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


async def test_a_limit_beyond_the_context_is_fine() -> None:
    assert (await chat(FakeService(FakeTextModel()), max_tokens=100_000)).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidRequestError("No such token.", param="logit_bias"), 400, None),
        (errors.BusyError("The queue is full.", retry_after_s=7), 429, "queue_full"),
        (errors.EngineDiedError("The engine's process ended."), 503, "engine_died"),
        (errors.EngineGaveUpError("It failed three times.", retry_after_s=7), 503, "engine_gave_up"),
        (errors.EngineError("The model could not be loaded."), 500, "engine_error"),
        (errors.ModelFileError("It is cut off.", kind="truncated"), 500, "model_file_error"),
        (errors.DoesNotFitError("Too large.", needed_bytes=2, available_bytes=1), 503, "does_not_fit"),
        (errors.ConfigError("There is no hardware profile."), 500, None),
        (errors.NemoLocalError("Something else."), 500, None),
    ],
)
async def test_what_the_model_raises_becomes_a_status(
    error: Exception, status: int, code: str | None
) -> None:
    service = FakeService()
    service.model.refusal = error
    for stream in (False, True):
        response = await chat(service, stream=stream)
        message = assert_error(response, status, param=getattr(error, "param", None), code=code)
        assert message == str(error)
        assert response.headers.get("retry-after") == ("7" if hasattr(error, "retry_after_s") else None)


async def test_a_fault_of_our_own_shows_nothing_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService()
    service.model.refusal = ValueError(SECRET)
    for stream in (False, True):
        response = await chat(service, stream=stream)
        assert SECRET not in assert_error(response, 500, code="internal_error")
    assert SECRET in caplog.text


async def test_a_failure_amid_an_answer_that_is_not_streamed() -> None:
    service = FakeService()
    service.model.error = errors.EngineDiedError("The engine's process ended.")
    assert_error(await chat(service), 503, code="engine_died")


def test_every_class_of_error_has_an_entry_that_is_its_own_or_its_parents() -> None:
    def tree(kind: type[errors.NemoLocalError]) -> Any:
        yield kind
        for child in kind.__subclasses__():
            yield from tree(child)

    for kind in tree(errors.NemoLocalError):
        error = kind.__new__(kind)
        if kind.__module__ == "nemolocal.errors":
            assert fault_of(error) in FAULTS.values()
            is_request = issubclass(kind, errors.InvalidRequestError | errors.UsageError)
            is_request &= kind is not errors.ConfigError  # the settings are the server's own
            assert (fault_of(error).status == 400) == is_request


def test_what_happened_and_how_to_mend_it_are_two_sentences() -> None:
    """Where the first is a library's own words, it may end without a full stop."""
    assert str(errors.EngineError("arch mismatch", hint="Take another.")) == "arch mismatch. Take another."
    assert str(errors.EngineError("It failed.", hint="Take another.")) == "It failed. Take another."
    assert str(errors.EngineError("arch mismatch")) == "arch mismatch"
