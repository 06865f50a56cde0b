"""The Models tab: choose, download, load, delete; how a model would be loaded. Handlers first, then `build`,
which draws and wires them. What they show is put together in models_sight.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr

from nemolocal.errors import NemoLocalError, UsageError
from nemolocal.service import Service
from nemolocal.ui import drawn, load_fields, models_view, picker
from nemolocal.ui.load_fields import Fields, fields_of
from nemolocal.ui.models_sight import Look, Sight, listed_id, must_accept
from nemolocal.ui.problems import as_problem
from nemolocal.ui.status import notice
from nemolocal.ui.turns import Turns
from nemolocal.ui.works import What, Work, Works

REFRESH_EVERY_S = 1.0
SHOWN = [("All", "all"), ("Here", "here"), ("Fits", "fits")]
KEPT = '<p class="quiet">Kept for this model.</p>'


class Desk:
    """The handlers. Those that draw block, so gradio runs them in threads of their own."""

    def __init__(self, service: Service, works: Works) -> None:
        self.service = service
        self.works = works
        self.sight = Sight(service, works)
        self.turns = Turns()

    # Looking -------------------------------------------------------------------------------------

    def open(self, look: Look, *fields: Any) -> list[Any]:
        """The tab was opened. Values for list, detail, files, now and notice."""
        try:
            self.service.shelf.downloads.find_begun()
        except Exception as error:  # the page's border; what was begun is not what the tab is for
            as_problem(error)
        return [self.sight.listed(look), *self.redraw(look, *fields)[:2], self.sight.now(look), ""]

    def find(self, words: str | None, shown: str, look: Look) -> list[Any]:
        """Other words or another part of the list; what was asked of the hub for the same words stays. Values
        for look and list."""
        if look.is_hub and look.words == (words or "") and look.shown == shown:
            return [gr.skip(), gr.skip()]
        look = replace(look, words=words or "", shown=shown, is_hub=False)
        return [look, self.sight.listed(look)]

    def find_on_hub(self, words: str | None, look: Look) -> Generator[list[Any], None, None]:
        """The same words on the hub. Yields values for look and list."""
        look = replace(look, words=words or "", is_hub=bool(words and words.strip()))
        if look.is_hub:
            yield [look, models_view.ASKING_HUB]
        yield [look, self.sight.listed(look)]

    def redraw(self, look: Look, *fields: Any) -> list[Any]:
        """Other load settings. Values for detail, files and notice."""
        try:
            values = Fields(*fields).values()
        except NemoLocalError as error:
            return [gr.skip(), gr.skip(), notice(as_problem(error))]
        return [*self.sight.chosen(look, values), ""]

    async def refresh(self, request: gr.Request, look: Look, seen: object, *fields: Any) -> list[Any]:
        """What has changed by itself, unless the person has done something meanwhile, which shows more.
        Values for seen, list, detail, files and now."""
        turn, skipped = self.turns.now(request), [gr.skip()] * 5
        try:
            shown = await asyncio.to_thread(self._refreshed, look, seen, fields)
        except Exception as error:  # the page's border; whoever caused it was told already
            as_problem(error)
            return skipped
        return shown if shown and self.turns.now(request) == turn else skipped

    def _refreshed(self, look: Look, seen: object, fields: tuple[Any, ...]) -> list[Any]:
        state = self.sight.state()
        if state != seen:
            detail, files, _ = self.redraw(look, *fields)
            return [state, self.sight.listed(look), detail, files, self.sight.now(look)]
        if not self.sight.is_moving():
            return []
        return [gr.skip(), gr.skip(), gr.skip(), self._files(look, fields), self.sight.now(look)]

    def _files(self, look: Look, fields: tuple[Any, ...]) -> Any:
        """The chosen model's files, or what is shown of them where they cannot be told just now."""
        try:
            return self.sight.files(look, Fields(*fields).values())
        except Exception as error:  # the page's border; whoever caused it was told already
            as_problem(error)
            return gr.skip()

    # Pressed buttons: values for look, list, detail, files, now, notice, picker, and the fields -----

    async def press(
        self, request: gr.Request, press: str, look: Look, *fields: Any
    ) -> AsyncGenerator[list[Any], None]:
        """One of the drawn buttons. What it shows is left out where another was pressed meanwhile."""
        act, ref = drawn.pressed(press)
        turn = self.turns.next(request)
        keep = [gr.skip()] * len(fields)
        try:
            if act in ("open", "close"):
                look = replace(look, ref=ref, file="", asking="")
                keep = fields_of(await asyncio.to_thread(self._kept, ref))
                if ref.startswith("hf:"):
                    yield [look, gr.skip(), models_view.ASKING_HUB, "", gr.skip(), "", gr.skip(), *keep]
                found = await asyncio.to_thread(self.sight.listed, look)
                detail, files, said = await asyncio.to_thread(self.redraw, look, *keep)
                shown = [look, found, detail, files, gr.skip(), said, gr.skip(), *keep]
            elif act == "file":
                look = replace(look, file="" if look.file == ref else ref, asking="")
                detail, files, said = await asyncio.to_thread(self.redraw, look, *fields)
                shown = [look, gr.skip(), detail, files, gr.skip(), said, gr.skip(), *keep]
            else:
                shown = [*await self._acted(act, ref, look, fields), *keep]
        except Exception as error:  # the page's border
            problem = notice(as_problem(error))
            shown = [look, gr.skip(), gr.skip(), gr.skip(), self.sight.now(look), problem, gr.skip(), *keep]
        if self.turns.now(request) == turn:
            yield shown

    async def _acted(self, act: str, ref: str, look: Look, fields: tuple[Any, ...]) -> list[Any]:
        look = await self._do(act, ref, look, fields)
        is_load = act in ("load", "load-kept", "reload")
        chat = await asyncio.to_thread(picker.showing, self.service, ref) if is_load else gr.skip()
        files = await asyncio.to_thread(self._files, look, fields)
        return [look, gr.skip(), gr.skip(), files, self.sight.now(look), "", chat]

    async def _do(self, act: str, ref: str, look: Look, fields: tuple[Any, ...]) -> Look:
        """Begin what was asked for, or ask whether it is meant. Raises what beginning raised."""
        downloads = self.service.shelf.downloads
        if act in ("delete", "cancel") or (act == "download" and must_accept(ref)):
            return replace(look, asking=f"{act} {ref}")
        match act:
            case "download" | "download-yes":
                downloads.start(ref)
            case "pause":
                downloads.pause(ref)
            case "cancel-yes":
                await asyncio.to_thread(downloads.cancel, ref)
            case "load" | "reload":
                values = Fields(*fields).values()
                if values != await asyncio.to_thread(self._kept, look.ref):
                    await asyncio.to_thread(self._keep, look.ref, values)
                self._begin("load", ref, is_again=act == "reload")
            case "load-kept":
                self._begin("load", ref)
            case "unload":
                self._begin("unload", ref)
            case "delete-yes":
                self._begin("delete", ref)
            case "clear":
                self.works.clear(ref)
        return replace(look, asking="")

    def _begin(self, what: What, ref: str, *, is_again: bool = False) -> None:
        async def job() -> None:
            if what != "load" or is_again:
                await self.service.unload(ref)
            if what == "load":
                await self.service.load(ref)
            if what == "delete":
                await asyncio.to_thread(self.service.shelf.remove, ref)

        self.works.begin(Work(what, ref, picker.name_of(self.service, ref)), job)

    # Load settings and files ---------------------------------------------------------------------

    def _kept(self, ref: str) -> dict[str, Any]:
        """What is kept for a model, or for the one of its files that has settings of its own."""
        if not ref:
            return {}
        shelf, id = self.service.shelf, listed_id(ref)
        found = (shelf.kept_settings(each) for each in (*self.sight.here(id), id))
        return next(filter(None, found), {})

    def _keep(self, ref: str, values: dict[str, Any]) -> None:
        """Keep load settings for a model as a whole, in place of those of single files."""
        shelf, id = self.service.shelf, listed_id(ref)
        for each in self.sight.here(id):
            shelf.keep_settings(each, {})
        shelf.keep_settings(id, values)

    def keep(self, look: Look, *fields: Any) -> list[Any]:
        """Keep the fields for the chosen model. Values for detail, files and notice."""
        try:
            if not look.ref:
                raise UsageError("No model is chosen.", hint="Choose one of the list.")
            self._keep(look.ref, Fields(*fields).values())
        except Exception as error:  # the page's border
            return [gr.skip(), gr.skip(), notice(as_problem(error))]
        return [*self.redraw(look, *fields)[:2], KEPT]

    def forget(self, look: Look) -> list[Any]:
        """Values for detail, files, notice and the fields."""
        fields = fields_of({})
        try:
            if look.ref:
                self._keep(look.ref, {})
        except Exception as error:  # the page's border
            return [gr.skip(), gr.skip(), notice(as_problem(error)), *fields]
        return [*self.redraw(look, *fields), *fields]

    def import_(self, path: str | None, look: Look) -> list[Any]:
        """Add a file where it lies. Values for path, what is said beside it, look, list, detail, files and
        notice."""
        try:
            if not path or not path.strip():
                raise UsageError("No path was given.", hint="Write the path of a .gguf file.")
            ref = self.service.shelf.import_path(path.strip().strip("\"'"))
        except Exception as error:  # the page's border
            problem = notice(as_problem(error))
            return [gr.skip(), problem, gr.skip(), gr.skip(), gr.skip(), gr.skip(), gr.skip()]
        look = replace(look, ref=self.sight.listed_as(ref), file="", asking="", is_hub=False)
        return ["", "", look, self.sight.listed(look), *self.sight.chosen(look, None), ""]


