"""The chat: a conversation with one model. Handlers first, then `build`, which draws and wires them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import gradio as gr

from nemolocal import config
from nemolocal.service import Service
from nemolocal.ui import conversation, picker, status
from nemolocal.ui.answer import Frame, answer
from nemolocal.ui.conversation import Chat
from nemolocal.ui.markup import LATEX_DELIMITERS, unguarded
from nemolocal.ui.problems import as_problem
from nemolocal.ui.settings import given
from nemolocal.ui.status import Meter
from nemolocal.ui.tabs import Tabs

N_ANSWERS = 32
"""Answers that all pages together may be writing at once; the engine has no more slots than this."""
EMPTY = """## What shall we work on?

The model runs on this machine. Nothing you write leaves it."""
REFRESH_EVERY_S = 2.0
"""How often the status line looks at the service while nothing is being written."""


def busy(**changes: Any) -> gr.Textbox:
    """The composer while an answer is written: it can be stopped."""
    return gr.Textbox(submit_btn=False, stop_btn="Stop", **changes)


def ready(**changes: Any) -> gr.Textbox:
    """The composer at rest."""
    return gr.Textbox(submit_btn="Send", stop_btn=False, **changes)


def starters() -> list[dict[str, str]]:
    """The prompts that an empty conversation offers."""
    found = json.loads(config.resource("assets/starters.json").read_text(encoding="utf-8"))
    return [{"text": starter["text"], "display_text": starter["title"]} for starter in found]


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts of the page around the chat that it takes part in; `panel` holds the settings in the order
    of `Options`."""

    page: gr.Blocks
    picker: gr.Dropdown
    new: gr.Button
    panel: Sequence[gr.components.Component]


@dataclass(frozen=True, slots=True)
class View:
    """The chat's components."""

    chat: gr.State
    tab: gr.State
    meter: gr.State
    messages: gr.Chatbot
    composer: gr.Textbox
    status: gr.Markdown
    notice: gr.Markdown


class Desk:
    """The handlers, with the service and the open tabs that they share. A question is first put into the
    conversation (`send`, `start`, `retry`, `edit`: values for chat, messages, composer) and then answered
    (`reply`)."""

    def __init__(self, service: Service, tabs: Tabs) -> None:
        self.service = service
        self.tabs = tabs

    def send(self, request: gr.Request, question: str, chat: Chat) -> list[Any]:
        """Take what stands in the composer, unless an answer is being written."""
        if not question.strip() or self.tabs.running(session_of(request)):
            return [gr.skip(), gr.skip(), gr.skip()]
        return put(conversation.sent(chat, question), value="")

    def start(self, request: gr.Request, event: gr.SelectData, chat: Chat) -> list[Any]:
        """Take one of the prompts that an empty conversation offers."""
        return [*self.send(request, event.value["text"], chat)[:2], gr.skip()]

    def retry(self, request: gr.Request, chat: Chat) -> list[Any]:
        """Take the last question again."""
        if not chat or self.tabs.running(session_of(request)):
            return [gr.skip(), gr.skip(), gr.skip()]
        return put(conversation.retried(chat))

    def edit(self, request: gr.Request, event: gr.EditData, chat: Chat) -> list[Any]:
        """Take a question in its new wording; what came after it is gone. An empty one changes nothing."""
        question, turn = unguarded(str(event.value)), conversation.turn_at(chat, int(event.index))  # type: ignore[arg-type]
        if not question.strip() or self.tabs.running(session_of(request)):
            return [gr.skip(), conversation.display(chat), gr.skip()]
        return put(conversation.edited(chat, turn, question))

    def undo(self, request: gr.Request, tab: str, chat: Chat) -> list[Any]:
        """Take the last question back into the composer, and its answer away."""
        if not chat or self.tabs.running(session_of(request)):
            return [gr.skip(), gr.skip(), gr.skip()]
        chat, question = conversation.undone(chat)
        self.tabs.keep(tab, chat)
        return [chat, conversation.display(chat), question]

    async def reply(
        self, request: gr.Request, chat: Chat, tab: str, ref: str | None, *options: Any
    ) -> AsyncGenerator[list[Any], None]:
        """Answer the question that waits, if one does. Yields values for chat, messages, composer, meter,
        status and notice."""
        session = session_of(request)
        run = self.tabs.begin(session) if conversation.is_waiting(chat) else None
        if run is None:
            return
        earlier, is_first = conversation.display(chat[:-1]), True
        try:
            frames = answer(self.service, chat, given(self.service, ref, *options), ref=ref, stop=run.stop)
            async with aclosing(frames):
                async for frame in frames:
                    self.tabs.keep(tab, frame.chat)
                    yield self._drawn(frame, earlier, is_first=is_first)
                    is_first = False
        finally:
            self.tabs.end(session)

    def _drawn(self, frame: Frame, earlier: list[dict[str, Any]], *, is_first: bool) -> list[Any]:
        return [
            frame.chat,
            earlier + conversation.shown(frame.chat[-1], waiting=frame.waiting),
            ready() if frame.is_last else busy() if is_first else gr.skip(),
            frame.meter,
            status.line(self.service.status(), frame.meter),
            status.notice(frame.problem) if is_first or frame.problem else gr.skip(),
        ]

    async def stop(self, request: gr.Request) -> Any:
        """End the answer that is being written; it settles the page itself. A value for the composer."""
        run = self.tabs.running(session_of(request))
        if run is None:  # the page had lost touch with its answer
            return ready()
        run.stop.set()
        await run.ended.wait()
        return gr.skip()

    async def new(self, request: gr.Request, tab: str) -> list[Any]:
        """Begin an empty conversation. Values for chat, messages, composer, meter, status and notice."""
        await self.stop(request)
        self.tabs.keep(tab, ())
        return [(), [], ready(), Meter(), status.line(self.service.status(), Meter()), ""]

    def refresh(self, request: gr.Request, meter: Meter) -> Any:
        """The status line while nothing is being written."""
        if self.tabs.running(session_of(request)):
            return gr.skip()
        return status.line(self.service.status(), meter)

    async def choose(self, ref: str | None, meter: Meter) -> AsyncGenerator[list[Any], None]:
        """Load the model that was picked. Yields values for status and notice."""
        if not ref:
            return
        yield [status.line(self.service.status(), meter), ""]
        try:
            async for state in picker.load(self.service, ref):
                yield [status.line(state, meter), gr.skip()]
        except Exception as error:  # the page's border
            yield [status.line(self.service.status(), meter), status.notice(as_problem(error))]

    def models(self, ref: str | None) -> gr.Dropdown:
        """The picker with the models that are there by now."""
        found = picker.choices(self.service)
        return gr.Dropdown(choices=found, value=ref if ref in [id for _, id in found] else None)

    def open(self, request: gr.Request) -> list[Any]:
        """A page was opened or reloaded. Values for tab, chat, messages, status and the model picker."""
        tab = str(request.query_params.get("tab", ""))
        chat = self.tabs.recall(tab)
        chosen = gr.Dropdown(choices=picker.choices(self.service), value=picker.selected(self.service))
        return [tab, chat, conversation.display(chat), status.line(self.service.status(), Meter()), chosen]


