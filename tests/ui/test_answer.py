"""An answer as it grows: its frames, its pace, its ends. Without gradio and without a browser."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from nemolocal.errors import EngineDiedError, ModelNotFoundError
from nemolocal.types import Message
from nemolocal.ui.answer import Frame, answer
from nemolocal.ui.conversation import Turn, sent
from nemolocal.ui.options import Options
from nemolocal.ui.pace import in_batches
from tests.fakes import FakeService, FakeTextModel

pytestmark = pytest.mark.anyio


async def frames_of(
    service: FakeService,
    *,
    options: Options | None = None,
    ref: str | None = None,
    question: str = "hi there",
) -> list[Frame]:
    chat = sent((), question)
    found = answer(service, chat, options or Options(), ref=ref, stop=asyncio.Event())
    return [frame async for frame in found]


async def test_a_whole_answer() -> None:
    frames = await frames_of(FakeService(), options=Options(system="Be kind."))
    assert frames[0].chat == (Turn("hi there"),)
    assert frames[0].waiting == "Waiting"
    last = frames[-1]
    assert last.is_last
    assert last.chat == (Turn("hi there", "Hello there.", figures="3 tokens · 150.0 tokens/s"),)
    assert (last.meter.phase, last.meter.prompt_tokens, last.meter.new_tokens) == ("idle", 4, 3)
    assert last.meter.tokens_per_s == 150
    assert last.meter.n_ctx == 8192
    assert [frame.is_last for frame in frames[:-1]] == [False] * (len(frames) - 1)


async def test_the_system_prompt_and_the_options_reach_the_model() -> None:
    service = FakeService()
    await frames_of(service, options=Options(system="Be kind.", max_tokens=2, seed=5, stop="END\n\nFIN"))
    asked, params = service.model.calls[0]
    assert asked == (Message("system", "Be kind."), Message("user", "hi there"))
    assert (params.max_tokens, params.sampling.seed, params.stop) == (2, 5, ("END", "FIN"))


@pytest.mark.parametrize(
    ("n_ctx", "max_tokens", "note"),
    [(8192, 2, "Ended at the longest answer allowed."), (4, 0, "The context is full.")],
)
async def test_an_answer_that_was_cut_says_why(n_ctx: int, max_tokens: int, note: str) -> None:
    service = FakeService(FakeTextModel(n_ctx=n_ctx))
    frames = await frames_of(service, options=Options(max_tokens=max_tokens))
    assert frames[-1].chat[-1] == Turn("hi there", "Hello there", note, "2 tokens · 100.0 tokens/s")


async def test_a_failure_in_mid_answer_keeps_the_text() -> None:
    service = FakeService()
    service.model.error = EngineDiedError("It died.", hint="Ask again.")
    last = (await frames_of(service))[-1]
    assert last.problem == "It died. Ask again."
    assert last.chat == (Turn("hi there", "Hello", "Not finished.", "1 token"),)


async def test_a_refusal_is_one_line_and_no_answer() -> None:
    last = (await frames_of(FakeService(FakeTextModel(n_ctx=2))))[-1]
    assert "2 tokens" in last.problem
    assert "\n" not in last.problem
    assert last.chat[-1].note == "No answer."
    assert last.chat[-1].figures == ""


async def test_the_cached_part_of_the_prompt_is_told() -> None:
    service = FakeService()
    service.model.cached_tokens = 1
    last = (await frames_of(service))[-1]
    assert last.chat[-1].figures == "3 tokens · 150.0 tokens/s · 1 of 2 prompt tokens cached"


async def test_an_unknown_model_and_impossible_options_are_told() -> None:
    last = (await frames_of(FakeService(), ref="nope"))[-1]
    assert last.problem.startswith("No model named 'nope'")
    last = (await frames_of(FakeService(), options=Options(seed=-4)))[-1]
    assert last.problem == "The seed is -4. Give a whole number from 0 up."


async def test_a_fault_of_our_own_is_told_without_its_details() -> None:
    service = FakeService()
    service.model.refusal = KeyError("secret")
    last = (await frames_of(service))[-1]
    assert "KeyError" in last.problem
    assert "secret" not in last.problem


async def test_stop_ends_the_stream_and_keeps_the_text() -> None:
    service = FakeService(FakeTextModel(["word "] * 1000))
    service.model.delay_s = 0.01
    stop, last = asyncio.Event(), None
    async for frame in answer(service, sent((), "go"), Options(), ref=None, stop=stop):
        last = frame
        if "word word" in frame.chat[-1].answer:
            stop.set()
    assert last is not None
    assert last.is_last
    assert last.problem == ""
    assert last.chat[-1].note == "Stopped."
    assert last.chat[-1].answer.startswith("word word")
    assert service.model.n_closed_early == 1


async def test_a_reader_that_goes_away_closes_the_stream() -> None:
    service = FakeService(FakeTextModel(["word "] * 1000))
    service.model.delay_s = 0.01
    frames = answer(service, sent((), "go"), Options(), ref=None, stop=asyncio.Event())
    async for frame in frames:
        if frame.chat[-1].answer:
            break
    await frames.aclose()
    assert service.model.n_closed_early == 1


async def test_a_reader_that_goes_away_while_the_prompt_is_read_closes_the_stream() -> None:
    service = FakeService()
    service.model.read_delay_s = 60
    frames = answer(service, sent((), "go"), Options(), ref=None, stop=asyncio.Event())
    async for frame in frames:
        if frame.meter.phase == "reading":
            break
    await frames.aclose()
    assert service.model.n_closed_early == 1


async def counted(n: int, delay_s: float = 0.0) -> AsyncIterator[int]:
    for number in range(n):
        await asyncio.sleep(delay_s)
        yield number


async def test_batches_hold_everything_in_order_at_a_bounded_pace() -> None:
    began = time.monotonic()
    batches = [
        batch async for batch in in_batches(counted(400, 0.001), every_s=0.05, beat_s=1, stop=asyncio.Event())
    ]
    assert [number for batch in batches for number in batch] == list(range(400))
    assert 2 < len(batches) <= 20 * (time.monotonic() - began) + 2


async def test_silence_is_told_and_a_pause_does_not_hold_back_what_came() -> None:
    batches = [
        batch async for batch in in_batches(counted(2, 0.12), every_s=0.01, beat_s=0.05, stop=asyncio.Event())
    ]
    assert [] in batches
    assert [batch for batch in batches if batch] == [[0], [1]]


async def test_an_error_comes_after_the_items_before_it() -> None:
    async def failing() -> AsyncIterator[int]:
        yield 1
        raise ModelNotFoundError("gone")

    batches = in_batches(failing(), every_s=0.01, beat_s=1, stop=asyncio.Event())
    assert await anext(batches) == [1]
    with pytest.raises(ModelNotFoundError):
        await anext(batches)
