"""The chat's handlers as plain functions."""

from __future__ import annotations

import asyncio
from dataclasses import astuple, replace
from typing import Any

import gradio as gr
import pytest

from nemolocal.errors import EngineError
from nemolocal.service import ModelCard
from nemolocal.ui import picker
from nemolocal.ui.chat import Desk, starters
from nemolocal.ui.conversation import Turn
from nemolocal.ui.options import Options
from nemolocal.ui.status import Meter
from nemolocal.ui.tabs import N_KEPT, Tabs
from tests.fakes import FakeService, FakeTextModel

pytestmark = pytest.mark.anyio
OPTIONS = astuple(Options())
SKIP = gr.skip()


def request(session: str = "one") -> gr.Request:
    return gr.Request(session_hash=session)


def edit_event(index: int, value: str) -> gr.EditData:
    return gr.EditData(None, {"index": index, "value": value, "previous_value": ""})


def desk(model: FakeTextModel | None = None) -> Desk:
    return Desk(FakeService(model), Tabs())


async def replies(at: Desk, chat: Any, session: str = "one", ref: str | None = None) -> list[list[Any]]:
    return [values async for values in at.reply(request(session), chat, "tab", ref, *OPTIONS)]


async def test_send_then_reply() -> None:
    at = desk()
    chat, view, composer = at.send(request(), " hello \n", ())
    assert chat == (Turn("hello"),)
    assert view[0]["content"][0]["text"] == "hello"
    assert composer.value == ""
    assert composer.stop_btn == "Stop"
    values = await replies(at, chat)
    last_chat, _, composer, meter, status, notice = values[-1]
    assert last_chat == (Turn("hello", "Hello there.", figures="3 tokens · 150.0 tokens/s"),)
    assert composer.submit_btn == "Send"
    assert meter.new_tokens == 3
    assert "Ready" in status
    assert notice == SKIP
    assert at.tabs.recall("tab") == last_chat


async def test_nothing_is_sent_for_blank_text_or_while_answering() -> None:
    at = desk()
    assert at.send(request(), "  \n", ()) == [SKIP] * 3
    at.tabs.begin("one")
    assert at.send(request(), "hello", ()) == [SKIP] * 3
    assert at.retry(request(), (Turn("q", "a"),)) == [SKIP] * 3
    assert at.undo(request(), "tab", (Turn("q", "a"),)) == [SKIP] * 3
    assert await replies(at, (Turn("hello"),)) == []
    assert at.send(request("two"), "hello", ())[0] == (Turn("hello"),)


async def test_reply_does_nothing_where_no_question_waits() -> None:
    at = desk()
    assert await replies(at, ()) == []
    assert await replies(at, (Turn("q", "a"),)) == []
    assert at.tabs.running("one") is None


async def test_edit_takes_the_guard_out_and_keeps_the_rest() -> None:
    at = desk()
    chat = (Turn("one", "1"), Turn("two", "2"))
    assert at.edit(request(), edit_event(2, "a <\u2060b>"), chat)[0] == (chat[0], Turn("a <b>"))
    unchanged = at.edit(request(), edit_event(2, "  "), chat)
    assert unchanged[0] == SKIP
    assert len(unchanged[1]) == 4


async def test_a_session_answers_one_question_at_a_time_and_two_sessions_at_once() -> None:
    model = FakeTextModel(["word "] * 10)
    model.delay_s = 0.02
    at = desk(model)
    first = asyncio.create_task(replies(at, (Turn("a"),), "one"))
    second = asyncio.create_task(replies(at, (Turn("b"),), "two"))
    await asyncio.sleep(0.05)
    assert len(model.calls) == 2
    assert await replies(at, (Turn("c"),), "one") == []
    await asyncio.gather(first, second)
    assert len(model.calls) == 2


async def test_stop_waits_for_the_end_and_the_text_stays() -> None:
    model = FakeTextModel(["word "] * 1000)
    model.delay_s = 0.01
    at = desk(model)
    answering = asyncio.create_task(replies(at, (Turn("a"),)))
    await asyncio.sleep(0.15)
    assert await at.stop(request()) == SKIP
    assert at.tabs.running("one") is None
    chat = (await answering)[-1][0]
    assert chat[-1].note == "Stopped."
    assert "word" in chat[-1].answer
    assert model.n_closed_early == 1
    assert (await at.stop(request())).submit_btn == "Send"


async def test_a_reader_that_goes_away_ends_the_run() -> None:
    model = FakeTextModel(["word "] * 1000)
    model.delay_s = 0.01
    at = desk(model)
    reply = at.reply(request(), (Turn("a"),), "tab", None, *OPTIONS)
    async for values in reply:
        if values[0][-1].answer:
            break
    await reply.aclose()
    assert model.n_closed_early == 1
    assert at.tabs.running("one") is None
    assert "word" in at.tabs.recall("tab")[-1].answer


async def test_new_forgets_the_conversation() -> None:
    at = desk()
    await replies(at, (Turn("a"),))
    chat, view, *_ = await at.new(request(), "tab")
    assert (chat, view) == ((), [])
    assert at.tabs.recall("tab") == ()


async def test_choosing_a_model_tells_its_failure_and_nothing_more() -> None:
    at = desk()

    def fail(ref: str) -> None:
        raise EngineError("It does not load <b>.", hint="Take a smaller one.")

    at.service.on_load = fail  # type: ignore[attr-defined]
    values = [values async for values in at.choose("fake", Meter())]
    assert "It does not load &lt;b&gt;. Take a smaller one." in values[-1][1]
    assert [values async for values in at.choose(None, Meter())] == []


def test_the_picker_names_models_and_takes_the_loaded_one_first() -> None:
    service = FakeService()
    card: ModelCard = service.list_models()[0]
    assert picker.label(card) == "Fake · Q4_1 · 98 MB"
    assert picker.label(replace(card, name="", quant="", size_bytes=24_600_000_000)) == "fake · 24.6 GB"
    other = replace(card, id="other")
    service.list_models = lambda: [other, card]  # type: ignore[method-assign]
    assert picker.selected(service) == "fake"
    service.current = replace(service.current, model="")
    assert picker.selected(service) == "other"
    service.list_models = list  # type: ignore[method-assign]
    assert picker.selected(service) is None


def test_the_status_line_is_left_alone_while_answering() -> None:
    at = desk()
    assert "Ready" in at.refresh(request(), Meter())
    at.tabs.begin("one")
    assert at.refresh(request(), Meter()) == SKIP


def test_tabs_are_kept_up_to_a_number_and_an_unbegun_answer_reads_as_stopped() -> None:
    tabs = Tabs()
    for number in range(N_KEPT + 1):
        tabs.keep(str(number), (Turn(str(number)),))
    assert tabs.recall("0") == ()
    assert tabs.recall("1") == (Turn("1", "", "Stopped."),)
    tabs.keep("", (Turn("nobody's"),))
    assert tabs.recall("") == ()


def test_starters_have_a_title_and_a_text() -> None:
    found = starters()
    assert len(found) == 4
    assert all(starter["text"] and starter["display_text"] for starter in found)
