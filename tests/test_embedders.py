"""Models that embed or rank, found and loaded by the service, and through the port with the real engine."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator

import httpx
import numpy as np
import openai
import pytest

from nemolocal import config
from nemolocal.errors import InvalidRequestError, ModelNotFoundError
from nemolocal.models.matryoshka import can_shorten
from nemolocal.service import Service
from nemolocal.types import GenerationParams, Message
from nemolocal.vectors import floats, shortened
from tests import synthetic, synthetic_embedders
from tests.api.serving import Live, assert_error, running
from tests.engine.test_embedding_model import tokens_of
from tests.profiles import machine
from tests.synthetic_embedders import N_CTX, N_EMBD

pytestmark = pytest.mark.anyio


def put(**files: str) -> None:
    """Small models in the models folder: by name, one of KINDS or "llama"."""
    folder = config.load().models_dir
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in files.items():
        if kind == "llama":
            synthetic.write_tiny(folder / f"{name}.gguf")
        else:
            synthetic_embedders.write(folder / f"{name}.gguf", kind)


def service() -> Service:
    return Service(config.load({"threads": 1}), detect=machine)


# Finding -------------------------------------------------------------------------------------------


async def test_each_purpose_has_a_default_where_only_one_model_has_it() -> None:
    put(embedder="bert", ranker="bert-rank", writer="llama")
    made = service()
    assert made.find_embedder(None).id == "embedder"
    assert made.find_reranker(None).id == "ranker"
    assert made.find_model(None).id == "writer"
    assert {card.id: card.purpose for card in made.list_models()} == {
        "embedder": "embed",
        "ranker": "rank",
        "writer": "chat",
    }


async def test_what_is_not_here_is_said_by_its_purpose() -> None:
    put(writer="llama")
    with pytest.raises(ModelNotFoundError, match="There is no model that embeds on this machine"):
        service().find_embedder(None)
    put(one="bert", two="llama-embed")
    with pytest.raises(ModelNotFoundError, match="No model that embeds was named"):
        service().find_embedder(None)
    assert service().find_embedder("two").id == "two"


async def test_a_model_asked_for_what_it_does_not_do_says_who_does() -> None:
    put(embedder="bert", ranker="bert-rank", writer="llama")
    made = service()
    for find, ref, does in (
        (made.find_embedder, "writer", "writes text"),
        (made.find_embedder, "ranker", "ranks documents"),
        (made.find_reranker, "embedder", "embeds texts"),
    ):
        with pytest.raises(InvalidRequestError, match=f"{ref} {does}; this needs a model that") as caught:
            find(ref)
        assert caught.value.param == "model"
    for stream in (
        made.find_model("embedder").chat([Message("user", "Hi")], GenerationParams()),
        made.find_model("ranker").complete("Hi", GenerationParams()),
    ):
        with pytest.raises(InvalidRequestError, match="this needs a model that writes text"):
            await anext(stream)
    assert made.loaded() == []


# Vectors -------------------------------------------------------------------------------------------


def test_a_vector_that_is_cut_has_length_1_again() -> None:
    vector = np.array([3.0, 4.0, 12.0], "<f4").tobytes()
    assert list(floats(shortened(vector, 2))) == pytest.approx([0.6, 0.8])
    assert list(floats(shortened(np.zeros(3, "<f4").tobytes(), 2))) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("architecture", "name", "can"),
    [
        ("qwen3", "Qwen3 Embedding 0.6B", True),
        ("nomic-bert", "nomic-embed-text-v1.5.Q8_0.gguf", True),
        ("nomic-bert", "nomic-embed-text-v1.Q8_0.gguf", False),
        ("llama-embed", "llama-nemotron-embed-1b-v2", True),
        ("llama-embed", "Llama 3.2 NeMoRetriever Embed 1B", False),
        ("llama-embed", "llama-embed-nemotron-8b", False),
        ("gemma-embedding", "", True),
        ("bert", "bge-m3", False),
    ],
)
def test_only_models_made_for_it_have_their_vectors_cut(architecture: str, name: str, can: bool) -> None:
    assert can_shorten(architecture, name) == can


# The port, whole -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    """A port over an embedder, one whose vectors may be cut, a reranker and a model that chats."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEMOLOCAL_HOME", str(tmp_path_factory.mktemp("home")))
        put(
            **{
                "embedder": "bert",
                "qwen3-embedding-tiny": "qwen3-embed",
                "ranker": "qwen3-rank",
                "writer": "llama",
            }
        )
        async with running(service()) as made:
            yield made


@pytest.fixture
async def official(live: Live) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as caller:
        yield caller


async def ask(live: Live, path: str, **fields: object) -> httpx.Response:
    async with httpx.AsyncClient(base_url=live.url, timeout=60) as caller:
        return await caller.post(path, json=fields)