def put(chat: Chat, **changes: Any) -> list[Any]:
    """Values for chat, messages and composer once a question was put."""
    return [chat, conversation.display(chat), busy(**changes)]


def session_of(request: gr.Request) -> str:
    """The load of the page that a request comes from."""
    return str(request.session_hash)


def build(service: Service, tabs: Tabs, shared: Shared) -> gr.events.Dependency:
    """Draw the chat and wire it, together with the parts of the page that it shares. Returns the event that
    fills a page which was opened."""
    view, desk = _draw(), Desk(service, tabs)
    _wire_answers(desk, view, shared)
    return _wire_rest(desk, view, shared)


def _draw() -> View:
    messages = gr.Chatbot(
        label="Conversation",
        show_label=False,
        container=False,
        elem_id="messages",
        height="100%",
        editable="user",
        buttons=["copy"],
        latex_delimiters=LATEX_DELIMITERS,
        placeholder=EMPTY,
        examples=starters(),  # type: ignore[arg-type]
        feedback_options=None,
    )
    # Both lines are escaped where they are made; the sanitizer would take their roles and labels away.
    notice = gr.Markdown(elem_id="notice", container=False, sanitize_html=False)
    with gr.Row(elem_id="composer-row"):
        # Answered by assets/page.js: it opens the Documents tab with what was chosen.
        gr.Button("Add documents", elem_id="attach", min_width=40)
        composer = gr.Textbox(
            label="Your message",
            show_label=False,
            container=False,
            lines=1,
            max_lines=10,
            placeholder="Ask anything",
            submit_btn="Send",
            autofocus=True,
            elem_id="composer",
            html_attributes=gr.InputHTMLAttributes(enterkeyhint="send"),
        )
    return View(
        chat=gr.State(()),
        tab=gr.State(""),
        meter=gr.State(Meter()),
        messages=messages,
        composer=composer,
        status=gr.Markdown(elem_id="status", container=False, sanitize_html=False),
        notice=notice,
    )


# What every event has in common: no endpoint for strangers, no veil over the components that it changes.
_quietly: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


def _wire_answers(desk: Desk, view: View, shared: Shared) -> None:
    asking = [view.chat, view.messages, view.composer]
    questions = [
        view.composer.submit(desk.send, [view.composer, view.chat], asking, queue=False, **_quietly),
        view.messages.example_select(desk.start, view.chat, asking, queue=False, **_quietly),
        view.messages.retry(desk.retry, view.chat, asking, queue=False, **_quietly),
        view.messages.edit(desk.edit, view.chat, asking, queue=False, **_quietly),
    ]
    for question in questions:
        question.success(
            desk.reply,
            [view.chat, view.tab, shared.picker, *shared.panel],
            [*asking, view.meter, view.status, view.notice],
            concurrency_limit=N_ANSWERS,
            concurrency_id="answers",
            **_quietly,
        )
    view.composer.stop(desk.stop, None, view.composer, queue=False, **_quietly)


def _wire_rest(desk: Desk, view: View, shared: Shared) -> gr.events.Dependency:
    view.messages.undo(
        desk.undo, [view.tab, view.chat], [view.chat, view.messages, view.composer], queue=False, **_quietly
    )
    shared.new.click(
        # In the queue, so that it reaches the page after the answer that it ends.
        desk.new,
        view.tab,
        [view.chat, view.messages, view.composer, view.meter, view.status, view.notice],
        concurrency_limit=N_ANSWERS,
        **_quietly,
    )
    shared.picker.select(  # not `input`, which fires twice for one choice
        desk.choose,
        [shared.picker, view.meter],
        [view.status, view.notice],
        concurrency_limit=N_ANSWERS,
        trigger_mode="always_last",
        **_quietly,
    )
    shared.picker.focus(desk.models, shared.picker, shared.picker, queue=False, **_quietly)
    gr.Timer(REFRESH_EVERY_S).tick(desk.refresh, view.meter, view.status, queue=False, **_quietly)
    opened: gr.events.Dependency = shared.page.load(
        desk.open,
        None,
        [view.tab, view.chat, view.messages, view.status, shared.picker],
        concurrency_limit=N_ANSWERS,
        **_quietly,
    )
    return opened
