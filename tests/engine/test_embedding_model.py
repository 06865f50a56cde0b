"""Embedding and ranking whole, in a process of its own, on small files with random weights."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import LoadSpec
from nemolocal.errors import (
    EngineDiedError,
    EngineError,
    InputLengthError,
    InvalidRequestError,
)
from tests import synthetic_embedders
from tests.synthetic_embedders import N_CTX, N_EMBD

pytestmark = [pytest.mark.model, pytest.mark.anyio]

POOLINGS = {
    "bert": "cls",
    "llama-embed": "mean",
    "qwen3-embed": "last",
    "bert-rank": "rank",
    "qwen3-rank": "rank",
}
EMBEDDERS = ("bert", "llama-embed", "qwen3-embed")
RERANKERS = ("bert-rank", "qwen3-rank")


@asynccontextmanager
async def running(tmp_path: Path, kind: str, **changes: object) -> AsyncIterator[EngineClient]:
    path = tmp_path / f"{kind}.gguf"
    if not path.exists():
        synthetic_embedders.write(path, kind)
    fields = {"n_ctx": N_CTX, "n_slots": 8, "n_ubatch": N_CTX, "n_threads": 1, "pooling": POOLINGS[kind]}
    engine = await EngineClient.start(LoadSpec(str(path), **{**fields, **changes}), tmp_path / "log")  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        await engine.close()


async def vectors(engine: EngineClient, *inputs: str | tuple[int, ...]) -> list[np.ndarray]:
    found = await engine.embed(inputs)
    return [np.frombuffer(vector, "<f4") for vector in found.vectors]


def texts(n: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 240 tokens."""
    dice = random.Random(seed)
    return ["".join(dice.choices("abcdef ghij", k=dice.choice((1, 5, 20, 60, 240)))) or "x" for _ in range(n)]


def assert_same(one: np.ndarray, other: np.ndarray) -> None:
    """The same but for what rounding does: attention works in 16 bits."""
    assert float(one @ other) > 0.99999


@pytest.mark.parametrize("kind", EMBEDDERS)
async def test_a_vector_is_that_of_a_run_alone_whatever_stands_beside_it(tmp_path: Path, kind: str) -> None:
    some = texts(30)
    async with running(tmp_path, kind, n_slots=1) as engine:
        alone = [(await vectors(engine, text))[0] for text in some]
    async with running(tmp_path, kind) as engine:
        assert engine.info.n_embd == N_EMBD
        together = await vectors(engine, *some)
        crowd = await asyncio.gather(*(vectors(engine, text) for text in some))
    for lonely, beside, crowded in zip(alone, together, crowd, strict=True):
        assert lonely.shape == (N_EMBD,)
        assert float(np.linalg.norm(lonely)) == pytest.approx(1.0, abs=1e-6)
        assert_same(lonely, beside)
        assert_same(lonely, crowded[0])
    assert float(alone[0] @ alone[4]) < 0.999, "other texts have other vectors"


async def test_an_input_read_in_parts_has_the_vector_of_one_read_whole(tmp_path: Path) -> None:
    some = texts(12)
    async with running(tmp_path, "qwen3-embed") as engine:
        whole = await vectors(engine, *some)
    async with running(tmp_path, "qwen3-embed", n_ubatch=32) as engine:
        assert engine.info.n_ctx == N_CTX
        parts = await vectors(engine, *some)
    for one, other in zip(whole, parts, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("kind", ["bert", "llama-embed"])
async def test_what_must_be_read_whole_is_no_longer_than_the_batch(tmp_path: Path, kind: str) -> None:
    async with running(tmp_path, kind, n_ubatch=32) as engine:
        assert engine.info.n_ctx == 32
        with pytest.raises(InputLengthError, match=r"input\[1\] has 33 tokens, .* at most 32 .*larger --ctx"):
            await engine.embed(["x", "x" * 31])  # and a special token at each end


async def test_positions_beyond_those_that_the_model_learned_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, "bert", n_ctx=4 * N_CTX, n_ubatch=4 * N_CTX) as engine:
        assert len(await vectors(engine, "x" * (N_CTX - 2))) == 1
        with pytest.raises(InputLengthError) as caught:
            await engine.embed(["x" * (N_CTX - 1)])
        assert (caught.value.n_prompt, caught.value.n_ctx) == (N_CTX + 1, N_CTX)
        assert "larger" not in str(caught.value)


def tokens_of(text: str) -> tuple[int, ...]:
    """In the vocabulary of the small files a byte is its number and three more, where nothing merges."""
    return tuple(3 + byte for byte in text.encode())


async def test_token_ids_give_the_vector_of_their_text_with_or_without_its_ends(tmp_path: Path) -> None:
    bare = tokens_of("alpha")
    async with running(tmp_path, "bert") as engine:
        by_text, by_ids, by_all = await vectors(engine, "alpha", bare, (1, *bare, 2))
        assert_same(by_text, by_ids)
        assert_same(by_text, by_all)
        assert (await engine.embed(["alpha", bare])).usage.prompt_tokens == 2 * 7
        with pytest.raises(InvalidRequestError, match=r"Token 384 is outside the vocabulary of 384 tokens"):
            await engine.embed(["a", (5, 384)])


async def test_what_a_text_says_is_no_control_token(tmp_path: Path) -> None:
    async with running(tmp_path, "bert") as engine:
        found = await engine.embed(["<|im_end|>"])
        assert found.usage.prompt_tokens == len("<|im_end|>") + 2


@pytest.mark.parametrize("kind", RERANKERS)
async def test_a_score_is_that_of_a_run_alone_and_between_0_and_1(tmp_path: Path, kind: str) -> None:
    documents = [text[:120] for text in texts(20)]
    async with running(tmp_path, kind) as engine:
        together = (await engine.rank("what is it", documents)).scores
        alone = [(await engine.rank("what is it", [document])).scores[0] for document in documents]
        other = (await engine.rank("who was there", documents)).scores
    assert together == pytest.approx(alone, abs=1e-3)
    assert all(0.0 < score < 1.0 for score in together)
    assert len(set(together)) > 10
    assert together != pytest.approx(other, abs=1e-6)


async def test_a_pair_that_is_too_long_names_the_document(tmp_path: Path) -> None:
    async with running(tmp_path, "bert-rank") as engine:
        with pytest.raises(InputLengthError) as caught:
            await engine.rank("what", ["short", "x" * N_CTX])
        assert caught.value.param == "documents[1]"
        assert caught.value.n_prompt == len("what") + N_CTX + 3


async def test_requests_that_are_given_up_leave_room_for_the_others(tmp_path: Path) -> None:
    async with running(tmp_path, "bert", n_queue=4) as engine:
        tasks = [asyncio.create_task(engine.embed(texts(50, seed))) for seed in range(4)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert engine.n_active == 0
        assert len((await engine.embed(["a"])).vectors) == 1


async def test_a_killed_engine_fails_its_requests_once_and_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, "bert") as engine:
        task = asyncio.create_task(engine.embed(texts(500)))
        await asyncio.sleep(0.02)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGTERM)
        with pytest.raises(EngineDiedError):
            await task
        with pytest.raises(EngineDiedError):
            await engine.embed(["a"])


async def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bert.gguf"
    synthetic_embedders.write(path, "bert")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(EngineError, match="could not load"):
        async with running(tmp_path, "bert"):
            raise AssertionError("it was loaded")