@dataclass(frozen=True, slots=True)
class View:
    """The tab's components."""

    look: gr.State
    seen: gr.State
    words: gr.Textbox
    shown: gr.Radio
    on_hub: gr.Button
    found: gr.Markdown
    path: gr.Textbox
    add: gr.Button
    added: gr.Markdown
    now: gr.Markdown
    said: gr.Markdown
    detail: gr.Markdown
    files: gr.Markdown
    presses: gr.Textbox
    fields: list[gr.components.Component]
    keep: gr.Button
    usual: gr.Button


def build(service: Service, works: Works, opened: gr.Button, chat_picker: gr.Dropdown) -> gr.Timer:
    """Draw the tab and wire it; it is filled when `opened` is pressed. A model that is loaded becomes the one
    of the chat's picker. Returns the timer that is to run while the tab is seen."""
    view, desk = _draw(), Desk(service, works)
    timer = gr.Timer(REFRESH_EVERY_S, active=False)
    _wire_looks(desk, view, opened, timer)
    _wire_acts(desk, view, chat_picker)
    return timer


def _draw() -> View:
    look, seen = gr.State(Look()), gr.State(())
    now = drawn.html(elem_id="models-now")
    with gr.Row(elem_id="models-body"):
        with gr.Column(elem_id="models-list-side", scale=2):
            words = gr.Textbox(
                label="Look for models", placeholder="nemotron, code, 8b, OWNER/REPO …",
                elem_id="models-words", show_label=False, container=False,
            )  # fmt: skip
            with gr.Row(elem_id="models-narrow"):
                shown = gr.Radio(SHOWN, value="all", label="Show", show_label=False, container=False)
                on_hub = gr.Button("Look on the hub", size="sm", elem_id="models-on-hub")
            with gr.Row(elem_id="models-import"):
                path = gr.Textbox(
                    label="A .gguf file on this machine", placeholder="a file here: /path/to/model.gguf",
                    show_label=False, container=False,
                )  # fmt: skip
                add = gr.Button("Add", size="sm")
            added = drawn.html(elem_id="models-added")
            found = drawn.html(elem_id="models-list")
        with gr.Column(elem_id="models-detail-side", scale=3):
            said = drawn.html(elem_id="models-said")
            detail = drawn.html(models_view.NOTHING, elem_id="models-detail")
            files = drawn.html(elem_id="models-files")
            with gr.Accordion("How it is loaded", open=False, elem_id="models-settings"):
                fields = load_fields.draw()
                with gr.Row():
                    keep = gr.Button("Keep for this model", size="sm")
                    usual = gr.Button("Let the plan decide", size="sm")
            presses = drawn.presses("models-presses")
    return View(
        look, seen, words, shown, on_hub, found, path, add, added, now, said, detail, files, presses, fields,
        keep, usual,
    )  # fmt: skip