@pytest.mark.model
async def test_the_official_client_gets_vectors(official: openai.AsyncOpenAI) -> None:
    found = await official.embeddings.create(model="embedder", input=["alpha", "beta", "alpha"])
    assert [each.index for each in found.data] == [0, 1, 2]
    first, second, third = (np.array(each.embedding) for each in found.data)
    assert first.shape == (N_EMBD,)
    assert np.linalg.norm(first) == pytest.approx(1.0, abs=1e-6)
    assert first @ third > 0.99999
    assert first @ second < 0.999
    assert found.usage.prompt_tokens == found.usage.total_tokens == 7 + 6 + 7
    alone = await official.embeddings.create(model="embedder", input="alpha", encoding_format="float")
    assert np.array(alone.data[0].embedding) @ first > 0.9999
    by_ids = await official.embeddings.create(model="embedder", input=[list(tokens_of("alpha"))])
    assert np.array(by_ids.data[0].embedding) @ first > 0.9999


@pytest.mark.model
async def test_formats_forms_and_faults_of_embeddings(live: Live) -> None:
    async def embed(value: object, **fields: object) -> httpx.Response:
        return await ask(live, "/v1/embeddings", model="embedder", input=value, **fields)

    plain = (await embed("hello", encoding_format="float")).json()["data"][0]["embedding"]
    encoded = (await embed("hello", encoding_format="base64")).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4") == pytest.approx(plain, abs=1e-6)
    many = (await embed([f"text {n}" for n in range(300)])).json()
    assert [each["index"] for each in many["data"]] == list(range(300))
    assert_error(await embed("hello", encoding_format="hex"), 400, param="encoding_format")
    assert_error(await embed("hello", dimensions=8), 400, param="dimensions")
    assert len((await embed("hello", dimensions=N_EMBD)).json()["data"][0]["embedding"]) == N_EMBD
    assert_error(await embed([5, 384]), 400, param="input")
    for value in ("", [], [""], [1, "a"]):
        assert_error(await embed(value), 400, param="input")
    message = assert_error(
        await embed(["a", "x" * N_CTX]), 400, param="input[1]", code="context_length_exceeded"
    )
    assert str(N_CTX + 2) in message
    assert str(N_CTX) in message


@pytest.mark.model
async def test_vectors_of_a_model_made_for_it_are_cut_and_of_length_1(live: Live) -> None:
    async def embed(**fields: object) -> httpx.Response:
        return await ask(live, "/v1/embeddings", model="qwen3-embedding-tiny", input="hello", **fields)

    whole = np.array((await embed()).json()["data"][0]["embedding"])
    cut = np.array((await embed(dimensions=16)).json()["data"][0]["embedding"])
    assert cut == pytest.approx(whole[:16] / np.linalg.norm(whole[:16]), abs=1e-4)
    assert_error(await embed(dimensions=N_EMBD + 1), 400, param="dimensions")


@pytest.mark.model
async def test_documents_are_ranked(live: Live) -> None:
    documents = ["one", "two two", {"text": "three"}]
    response = await ask(live, "/v1/rerank", query="which", documents=documents, return_documents=True)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["model"] == "ranker"
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    texts = {result["index"]: result["document"]["text"] for result in body["results"]}
    assert texts == {0: "one", 1: "two two", 2: "three"}
    too_long = await ask(live, "/v1/rerank", query="which", documents=["a", "x" * N_CTX])
    assert_error(too_long, 400, param="documents[1]", code="context_length_exceeded")


@pytest.mark.model
async def test_models_of_each_kind_work_beside_each_other(live: Live) -> None:
    chat = {"model": "writer", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    answers = await asyncio.gather(
        ask(live, "/v1/chat/completions", **chat),
        ask(live, "/v1/embeddings", model="embedder", input="a"),
        ask(live, "/v1/rerank", model="ranker", query="a", documents=["b"]),
        ask(live, "/v1/chat/completions", **chat | {"model": "embedder"}),
        ask(live, "/v1/embeddings", model="writer", input="a"),
    )
    assert [answer.status_code for answer in answers] == [200, 200, 200, 400, 400]
    for refused in answers[3:]:
        assert "this needs a model that" in assert_error(refused, 400, param="model")


@pytest.mark.model
async def test_the_list_of_models_says_what_each_is_for(live: Live) -> None:
    async with httpx.AsyncClient(base_url=live.url) as caller:
        listed = (await caller.get("/v1/models")).json()
    assert {each["id"]: each["meta"]["purpose"] for each in listed["data"]} == {
        "embedder": "embed",
        "qwen3-embedding-tiny": "embed",
        "ranker": "rank",
        "writer": "chat",
    }
    assert {each["name"]: each["capabilities"] for each in listed["models"]}["ranker"] == ["rerank"]
