"""`/v1/rerank`: documents in the order of their scores."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from nemolocal.errors import InputLengthError
from tests.api.serving import assert_error, post
from tests.fakes import FakeService

pytestmark = pytest.mark.anyio

DOCUMENTS = ["cold tea", "a red fox", "the fox is red and quick", "red tea"]


async def rerank(service: FakeService, **fields: Any) -> httpx.Response:
    return await post(service, "/v1/rerank", {"query": "quick red fox", "documents": DOCUMENTS} | fields)


async def test_the_best_document_comes_first() -> None:
    response = await rerank(FakeService())
    assert response.status_code == 200
    body = response.json()
    assert set(body) == {"id", "object", "model", "results", "usage"}
    assert body["model"] == "fake-embedder"
    assert [result["index"] for result in body["results"]] == [2, 1, 3, 0]
    assert [set(result) for result in body["results"]] == [{"index", "relevance_score"}] * 4
    assert [result["relevance_score"] for result in body["results"]] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    n_tokens = sum(13 + len(document) for document in DOCUMENTS)
    assert body["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}


async def test_equal_documents_keep_their_order() -> None:
    results = (await rerank(FakeService(), documents=["x", "red", "y", "red"])).json()["results"]
    assert [result["index"] for result in results] == [1, 3, 0, 2]


async def test_only_the_best_are_told_with_their_texts() -> None:
    documents = ["tea", {"text": "a red fox", "source": "book"}, "red"]
    response = await rerank(FakeService(), documents=documents, top_n=2, return_documents=True)
    assert response.json()["results"] == [
        {"index": 1, "relevance_score": pytest.approx(2 / 3), "document": {"text": "a red fox"}},
        {"index": 2, "relevance_score": pytest.approx(1 / 3), "document": {"text": "red"}},
    ]


async def test_more_than_there_are_is_all_of_them() -> None:
    assert len((await rerank(FakeService(), top_n=99)).json()["results"]) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": None}, "query"),
        ({"query": ["a"]}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": ["a", 1]}, "documents"),
        ({"documents": [{"title": "a"}]}, "documents"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"return_documents": "yes"}, "return_documents"),
    ],
)
async def test_a_field_of_no_sense_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert_error(await rerank(FakeService(), **fields), 400, param=param)


async def test_a_document_that_is_too_long_is_named() -> None:
    service = FakeService()
    service.embedder.error = InputLengthError(param="documents[3]", n_prompt=700, n_ctx=512)
    assert_error(await rerank(service), 400, param="documents[3]", code="context_length_exceeded")


async def test_an_unknown_model_is_not_found() -> None:
    response = await rerank(FakeService(), model="rerank-v9")
    assert_error(response, 404, param="model", code="model_not_found")