def _in_turn(desk: Desk, act: Callable[..., Any]) -> Callable[..., Any]:
    """An act of the person's, which counts more than what has changed by itself."""

    def acting(request: gr.Request, *values: Any) -> Any:
        desk.turns.next(request)
        return act(*values)

    return acting


_quietly: dict[str, Any] = {
    "show_progress": "hidden",
    "api_visibility": "private",
    "concurrency_limit": drawn.N_AT_ONCE,
}


def _wire_looks(desk: Desk, view: View, opened: gr.Button, timer: gr.Timer) -> None:
    shown = [view.detail, view.files, view.said]
    gr.on(
        [view.words.submit, view.on_hub.click],
        desk.find_on_hub,
        [view.words, view.look],
        [view.look, view.found],
        **_quietly,
    )
    gr.on(
        [view.words.change, view.shown.change],
        desk.find,
        [view.words, view.shown, view.look],
        [view.look, view.found],
        trigger_mode="always_last",
        **_quietly,
    )
    opened.click(
        desk.open,
        [view.look, *view.fields],
        [view.found, view.detail, view.files, view.now, view.said],
        **_quietly,
    )
    # Of a text, gradio tells an input before it has its new value.
    edits = [f.change if isinstance(f, gr.Textbox) else f.input for f in view.fields]  # type: ignore[attr-defined]
    redraw = _in_turn(desk, desk.redraw)
    gr.on(edits, redraw, [view.look, *view.fields], shown, trigger_mode="always_last", **_quietly)
    timer.tick(
        desk.refresh,
        [view.look, view.seen, *view.fields],
        [view.seen, view.found, view.detail, view.files, view.now],
        **_quietly,
    )


def _wire_acts(desk: Desk, view: View, chat_picker: gr.Dropdown) -> None:
    shown = [view.detail, view.files, view.said]
    view.presses.change(
        desk.press,
        [view.presses, view.look, *view.fields],
        [view.look, view.found, view.detail, view.files, view.now, view.said, chat_picker, *view.fields],
        trigger_mode="multiple",
        **_quietly,
    )
    gr.on(
        [view.add.click, view.path.submit],
        _in_turn(desk, desk.import_),
        [view.path, view.look],
        [view.path, view.added, view.look, view.found, *shown],
        **_quietly,
    )
    view.keep.click(_in_turn(desk, desk.keep), [view.look, *view.fields], shown, **_quietly)
    view.usual.click(_in_turn(desk, desk.forget), view.look, [*shown, *view.fields], **_quietly)
