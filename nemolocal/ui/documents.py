"""The Documents tab: add documents, ask them, have them summarised, take them away. Handlers first, then
`build`, which draws and wires them. Files come in by `uploads.py`; what is shown is in documents_view.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

import gradio as gr

from nemolocal.documents.answer import Answer, AnswerDelta
from nemolocal.documents.citations import Citation
from nemolocal.documents.library import Row
from nemolocal.documents.parts import Document
from nemolocal.documents.summarise import Length, Options
from nemolocal.errors import UsageError
from nemolocal.papers import Papers
from nemolocal.service import Service
from nemolocal.ui import documents_view, drawn, status
from nemolocal.ui.answer import BEAT_S, DRAW_EVERY_S
from nemolocal.ui.intake import Intake
from nemolocal.ui.pace import in_batches
from nemolocal.ui.problems import as_problem
from nemolocal.ui.rooms import PageText, Quoted, Room, Rooms, Turn, history
from nemolocal.ui.status import Meter
from nemolocal.ui.summing import Summaries
from nemolocal.ui.tabs import STOPPED, Run

REFRESH_EVERY_S: Final = 1.0
N_AROUND: Final = 400
"""Letters that are shown before and after a quote."""
N_PAGE: Final = 20_000
"""Letters of a page that are shown at once."""
N_ANSWERS: Final = 32
"""Answers that all pages together may be writing at once."""
PARTS: Final = ("reads", "listed", "head", "talk", "summary", "page", "said")
LENGTHS: Final[list[tuple[str, Length]]] = [("Short", "short"), ("Medium", "medium"), ("Long", "long")]


def busy(**changes: Any) -> gr.Textbox:
    """The question's field while an answer is written: it can be stopped."""
    return gr.Textbox(submit_btn=False, stop_btn="Stop", **changes)


def ready(**changes: Any) -> gr.Textbox:
    return gr.Textbox(submit_btn="Ask", stop_btn=False, **changes)


@dataclass(frozen=True, slots=True)
class Back:
    """What is done beside the page for all tabs, and what is remembered of them."""

    papers: Papers
    rooms: Rooms
    intake: Intake
    summaries: Summaries

    async def close(self) -> None:
        await self.intake.close()
        await self.summaries.close()


def back_of(service: Service) -> Back:
    return Back(service.papers, Rooms(), Intake(service.papers), Summaries(service.papers))


