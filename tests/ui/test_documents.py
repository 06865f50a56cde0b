"""The Documents tab without a browser: what its handlers answer and do, over a real library and a fake
model."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect

from nemolocal.documents.answer import Answer, Unread
from nemolocal.documents.coverage import Coverage
from nemolocal.documents.parts import NotRead
from nemolocal.errors import EngineError
from nemolocal.ui import documents_view, uploads
from nemolocal.ui.documents import PARTS, Desk, back_of, page_of
from nemolocal.ui.intake import N_NAME_BYTES, file_name, unread_lines
from nemolocal.ui.rooms import N_ROOMS, N_TURNS, Room, Rooms, Turn
from tests.documents import pdfs
from tests.fakes import FakeService, FakeTextModel

pytestmark = pytest.mark.anyio

EVIL = '<img src=x onerror="window.__x=1">'
FACT = "The harbour code is QUARTZ-88."


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files lie until they are read."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
async def desk(scratch: Path) -> AsyncIterator[Desk]:
    service = FakeService(FakeTextModel([f'It is QUARTZ-88: "{FACT}"', " [1]."]))
    made = Desk(service, back_of(service))
    yield made
    await made.back.close()
    await service.close()


def request(tab: str = "one") -> Any:
    return SimpleNamespace(session_hash=f"session of {tab}", query_params={"tab": tab})


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def settled(room: Room) -> None:
    await until(lambda: not room.tasks)


async def put(desk: Desk, *, tab: str = "one", batch: str = "a", **texts: str) -> Room:
    """Files that are dropped on the page together, and read."""
    room = desk.back.rooms.of(tab)
    for name, text in texts.items():
        assert await desk.back.intake.receive(room, f"{name}.txt", chunks(text.encode()), batch=batch)
    await settled(room)
    return room


def by_part(values: list[Any]) -> dict[str, Any]:
    return dict(zip(PARTS, values[-len(PARTS) :], strict=True))


async def shown(desk: Desk, tab: str = "one") -> dict[str, Any]:
    return by_part(await desk.open(request(tab)))


async def press(desk: Desk, act: str, ref: object = "", tab: str = "one") -> dict[str, Any]:
    given = json.dumps({"act": act, "ref": str(ref), "at": 1})
    return by_part(await desk.press(request(tab), given, None))


async def ask(desk: Desk, question: str, tab: str = "one") -> list[list[Any]]:
    return [values async for values in desk.ask(request(tab), question, None, None)]


# Files that come in ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("a.pdf", "a.pdf"),
        ('a<b>:"|?*\x00.txt', "a_b_______.txt"),
        ("..", "document"),
        ("名" * 300 + ".docx", "名" * ((N_NAME_BYTES - 5) // 3) + ".docx"),
        ("x." + "y" * 500, ("x." + "y" * 500)[:N_NAME_BYTES]),
    ],
)
def test_a_name_is_one_that_every_file_system_takes(name: str, kept: str) -> None:
    assert file_name(name) == kept


async def test_files_are_read_and_chosen_and_leave_nothing_behind(desk: Desk, scratch: Path) -> None:
    room = await put(desk, a=FACT, b="Another text.")
    names = {row.id: row.name for row in desk.papers.library.rows()}
    assert [names[id] for id in room.picked] == ["a.txt", "b.txt"]
    assert list(scratch.iterdir()) == []
    parts = await shown(desk)
    assert parts["listed"].count('aria-checked="true"') == 2
    assert parts["reads"].count("now-row") == 3  # two files, and the button that clears them
    assert "2 documents" in parts["head"]
    # What is dropped later is what is wanted now; the same content is not read again.
    await put(desk, batch="b", c=FACT)
    assert [names[id] for id in room.picked] == ["a.txt"]
    assert "was here already" in (await shown(desk))["reads"]
    assert (await shown(desk))["reads"].count("now-name") == 1


async def test_a_path_in_a_name_leads_nowhere(desk: Desk, scratch: Path) -> None:
    room = desk.back.rooms.of("one")
    for name in ("../../evil.txt", "..\\..\\evil.txt", "/etc/evil.txt", "\u202eevil\x00.txt"):
        await desk.back.intake.receive(room, name, chunks(name.encode()))
    await settled(room)
    assert {row.name for row in desk.papers.library.rows()} == {"evil.txt"}
    assert list(scratch.parent.rglob("*evil*")) == []


async def test_each_file_that_cannot_be_read_has_its_line(desk: Desk, scratch: Path) -> None:
    desk.back.intake.max_file_bytes = 100
    room, intake = desk.back.rooms.of("one"), desk.back.intake
    assert not await intake.receive(room, f"{EVIL}.exe", chunks(b"MZ"))
    assert not await intake.receive(room, "big.txt", chunks(b"x" * 60, b"x" * 60))
    assert await intake.receive(room, "broken.pdf", chunks(b"%PDF-1.7 and nothing"))
    assert await intake.receive(room, "good.txt", chunks(b"Some text."))
    intake.refuse(room, "gone.txt", "It did not arrive.")
    await settled(room)
    lines = {read.name: (read.state, read.said) for read in room.reads.values()}
    assert lines["good.txt"] == ("read", "read")
    assert [state for state, _ in lines.values()].count("failed") == 4
    assert "larger than" in lines["big.txt"][1]
    assert all(said for _, said in lines.values())
    assert list(scratch.iterdir()) == []
    html = (await shown(desk))["reads"]
    assert "<img" not in html
    assert html.count('class="problem"') == 4
    assert (await press(desk, "clear-reads"))["reads"] == ""


async def test_a_sender_that_breaks_off_leaves_nothing(desk: Desk, scratch: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"some"
        raise ClientDisconnect

    room = desk.back.rooms.of("one")
    with pytest.raises(ClientDisconnect):
        await desk.back.intake.receive(room, "a.md", broken())
    assert room.reads == {}
    assert not room.is_busy
    assert list(scratch.iterdir()) == []


async def test_pages_without_text_are_told(desk: Desk, tmp_path: Path) -> None:
    path = pdfs.write(tmp_path / "x.pdf", [pdfs.lines([FACT]), pdfs.picture, pdfs.picture])
    room = desk.back.rooms.of("one")
    await desk.back.intake.receive(room, "x.pdf", chunks(path.read_bytes()))
    await settled(room)
    (read,) = room.reads.values()
    assert read.state == "read"
    assert "pages 2–3 not read:" in read.said


async def test_a_password_is_asked_for(desk: Desk, tmp_path: Path, scratch: Path) -> None:
    path = pdfs.write(tmp_path / "x.pdf", [pdfs.lines([FACT])], encrypt="secret")
    room = desk.back.rooms.of("one")
    await desk.back.intake.receive(room, "x.pdf", chunks(path.read_bytes()), batch="a")
    await settled(room)
    assert "locked" in (await shown(desk))["reads"]
    await desk.unlock(request(), "wrong", None)
    await settled(room)
    assert "password is wrong" in (await shown(desk))["reads"]
    await put(desk, batch="b", other="Other text.")  # does not take the one that waits away
    values = await desk.unlock(request(), "secret", None)
    assert values[0] == ""
    await settled(room)
    assert "locked" not in (await shown(desk))["reads"]
    assert {row.name for row in desk.papers.library.rows()} == {"x.pdf", "other.txt"}
    assert list(scratch.iterdir()) == []


async def test_a_read_can_be_stopped_and_the_next_one_goes_on(
    desk: Desk, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def never(*_: object, **__: object) -> Any:
        begun.set()
        await asyncio.sleep(60)

    room = desk.back.rooms.of("one")
    with monkeypatch.context() as patch:
        patch.setattr(desk.papers._reader, "read", never)
        await desk.back.intake.receive(room, "slow.txt", chunks(b"slow"))
        await begun.wait()
        await desk.back.intake.receive(room, "next.txt", chunks(b"next"))
    waiting = (await shown(desk))["reads"]
    assert "Waiting" in waiting
    assert waiting.count('data-act="stop-read"') == 2
    await press(desk, "stop-read", next(iter(room.reads)))
    await settled(room)
    assert [(read.name, read.state, read.said) for read in room.reads.values()] == [
        ("slow.txt", "failed", "Stopped."),
        ("next.txt", "read", "read"),
    ]
    assert list(scratch.iterdir()) == []


async def test_nothing_is_left_when_the_page_ends(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    back = back_of(service)

    async def never(*_: object, **__: object) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(service.papers._reader, "read", never)
    room = back.rooms.of("one")
    for name in "ab":
        await back.intake.receive(room, f"{name}.txt", chunks(b"text"))
    assert len(list(scratch.iterdir())) == 2
    await back.close()
    assert list(scratch.iterdir()) == []
    await service.close()


async def test_the_routes_take_files_and_give_a_summary(desk: Desk) -> None:
    site = Starlette(routes=uploads.routes(desk.back))
    transport = httpx.ASGITransport(site)
    async with httpx.AsyncClient(transport=transport, base_url="http://page") as caller:
        assert (await caller.post("/documents/add", content=b"x")).status_code == 400
        query = {"tab": "one", "batch": "b", "name": "ä & b.md", "size": "9"}
        assert (await caller.post("/documents/add", params=query, content=b"# Text\n\nA.")).status_code == 204
        assert (await caller.post("/documents/add", params={**query, "name": "a.exe"})).status_code == 415
        problem = {**query, "name": "a.md", "problem": "folder"}
        assert (await caller.post("/documents/add", params=problem)).status_code == 204
        assert (await caller.get("/documents/add", params=query)).status_code == 405
        room = desk.back.rooms.of("one")
        await settled(room)
        assert [(read.name, read.state) for read in room.reads.values()] == [
            ("ä & b.md", "read"),
            ("a.exe", "failed"),
            ("a.md", "failed"),
        ]
        assert (await caller.get("/summary.md", params={"tab": "one"})).status_code == 404
        await desk.summarise(request(), "short", "", "", None, None)
        await until(lambda: bool(room.summing and room.summing.state == "done"))
        answer = await caller.get("/summary.md", params={"tab": "one"})
        assert answer.status_code == 200
        assert "filename*=UTF-8''%C3%A4%20%26%20b.summary.md" in answer.headers["content-disposition"]
        assert room.summing
        assert answer.text == room.summing.markdown()
        assert (await caller.get("/summary.md", params={"tab": "two"})).status_code == 404


# Choosing and removing ---------------------------------------------------------------------------


async def test_one_several_and_all_can_be_chosen(desk: Desk) -> None:
    room = await put(desk, a="One.", b="Two.", c="Three.")
    a, b, c = room.picked
    assert "2 documents" in (await press(desk, "pick", b))["head"]
    assert room.picked == (a, c)
    assert "Choose one or more" in (await press(desk, "none"))["head"]
    await press(desk, "pick", b)
    assert room.picked == (b,)
    assert "b.txt" in (await press(desk, "all"))["listed"]
    assert set(room.picked) == {a, b, c}


async def test_only_what_has_changed_is_drawn(desk: Desk) -> None:
    room = await put(desk, a="One.")
    seen, *_ = await desk.open(request())
    again = await desk.refresh(request(), seen)
    assert again[0] == seen
    assert all(part == gr.skip() for part in again[1:])
    room.tell(1, said="otherwise")
    changed = by_part(await desk.refresh(request(), seen))
    assert [part for part, value in changed.items() if value != gr.skip()] == ["reads"]


async def test_removal_asks_first_and_takes_everything(desk: Desk) -> None:
    room = await put(desk, a=FACT, b="Two.")
    other = await put(desk, tab="two", batch="x", a=FACT)
    await ask(desk, "Which code?")
    await ask(desk, "Which code?", "two")
    assert other.talk()
    asked = await press(desk, "remove")
    assert "Remove 2 documents" in asked["head"]
    assert len(desk.papers.library.rows()) == 2
    assert "Remove 2 documents from" not in (await press(desk, "remove-no"))["head"]
    await press(desk, "remove-yes")  # nobody asked
    assert len(desk.papers.library.rows()) == 2
    await press(desk, "remove")
    parts = await press(desk, "remove-yes")
    assert desk.papers.library.rows() == []
    assert "No documents yet" in parts["listed"]
    assert (room.picked, other.picked) == ((), ())
    assert not room.talks
    assert not other.talks
    assert "QUARTZ" not in json.dumps(await shown(desk, "two"), default=str)


async def test_what_is_made_of_a_document_ends_before_it_is_removed(desk: Desk) -> None:
    desk.service.model.delay_s = 0.2  # type: ignore[attr-defined]
    room = await put(desk, a=FACT)
    other = await put(desk, tab="two", batch="x", a=FACT)
    await desk.summarise(request("two"), "short", "", "", None, None)
    question = desk.ask(request("two"), "Which code?", None, None)
    await anext(question)
    await anext(question)
    room.is_removing = True
    await press(desk, "remove-yes")
    assert other.summing is None
    _ = [values async for values in question]
    assert not other.talks
    assert desk.papers.library.rows() == []
    assert desk.service.model.n_closed_early == 2  # type: ignore[attr-defined]


async def test_a_document_that_went_elsewhere_is_not_chosen_any_more(desk: Desk) -> None:
    room = await put(desk, a=FACT)
    desk.papers.library.remove(*room.picked)
    assert "Choose one or more" in (await shown(desk))["head"]
    assert room.picked == ()


# Questions ---------------------------------------------------------------------------------------


async def test_an_answer_grows_and_shows_what_it_rests_on(desk: Desk) -> None:
    text = "Before it.\n" * 100 + FACT + "\nAfter it." * 100
    room = await put(desk, a=text)
    frames = await ask(desk, "Which code?")
    assert frames[0][0].stop_btn == "Stop"
    assert "Which code?" in frames[0][1]
    assert any("QUARTZ" in str(frame[1]) for frame in frames[1:-1])
    last = by_part(frames[-1])
    assert frames[-1][0].submit_btn == "Ask"
    assert frames[-1][1] == ""
    html = last["talk"]
    assert f"<mark>{FACT}</mark>" in html
    assert "Before it." in html.split("<mark>")[0]
    assert "After it." in html.split("</mark>")[1]
    assert 'class="cite" data-n="1"' in html
    assert "Read whole" in html
    assert "\n" not in html
    # The page that it stands on opens, the quote marked.
    citation = room.talk()[0].answer.citations[0]  # type: ignore[union-attr]
    ref = f"{citation.document_id}/{citation.page}/{citation.start}/{citation.end}"
    assert f'data-ref="{ref}"' in html
    assert f"<mark>{FACT}</mark>" in (await press(desk, "page", ref))["page"]
    assert (await press(desk, "page-close"))["page"] == ""


async def test_a_quote_that_is_not_there_is_marked(desk: Desk) -> None:
    desk.service.model.pieces = ('It is so: "Nobody ever wrote these words" [1].',)  # type: ignore[attr-defined]
    await put(desk, a=FACT)
    html = by_part((await ask(desk, "Which code?"))[-1])["talk"]
    assert 'class="citation unverified"' in html
    assert "not found" in html
    assert "<mark>" not in html
    assert "Nothing in the documents was found that supports this answer." in html


async def test_passages_and_what_was_not_read_are_told(desk: Desk) -> None:
    desk.service.model.n_ctx = 1024  # type: ignore[attr-defined]
    await put(desk, a="\n\n".join(f"Paragraph {n} says nothing at all." for n in range(900)) + "\n\n" + FACT)
    html = by_part((await ask(desk, "Which harbour code?"))[-1])["talk"]
    assert "read</summary>" in html
    assert "passage" in html
    assert "Read whole" not in html
    unread = (Unread(EVIL, 3, "no text"), Unread(EVIL, 4, "no text"), Unread("b.txt", 0, "it is locked"))
    told = documents_view.turn(Turn("?", "Text", Answer("Text", "whole", not_read=unread, is_cut=True)))
    assert "pages 3–4 not read: no text" in told
    assert "b.txt: not read: it is locked" in told
    assert "cut off" in told
    assert "<img" not in told


async def test_the_next_question_knows_the_last_one_of_the_same_documents(desk: Desk) -> None:
    model = desk.service.model
    room = await put(desk, a=FACT, b="Two.")
    await ask(desk, "Which code?")
    await ask(desk, "And why?")
    messages = model.calls[-1][0]  # type: ignore[attr-defined]
    assert [message.role for message in messages] == ["system", "user", "assistant", "user"]
    assert "Which code?" in messages[1].content
    both = room.picked
    room.pick(both[:1])
    assert room.talk() == ()
    await ask(desk, "Another one?")
    assert len(model.calls[-1][0]) == 2  # type: ignore[attr-defined]
    room.pick(both[::-1])
    assert [turn.question for turn in room.talk()] == ["Which code?", "And why?"]
    html = (await shown(desk))["talk"]
    assert html.index("And why?") < html.index("Which code?")


async def test_two_tabs_do_not_mix(desk: Desk) -> None:
    one, two = await put(desk, a=FACT), await put(desk, tab="two", b="Two.")
    await ask(desk, "Only mine?")
    await desk.summarise(request(), "short", "", "", None, None)
    await until(lambda: bool(one.summing and one.summing.state == "done"))
    assert two.talk() == ()
    theirs = await shown(desk, "two")
    assert "Only mine?" not in theirs["talk"]
    assert theirs["summary"] == ""
    assert "a.txt" not in theirs["reads"] + theirs["head"]


async def test_a_question_without_documents_or_words(desk: Desk) -> None:
    assert await ask(desk, "  ") == []
    ((question, _, *rest),) = await ask(desk, "Why?")
    assert question == gr.skip()  # what was written stays
    assert "No document is chosen." in by_part(rest)["said"]
    assert desk.room(request()).run is None
    parts = by_part(await desk.summarise(request(), "short", "", "", None, None))
    assert "No document is chosen." in parts["said"]


async def test_an_answer_can_be_stopped_and_there_is_one_at_a_time(desk: Desk) -> None:
    model: Any = desk.service.model
    model.pieces, model.delay_s = tuple(f"word{n} " for n in range(500)), 0.02
    room = await put(desk, a=FACT)
    frames = []
    async for frame in desk.ask(request(), "Long?", None, None):
        frames.append(frame)
        if "word3" in str(frame[1]) and room.run and not room.run.stop.is_set():
            assert await ask(desk, "Another?") == []
            desk.stop(request())
    assert model.n_closed_early == 1
    (turn,) = room.talk()
    assert "word3" in turn.text
    assert turn.note == "Stopped."
    assert "Stopped." in by_part(frames[-1])["talk"]
    assert desk.stop(request()).submit_btn == "Ask"  # nothing is running: the field is put right


async def test_a_page_that_goes_away_ends_its_answer(desk: Desk) -> None:
    model: Any = desk.service.model
    model.pieces, model.delay_s = tuple(f"word{n} " for n in range(500)), 0.02
    room = await put(desk, a=FACT)
    asking = desk.ask(request(), "Long?", None, None)
    async for frame in asking:
        if "word1" in str(frame[1]):
            break
    await asking.aclose()
    assert model.n_closed_early == 1
    assert room.run is None
    assert "word1" in room.talk()[0].text


async def test_a_model_that_fails_is_told_with_the_question(desk: Desk) -> None:
    desk.service.model.refusal = EngineError(f"It died {EVIL}.")  # type: ignore[attr-defined]
    await put(desk, a=FACT)
    html = by_part((await ask(desk, "Which code?"))[-1])["talk"]
    assert "It died &lt;img" in html
    assert "<img" not in html


async def test_what_came_before_a_restart_is_taken_back(desk: Desk) -> None:
    desk.service.model.pieces = ("thinking aloud", "</think>", "The answer.")  # type: ignore[attr-defined]
    room = await put(desk, a=FACT)
    await ask(desk, "Which code?")
    assert room.talk()[0].text == "The answer."


async def test_a_long_page_is_shown_in_part(desk: Desk) -> None:
    room = await put(desk, a="word " * 40_000)
    page = page_of(desk.papers, f"{room.picked[0]}/1")
    assert page.is_cut
    assert len(page.text) == 20_000
    assert "Only this part" in documents_view.page(page)
    near = page_of(desk.papers, f"{room.picked[0]}/1/100000/100004")
    assert near.quote
    assert near.quote.quote == desk.papers.library.document(room.picked[0]).text[100_000:100_004]
    for bad in ("x", "999/1", "1/2/3"):
        assert (await press(desk, "page", bad))["said"]


# Summaries ---------------------------------------------------------------------------------------


async def test_a_summary_with_its_record(desk: Desk) -> None:
    model: Any = desk.service.model
    model.pieces = (f"All of it {EVIL} [x](http://evil.example).",)
    room = await put(desk, a=FACT)
    parts = by_part(await desk.summarise(request(), "long", " the  code ", "German", None, None))
    assert "Stop" in parts["summary"]
    assert "a.txt" in parts["summary"]
    await until(lambda: bool(room.summing and room.summing.state == "done"))
    wish = model.calls[-1][0][-1].content
    assert "the code" in wish
    assert "German" in wish
    html = (await shown(desk))["summary"]
    assert "1 of 1 page read, 1 of 1 pieces" in html
    assert 'href="summary.md?tab=one" download' in html
    assert html.count("href=") == 1
    assert "<img" not in html
    assert "\n" not in html


async def test_several_documents_have_one_each_and_one_over_all(desk: Desk) -> None:
    room = await put(desk, a=FACT, b="Two.", c="Three.")
    n_before = len(desk.service.model.calls)  # type: ignore[attr-defined]
    await desk.summarise(request(), "short", "", "", None, None)
    await desk.summarise(request(), "short", "", "", None, None)  # one at a time
    summing = room.summing
    assert summing
    await until(lambda: summing.state == "done")
    assert len(desk.service.model.calls) - n_before == 4  # type: ignore[attr-defined]
    assert [made.name for _, made in summing.made] == [name for _, name in summing.documents]
    html = (await shown(desk))["summary"]
    assert html.count('class="covered"') == 3
    assert "All documents" in html
    assert summing.markdown().startswith("# All documents\n")


async def test_a_summary_shows_how_far_it_is_and_can_be_stopped(desk: Desk) -> None:
    model: Any = desk.service.model
    room = await put(
        desk, a="\n\n".join(f"Paragraph {n} has some words in it." for n in range(2000)), b="Two."
    )
    model.n_ctx, model.delay_s = 1500, 0.05
    await desk.summarise(request(), "short", "", "", None, None)
    summing = room.summing
    assert summing
    await until(lambda: bool(summing.progress and 0 < summing.progress.n_done < summing.progress.n_parts))
    html = (await shown(desk))["summary"]
    assert 'role="progressbar"' in html
    assert " left" in html
    assert "(1 of 2)" in html or "(2 of 2)" in html
    stopped = (await press(desk, "stop-summary"))["summary"]
    assert summing.state == "stopped"
    assert "goes on from there" in stopped
    n_before = len(model.calls)
    await asyncio.sleep(0.2)
    assert len(model.calls) == n_before
    model.delay_s = 0.0
    await desk.summarise(request(), "short", "", "", None, None)
    await until(lambda: bool(room.summing and room.summing.state == "done"))
    assert "kept from an earlier run" in (await shown(desk))["summary"]


async def test_a_summary_that_fails_says_why(desk: Desk) -> None:
    desk.service.model.refusal = EngineError(f"It died {EVIL}.")  # type: ignore[attr-defined]
    room = await put(desk, a=FACT, b="Two.")
    await desk.summarise(request(), "short", "", "", None, None)
    await until(lambda: bool(room.summing and room.summing.state == "failed"))
    html = (await shown(desk))["summary"]
    assert html.count("It died &lt;img") == 2
    assert "download" not in html


def test_the_record_as_a_bar_and_in_words() -> None:
    covered = Coverage(1000, tuple(n for n in range(1, 1001) if n != 500), (NotRead(500, EVIL),), 9, 8)
    html = documents_view.coverage(EVIL, covered, "in 3 s")
    assert "999 of 1,000 pages read, 8 of 9 pieces, in 3 s" in html
    assert html.count('class="skipped"') == 1
    assert html.count('class="read"') == 2
    assert "page 500 not read:" in html
    assert "<img" not in html
    whole = Coverage(3, (1, 2, 3), (), 1, 1)
    assert "skipped" not in documents_view.coverage("a", whole, "")
    assert unread_lines([(2, "a"), (0, "b"), (3, "a")], "slide") == ["slides 2–3 not read: a", "not read: b"]


# What is remembered ------------------------------------------------------------------------------


def test_what_is_remembered_is_bounded() -> None:
    rooms = Rooms()
    busy = rooms.of("busy")
    busy.tasks[1] = None  # type: ignore[assignment]
    for n in range(3 * N_ROOMS):
        rooms.of(str(n))
    assert len(list(rooms.all())) == N_ROOMS
    assert rooms.of("busy") is busy
    room = Room()
    for n in range(3 * N_TURNS):
        room.keep(frozenset({1}), Turn(str(n)))
        room.keep(frozenset({n + 2}), Turn(str(n)))
    room.pick([1])
    assert [turn.question for turn in room.talk()] == [str(n) for n in range(2 * N_TURNS, 3 * N_TURNS)]
    assert len(room.talks) < N_TURNS
