"""`/v1/embeddings`: what goes in, what comes out, and what is refused by name."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import httpx
import pytest

from nemolocal.errors import BusyError, EngineDiedError, InputLengthError, InvalidRequestError
from tests.api.serving import assert_error, client, connected, post, raw_post, running, until
from tests.fakes import FakeService

pytestmark = pytest.mark.anyio

EMBEDDINGS = "/v1/embeddings"


async def embed(service: FakeService, value: Any, **fields: Any) -> httpx.Response:
    return await post(service, EMBEDDINGS, {"input": value} | fields)


async def test_the_answer_has_openai_s_shape() -> None:
    response = await embed(FakeService(), ["abc", "a"], user="someone")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert {key: body[key] for key in ("object", "model", "usage")} == {
        "object": "list",
        "model": "fake-embedder",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    assert [(each["object"], each["index"]) for each in body["data"]] == [("embedding", 0), ("embedding", 1)]
    assert body["data"][0]["embedding"] == pytest.approx([0.75, 7**0.5 / 4, 0, 0])
    assert body["data"][1]["embedding"] == pytest.approx([0.5, 3**0.5 / 2, 0, 0])


async def test_base64_is_the_same_numbers_as_little_endian_floats() -> None:
    plain, encoded, default = [
        (await embed(FakeService(), "abc", **fields)).json()["data"][0]["embedding"]
        for fields in ({"encoding_format": "float"}, {"encoding_format": "base64"}, {})
    ]
    assert plain == default
    raw = base64.b64decode(encoded, validate=True)
    assert len(raw) == 4 * len(plain)
    assert list(struct.unpack("<4f", raw)) == plain


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        (["x"] * 2048, ["x"] * 2048),
    ],
)
async def test_every_form_of_input_is_taken(value: Any, inputs: list[Any]) -> None:
    service = FakeService()
    response = await embed(service, value)
    assert response.status_code == 200
    assert len(response.json()["data"]) == len(inputs)
    assert service.embedder.calls == [(inputs, None)]


@pytest.mark.parametrize(
    "value",
    [
        "",
        [],
        [""],
        ["a", ""],
        [[]],
        [1, "a"],
        ["a", [1]],
        [[1], 2],
        [-1],
        [1.5],
        [True],
        None,
        {},
        7,
        ["x"] * 2049,
    ],
)
async def test_what_is_no_input_is_refused(value: Any) -> None:
    service = FakeService()
    assert_error(await embed(service, value), 400, param="input")
    assert service.embedder.calls == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"encoding_format": 7}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "64"}, "dimensions"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"model": 5}, "model"),
    ],
)
async def test_a_field_of_no_sense_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    message = assert_error(await embed(FakeService(), "a", **fields), 400, param=param)
    assert message.startswith(param)


async def test_the_input_is_needed() -> None:
    assert_error(await post(FakeService(), EMBEDDINGS, {"model": "fake-embedder"}), 400, param="input")


async def test_nulls_are_as_absent_and_wishes_reach_the_model() -> None:
    service = FakeService()
    nulls = {"encoding_format": None, "dimensions": None, "keep_alive": None, "model": None}
    assert (await embed(service, "a", **nulls)).status_code == 200
    assert (await embed(service, "a", dimensions=64, keep_alive="5m")).status_code == 200
    assert [n_dimensions for _, n_dimensions in service.embedder.calls] == [None, 64]
    assert service.kept_alive_s == [None, 300.0]


async def test_an_unknown_model_is_not_found() -> None:
    response = await embed(FakeService(), "a", model="text-embedding-3-small")
    assert_error(response, 404, param="model", code="model_not_found")


@pytest.mark.parametrize(("value", "at", "param"), [("a", 0, "input"), (["a", "b"], 1, "input[1]")])
async def test_an_input_that_is_too_long_is_named_with_both_counts(value: Any, at: int, param: str) -> None:
    service = FakeService()
    service.embedder.error = InputLengthError(param=f"input[{at}]", n_prompt=700, n_ctx=512)
    message = assert_error(await embed(service, value), 400, param=param, code="context_length_exceeded")
    assert "700" in message
    assert "512" in message


async def test_errors_of_the_model_have_their_status() -> None:
    service = FakeService()
    service.embedder.error = BusyError("512 requests are waiting already.", retry_after_s=5)
    response = await embed(service, "a")
    assert_error(response, 429, code="queue_full")
    assert response.headers["retry-after"] == "5"
    service.embedder.error = EngineDiedError("The engine's process ended.")
    assert_error(await embed(service, "a"), 503, code="engine_died")
    service.embedder.error = InvalidRequestError("dimensions: no.", param="dimensions")
    assert_error(await embed(service, "a", dimensions=3), 400, param="dimensions")


async def test_a_client_that_goes_away_ends_its_request() -> None:
    service = FakeService()
    service.embedder.delay_s = 60.0
    async with running(service) as live, connected(live) as (_, writer):
        writer.write(raw_post(EMBEDDINGS, {"input": "a"}))
        await writer.drain()
        await until(lambda: bool(service.embedder.calls))
        writer.close()
        await until(lambda: service.embedder.n_closed_early == 1)


async def test_many_at_once_each_get_their_own() -> None:
    service = FakeService()
    async with client(service) as caller:
        answers = await asyncio.gather(
            *(caller.post(EMBEDDINGS, json={"input": "x" * n}) for n in range(1, 30))
        )
    for n, answer in enumerate(answers, 1):
        assert answer.json()["data"][0]["embedding"][0] == pytest.approx(n / (1 + n))