class Desk:
    """The handlers. All but those for a question give the same values: what was seen, then a value for each
    of PARTS, left out where nothing has changed."""

    def __init__(self, service: Service, back: Back) -> None:
        self.service = service
        self.back = back

    @property
    def papers(self) -> Papers:
        return self.service.papers

    def room(self, request: gr.Request) -> Room:
        return self.back.rooms.of(tab_of(request))

    async def _drawn(self, request: gr.Request, seen: object) -> list[Any]:
        """What is seen by now, and the parts that have changed since `seen`."""
        room = self.room(request)
        try:
            found = await asyncio.to_thread(self.papers.library.rows)
        except Exception as error:  # the page's border
            room.say(as_problem(error))
            found = []
        known = {row.id for row in found}
        if gone := [id for id in room.picked if id not in known]:  # removed elsewhere
            room.forget(gone)
        marks, listing = room.marks, tuple(row.id for row in found)
        keys: dict[str, object] = {
            "reads": marks["reads"],
            "listed": (listing, marks["picked"]),
            "head": (listing, marks["picked"]),
            "talk": (marks["talk"], marks["picked"]),
            "summary": marks["summary"],
            "page": marks["page"],
            "said": marks["said"],
        }
        before = seen if isinstance(seen, dict) else {}
        parts = documents_view.all_of(room, found, tab_of(request))
        changed = [parts[part] if before.get(part) != keys[part] else gr.skip() for part in PARTS]
        return [keys, *changed]

    async def open(self, request: gr.Request) -> list[Any]:
        """The tab was opened: everything is drawn."""
        return await self._drawn(request, None)

    async def refresh(self, request: gr.Request, seen: object) -> list[Any]:
        """What has changed by itself."""
        return await self._drawn(request, seen)

    # Pressed buttons -----------------------------------------------------------------------------

    async def press(self, request: gr.Request, press: str, seen: object) -> list[Any]:
        """One of the drawn buttons."""
        act, ref = drawn.pressed(press)
        room = self.room(request)
        room.say("")
        try:
            await self._do(room, act, ref)
        except Exception as error:  # the page's border
            room.say(as_problem(error))
        return await self._drawn(request, seen)

    async def _do(self, room: Room, act: str, ref: str) -> None:
        match act:
            case "pick":
                id = int(ref)
                room.pick(
                    [each for each in room.picked if each != id] if id in room.picked else [*room.picked, id]
                )
            case "all":
                room.pick([row.id for row in await asyncio.to_thread(self.papers.library.rows)])
            case "none":
                room.pick([])
            case "remove" | "remove-no":
                room.is_removing = act == "remove"
                room.touch("picked")
            case "remove-yes":
                await self._remove(room)
            case "stop-read":
                self.back.intake.stop(room, int(ref))
            case "clear-reads":
                self.back.intake.clear(room)
            case "stop-summary":
                await self.back.summaries.stop(room)
            case "page":
                room.page = await asyncio.to_thread(page_of, self.papers, ref)
                room.touch("page")
            case "page-close":
                room.page = None
                room.touch("page")

    async def _remove(self, room: Room) -> None:
        """Delete what is chosen. What is being made of it, in whichever tab, ends first, so that nothing of
        it is written once it is gone."""
        ids = room.picked if room.is_removing else ()
        for other in self.back.rooms.all():
            if other.run and other.asked & set(ids):
                other.run.stop.set()
            if other.summing and set(ids) & set(other.summing.ids):
                await self.back.summaries.stop(other)
        await asyncio.to_thread(self.papers.library.remove, *ids)
        for other in self.back.rooms.all():
            other.forget(ids)

    async def unlock(self, request: gr.Request, password: str, seen: object) -> list[Any]:
        """Read again with a password what needs one. A value for its field, then those of the rest."""
        room = self.room(request)
        if password:
            self.back.intake.unlock(room, password)
        return ["", *await self._drawn(request, seen)]

    async def summarise(
        self, request: gr.Request, length: Length, focus: str, language: str, *rest: Any
    ) -> list[Any]:
        """Begin to summarise what is chosen; `rest` is the model and what was seen."""
        ref, seen = rest
        room = self.room(request)
        try:
            rows = await self._picked(room)
            room.say("")
            options = Options(length, " ".join(focus.split()), " ".join(language.split()))
            self.back.summaries.begin(room, rows, options, ref)
        except Exception as error:  # the page's border
            room.say(as_problem(error))
        return await self._drawn(request, seen)

    async def _picked(self, room: Room) -> list[Row]:
        found = await asyncio.to_thread(self.papers.library.rows)
        picked = [row for row in found if row.id in room.picked]
        if not picked:
            raise UsageError("No document is chosen.", hint="Choose one or more of the list.")
        return picked

    # Questions: values for the field and for the answer that is being written, then those of the rest --

    async def ask(
        self, request: gr.Request, question: str, ref: str | None, seen: object
    ) -> AsyncGenerator[list[Any], None]:
        """Ask what is chosen, and show the answer as it comes."""
        room = self.room(request)
        if not question.strip() or room.run:
            return
        run = room.run = Run()
        try:
            await self._picked(room)
        except Exception as error:  # the page's border
            room.run = None
            room.say(as_problem(error))
            yield [gr.skip(), gr.skip(), *await self._drawn(request, seen)]
            return
        room.say("")
        chosen = room.asked = frozenset(room.picked)
        turn = Turn(question.strip(), note=STOPPED)
        said = history(room.talk())
        stream = self.papers.ask(turn.question, ids=room.picked, ref=ref, history=said)
        try:
            shown = await self._drawn(request, seen)
            yield [busy(value=""), documents_view.growing(turn, self._waiting(0.0)), *shown]
            async with aclosing(self._turns(turn, stream, run)) as turns:
                async for turn, waiting in turns:
                    yield [gr.skip(), documents_view.growing(turn, waiting), *[gr.skip()] * len(shown)]
        finally:
            # Also where the page is gone: what was written until then stays.
            room.run = None
            if room.asked == chosen:  # else its documents were removed meanwhile
                room.keep(chosen, turn)
            run.ended.set()
        yield [ready(), "", *await self._drawn(request, shown[0])]

    async def _turns(
        self, turn: Turn, stream: AsyncGenerator[AnswerDelta | Answer, None], run: Run
    ) -> AsyncGenerator[tuple[Turn, str], None]:
        """The turn as it grows, and what is going on before its first word. Never raises: a problem is the
        last one's note."""
        began_s = time.monotonic()
        try:
            paced = in_batches(stream, every_s=DRAW_EVERY_S, beat_s=BEAT_S, stop=run.stop)
            async with aclosing(paced) as batches:
                async for batch in batches:
                    for item in batch:
                        turn = grown(turn, item)
                    if turn.answer is None:
                        yield turn, self._waiting(time.monotonic() - began_s)
            if turn.answer:
                quoted = await asyncio.to_thread(quotes_of, self.papers, turn.answer.citations)
                turn = replace(turn, quoted=quoted, note="")
        except Exception as error:  # the page's border
            turn = replace(turn, answer=None, quoted=(), note=as_problem(error))
        yield turn, ""

    def _waiting(self, elapsed_s: float) -> str:
        now = self.service.status()
        if now.state == "loading":
            return status.waiting_for(now, Meter("waiting"), elapsed_s)
        return f"Reading, {elapsed_s:.0f} s" if elapsed_s >= 1 else "Reading"

    def stop(self, request: gr.Request) -> Any:
        """End the answer that is being written; it settles the page itself. A value for the field."""
        run = self.room(request).run
        if run is None:  # the page had lost touch with its answer
            return ready()
        run.stop.set()
        return gr.skip()


def tab_of(request: gr.Request) -> str:
    """The id that a tab keeps over reloads."""
    return str(request.query_params.get("tab", "") or request.session_hash)


def grown(turn: Turn, item: AnswerDelta | Answer) -> Turn:
    """The turn with what came from the model."""
    if isinstance(item, Answer):
        return replace(turn, text=item.text, answer=item)
    return replace(turn, text=item.text if item.is_restart else turn.text + item.text)


def quotes_of(papers: Papers, citations: Sequence[Citation]) -> tuple[Quoted | None, ...]:
    """What stands around each citation that was found. Blocks."""
    documents: dict[int, Document] = {}
    found: list[Quoted | None] = []
    for each in citations:
        if not each.verified:
            found.append(None)
            continue
        if each.document_id not in documents:
            documents[each.document_id] = papers.library.document(each.document_id)
        whole = documents[each.document_id].text
        found.append(quoted(whole, each.start, each.end, first=0, last=len(whole), n_around=N_AROUND))
    return tuple(found)


def quoted(whole: str, start: int, end: int, *, first: int, last: int, n_around: int) -> Quoted:
    """A quote with what stands around it, from `first` to `last` at most; an ellipsis where there is more."""
    begin, stop = max(start - n_around, first), min(end + n_around, last)
    before = ("… " if begin > first else "") + whole[begin:start]
    return Quoted(before, whole[start:end], whole[end:stop] + (" …" if stop < last else ""))


def page_of(papers: Papers, ref: str) -> PageText:
    """The page that "document/page" names, or "document/page/start/end" with the quote that is marked.
    Blocks."""
    id, number, *span = map(int, ref.split("/"))
    document = papers.library.document(id)
    on_it = [
        (start, start + len(block.text))
        for start, block in zip(document.starts, document.blocks, strict=True)
        if block.page <= number <= block.last_page
    ]
    first, last = (on_it[0][0], on_it[-1][1]) if on_it else (0, 0)
    where, is_cut = document.where(number), last - first > N_PAGE
    if span and first <= span[0] <= span[1] <= last:
        shown = quoted(document.text, *span, first=first, last=last, n_around=N_PAGE // 2)
        return PageText(document.name, where, "", shown, is_cut)
    text = document.text[first : min(last, first + N_PAGE)]
    return PageText(document.name, where, text or "There is no text on it.", None, is_cut)


@dataclass(frozen=True, slots=True)
class View:
    """The tab's components; `parts` in the order of PARTS."""

    seen: gr.State
    parts: list[gr.Markdown]
    now: gr.Markdown
    password: gr.Textbox
    unlock: gr.Button
    question: gr.Textbox
    length: gr.Radio
    focus: gr.Textbox
    language: gr.Textbox
    summarise: gr.Button
    presses: gr.Textbox


def build(service: Service, back: Back, opened: gr.Button, chosen: gr.Dropdown) -> gr.Timer:
    """Draw the tab and wire it; it is filled when `opened` is pressed. `chosen` is the model that is asked.
    Returns the timer that is to run while the tab is seen."""
    view, desk = _draw(), Desk(service, back)
    timer = gr.Timer(REFRESH_EVERY_S, active=False)
    _wire(desk, view, opened, timer, chosen)
    return timer


def _draw() -> View:
    made: dict[str, gr.Markdown] = {}
    with gr.Row(elem_id="documents-body"):
        with gr.Column(elem_id="documents-list-side", scale=2):
            drawn.html(documents_view.drop(), elem_id="documents-drop")
            made["reads"] = drawn.html(elem_id="documents-reads")
            with gr.Row(elem_id="documents-unlock"):
                password = gr.Textbox(
                    label="Password of the document", type="password", placeholder="Its password",
                    show_label=False, container=False,
                )  # fmt: skip
                unlock = gr.Button("Read again", size="sm")
            made["listed"] = drawn.html(elem_id="documents-list")
        with gr.Column(elem_id="documents-detail-side", scale=3):
            made["said"] = drawn.html(elem_id="documents-said")
            made["head"] = drawn.html(documents_view.NOTHING_PICKED, elem_id="documents-head")
            made["page"] = drawn.html(elem_id="documents-page")
            with gr.Tabs(elem_id="documents-ways"):
                with gr.Tab("Ask", elem_id="documents-ask"):
                    question = gr.Textbox(
                        label="Your question about the documents", placeholder="Ask the chosen documents",
                        show_label=False, container=False, lines=1, max_lines=8, submit_btn="Ask",
                        elem_id="documents-question",
                        html_attributes=gr.InputHTMLAttributes(enterkeyhint="send"),
                    )  # fmt: skip
                    now = drawn.html(elem_id="documents-now")
                    made["talk"] = drawn.html(elem_id="documents-talk")
                with gr.Tab("Summarise", elem_id="documents-summarise"):
                    with gr.Row(elem_id="documents-options"):
                        length = gr.Radio(LENGTHS, value="medium", label="Length", elem_id="documents-length")
                        focus = gr.Textbox(label="Focus", placeholder="what matters most", max_lines=3)
                        language = gr.Textbox(label="Language", placeholder="the document's own", max_lines=1)
                        summarise = gr.Button("Summarise", variant="primary", elem_id="documents-begin")
                    made["summary"] = drawn.html(elem_id="documents-summary")
    return View(
        gr.State(None), [made[part] for part in PARTS], now, password, unlock, question, length, focus,
        language, summarise, drawn.presses("documents-presses"),
    )  # fmt: skip


_quietly: dict[str, Any] = {
    "show_progress": "hidden",
    "api_visibility": "private",
    "concurrency_limit": drawn.N_AT_ONCE,
}


def _wire(desk: Desk, view: View, opened: gr.Button, timer: gr.Timer, chosen: gr.Dropdown) -> None:
    shown = [view.seen, *view.parts]
    opened.click(desk.open, None, shown, **_quietly)
    timer.tick(desk.refresh, view.seen, shown, **_quietly)
    view.presses.change(desk.press, [view.presses, view.seen], shown, trigger_mode="multiple", **_quietly)
    gr.on(
        [view.unlock.click, view.password.submit],
        desk.unlock,
        [view.password, view.seen],
        [view.password, *shown],
        **_quietly,
    )
    gr.on(
        [view.summarise.click, view.focus.submit, view.language.submit],
        desk.summarise,
        [view.length, view.focus, view.language, chosen, view.seen],
        shown,
        **_quietly,
    )
    view.question.submit(
        desk.ask,
        [view.question, chosen, view.seen],
        [view.question, view.now, *shown],
        **{**_quietly, "concurrency_limit": N_ANSWERS},
    )
    view.question.stop(desk.stop, None, view.question, queue=False, **_quietly)
