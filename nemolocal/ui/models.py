"""The Models tab: choose, download, load, delete; how a model would be loaded. Handlers first, then `build`,
which draws and wires them. What they draw is in models_view.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr

from nemolocal.errors import NemoLocalError, UsageError
from nemolocal.models.fits import Fit
from nemolocal.service import Service
from nemolocal.shelf import Shelf
from nemolocal.ui import drawn, models_view, picker
from nemolocal.ui.problems import as_problem
from nemolocal.ui.status import notice

REFRESH_EVERY_S = 1.0
SHOWN = [("All", "all"), ("Here", "here"), ("Fits", "fits")]
AS_PLANNED = "as planned"


@dataclass(frozen=True, slots=True)
class Look:
    """What one page looks at: the chosen model or repository, what the list shows, the words looked for, what
    is to be confirmed ("act ref"), and whether what the hub found is shown in place of the list."""

    ref: str = ""
    shown: str = "all"
    words: str = ""
    asking: str = ""
    is_hub: bool = False


@dataclass(frozen=True, slots=True)
class Fields:
    """How a model is to be loaded, in the order of the page's components; empty where the plan decides. What
    the page has not drawn yet comes as None."""

    ctx: float | None = None
    slots: float | None = None
    kv: str = AS_PLANNED
    aim: str = AS_PLANNED
    split: str = AS_PLANNED
    gpu_layers: float | None = None
    gpu: str = ""
    draft: str = ""
    lora: str = ""

    def values(self) -> dict[str, Any]:
        """The settings that they stand for. Raises UsageError for figures that are no whole numbers."""
        found: dict[str, Any] = {}
        for name in ("ctx", "slots", "gpu_layers"):
            number = getattr(self, name)
            if number is not None:
                if number != int(number) or number < 0:
                    raise UsageError(f"{name} is {number:g}.", hint="Give a whole number from 0 up.")
                found[name] = int(number)
        for name in ("kv", "aim", "split"):
            if getattr(self, name) not in (AS_PLANNED, None):
                found[name] = getattr(self, name)
        for name in ("gpu", "lora"):
            parts = [part.strip() for part in (getattr(self, name) or "").split(",") if part.strip()]
            if parts:
                found[name] = parts
        draft = (self.draft or "").strip()
        return found | ({"draft": draft} if draft else {})


def fields_of(kept: dict[str, Any]) -> list[Any]:
    """The fields as they show what is kept for a model."""
    return [
        kept.get("ctx") or None,
        kept.get("slots") or None,
        kept.get("kv", AS_PLANNED),
        kept.get("aim", AS_PLANNED),
        kept.get("split", AS_PLANNED),
        kept.get("gpu_layers"),
        ", ".join(kept.get("gpu", ())),
        kept.get("draft", ""),
        ", ".join(kept.get("lora", ())),
    ]


class Desk:
    """The handlers; they block, so gradio runs them in threads of their own."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @property
    def shelf(self) -> Shelf:
        return self.service.shelf

    def listed(self, look: Look) -> str:
        """The list as HTML, or what the hub has for the words."""
        try:
            if look.is_hub:
                return models_view.hits(self.shelf.search(look.words), look.words)
            entries = self.shelf.entries()
        except Exception as error:  # the page's border
            return notice(as_problem(error))
        return models_view.entries(entries, chosen=look.ref, shown=look.shown, words=look.words)

    def detail(self, look: Look, *fields: Any) -> str:
        """The chosen model or repository as HTML."""
        try:
            return self._detail(look, Fields(*fields).values() if fields else None)
        except Exception as error:  # the page's border
            return notice(as_problem(error))

    def _detail(self, look: Look, values: dict[str, Any] | None) -> str:
        if not look.ref:
            return models_view.NOTHING
        shelf = self.shelf
        downloads = {each.ref: each for each in shelf.downloads.all()}
        loaded = self._loaded()
        if look.ref.startswith("hf:"):
            found = shelf.repo(look.ref)
            fit = shelf.fit(look.ref, values)
            here = {card: card for card in self._here()}
            return models_view.repo(
                found,
                fit,
                shelf.hardware(),
                downloads=downloads,
                here=here,
                loaded=loaded,
                asking=look.asking,
            )
        entry = shelf.entry(look.ref)
        if entry is None:
            return models_view.NOTHING
        return models_view.model(
            entry,
            self._fit(look.ref, entry.fit, values),
            shelf.hardware(),
            downloads=downloads,
            loaded=loaded,
            asking=look.asking,
        )

    def _fit(self, ref: str, usual: Fit | None, values: dict[str, Any] | None) -> Fit | None:
        return usual if usual is None else self.shelf.fit(ref, values)

    def _loaded(self) -> list[str]:
        """References of what is in memory, however it is named."""
        return [name for model in self.service.loaded() for name in (model.id, model.ref)]

    def _here(self) -> list[str]:
        return [file.ref for entry in self.shelf.entries() for file in entry.model.files if file.local]

    # Pressed buttons: values for look, list, detail, notice, and the fields of how it is loaded ------

    async def press(self, press: str, look: Look, *fields: Any) -> AsyncGenerator[list[Any], None]:
        """One of the drawn buttons."""
        act, ref = drawn.pressed(press)
        keep = [gr.skip()] * len(fields)
        try:
            if act == "open":
                look = replace(look, ref=ref, asking="")
                shown = fields_of(await asyncio.to_thread(self.shelf.kept_settings, ref))
                yield [look, gr.skip(), '<p class="quiet">Looking…</p>', "", *shown]
                detail = await asyncio.to_thread(self.detail, look, *shown)
                yield [look, await asyncio.to_thread(self.listed, look), detail, "", *shown]
                return
            if act == "load":
                async for said in self._load(look, ref, fields):
                    yield [look, gr.skip(), gr.skip(), said, *keep]
            else:
                look = await self._do(act, ref, look)
            problem = ""
        except Exception as error:  # the page's border
            problem = notice(as_problem(error))
        detail = await asyncio.to_thread(self.detail, look, *fields)
        is_list_changed = act in ("load", "unload", "delete-yes")
        found = await asyncio.to_thread(self.listed, look) if is_list_changed else gr.skip()
        yield [look, found, detail, problem, *keep]

    async def _do(self, act: str, ref: str, look: Look) -> Look:
        """What needs no telling while it goes on. Raises what it raised."""
        downloads, shelf = self.shelf.downloads, self.shelf
        match act:
            case "download":
                if self._must_ask(ref):
                    return replace(look, asking=f"download {ref}")
                downloads.start(ref)
            case "download-yes":
                downloads.start(ref)
            case "pause":
                downloads.pause(ref)
            case "cancel":
                await asyncio.to_thread(downloads.cancel, ref)
            case "delete":
                return replace(look, asking=f"delete {ref}")
            case "delete-yes":
                await self.service.unload(ref)
                await asyncio.to_thread(shelf.remove, ref)
            case "unload":
                await self.service.unload(ref)
        return replace(look, asking="")

    def _must_ask(self, ref: str) -> bool:
        entry = self.shelf.entry(ref.partition(":")[0])
        return bool(entry and entry.model.listed and entry.model.listed.must_accept)

    async def _load(self, look: Look, ref: str, fields: tuple[Any, ...]) -> AsyncGenerator[str, None]:
        """Load a model with the fields' settings, which are kept for it."""
        values = Fields(*fields).values()
        name = look.ref if not look.ref.startswith("hf:") else ref
        if values != await asyncio.to_thread(self.shelf.kept_settings, name):
            await asyncio.to_thread(self.shelf.keep_settings, name, values)
        async for state in picker.load(self.service, ref):
            yield f'<p class="quiet">Loading {state.progress:.0%}</p>' if state.state == "loading" else ""

    async def refresh(self, look: Look, *fields: Any) -> list[Any]:
        """Values for list and detail while a download goes on, else nothing new."""
        if not any(each.state in ("running", "waiting") for each in self.shelf.downloads.all()):
            return [gr.skip(), gr.skip()]
        if look.ref.startswith("hf:"):
            return [gr.skip(), gr.skip()]  # drawing it asks the hub
        return [gr.skip(), await asyncio.to_thread(self.detail, look, *fields)]

    def find(self, words: str | None, shown: str, look: Look) -> list[Any]:
        """Other words or another part of the list. Values for look and list."""
        look = replace(look, words=words or "", shown=shown, is_hub=False)
        return [look, self.listed(look)]

    def find_on_hub(self, words: str | None, look: Look) -> list[Any]:
        look = replace(look, words=words or "", is_hub=bool(words and words.strip()))
        return [look, self.listed(look)]

    def import_(self, path: str | None, look: Look) -> list[Any]:
        """Values for path, look, list, detail and notice."""
        try:
            if not path or not path.strip():
                raise UsageError("No path was given.", hint="Write the path of a .gguf file.")
            ref = self.shelf.import_path(path.strip())
        except Exception as error:  # the page's border
            return [gr.skip(), look, gr.skip(), gr.skip(), notice(as_problem(error))]
        look = replace(look, ref=ref.partition(":")[0], is_hub=False)
        return ["", look, self.listed(look), self.detail(look), ""]

    def keep(self, look: Look, *fields: Any) -> list[Any]:
        """Keep the fields for the chosen model. Values for detail and notice."""
        try:
            self.shelf.keep_settings(look.ref, Fields(*fields).values())
        except NemoLocalError as error:
            return [gr.skip(), notice(as_problem(error))]
        return [self.detail(look, *fields), '<p class="quiet">Kept for this model.</p>']

    def forget(self, look: Look) -> list[Any]:
        """Values for detail, notice and the fields."""
        if look.ref:
            self.shelf.keep_settings(look.ref, {})
        return [self.detail(look), "", *fields_of({})]


def build(service: Service, opened: gr.Button) -> gr.Timer:
    """Draw the tab and wire it; it is filled when `opened` is pressed. Returns the timer that is to run while
    it is seen."""
    desk = Desk(service)
    look = gr.State(Look())
    with gr.Row(elem_id="models-body"):
        with gr.Column(elem_id="models-list-side", scale=2):
            words = gr.Textbox(
                label="Look for", placeholder="nemotron, code, 8b …", elem_id="models-words", container=False
            )
            with gr.Row(elem_id="models-narrow"):
                shown = gr.Radio(SHOWN, value="all", label="Show", show_label=False, container=False)
                on_hub = gr.Button("Look on the hub", size="sm", elem_id="models-on-hub")
            found = drawn.html(elem_id="models-list")
            with gr.Row(elem_id="models-import"):
                path = gr.Textbox(
                    label="A .gguf file on this machine", placeholder="/path/to/model.gguf", container=False
                )
                add = gr.Button("Add", size="sm")
        with gr.Column(elem_id="models-detail-side", scale=3):
            said = drawn.html(elem_id="models-said")
            detail = drawn.html(models_view.NOTHING, elem_id="models-detail")
            presses = drawn.presses("models-presses")
            with gr.Accordion("How it is loaded", open=False, elem_id="models-settings"):
                fields = _draw_fields()
                with gr.Row():
                    kept = gr.Button("Keep for this model", size="sm")
                    usual = gr.Button("Let the plan decide", size="sm")
    quietly: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    presses.change(
        desk.press,
        [presses, look, *fields],
        [look, found, detail, said, *fields],
        concurrency_limit=16,
        **quietly,
    )
    gr.on(
        [words.change, shown.change],
        desk.find,
        [words, shown, look],
        [look, found],
        trigger_mode="always_last",
        **quietly,
    )
    gr.on([words.submit, on_hub.click], desk.find_on_hub, [words, look], [look, found], **quietly)
    opened.click(desk.listed, look, found, **quietly)
    gr.on([add.click, path.submit], desk.import_, [path, look], [path, look, found, detail, said], **quietly)
    changes = [field.change for field in fields]  # type: ignore[attr-defined]
    gr.on(changes, desk.detail, [look, *fields], detail, trigger_mode="always_last", **quietly)
    kept.click(desk.keep, [look, *fields], [detail, said], **quietly)
    usual.click(desk.forget, look, [detail, said, *fields], **quietly)
    timer = gr.Timer(REFRESH_EVERY_S, active=False)
    timer.tick(desk.refresh, [look, *fields], [found, detail], queue=False, **quietly)
    return timer


def _draw_fields() -> list[gr.components.Component]:
    with gr.Row():
        ctx = gr.Number(label="Context", info="Tokens. Empty: as planned.", precision=0, minimum=0)
        slots = gr.Number(label="Answers at a time", info="Empty: as planned.", precision=0, minimum=0)
        layers = gr.Number(label="Layers on the GPUs", info="Empty: all that fit.", precision=0, minimum=0)
    with gr.Row():
        kv = gr.Dropdown([AS_PLANNED, "f16", "q8_0", "q4_0"], value=AS_PLANNED, label="KV cache")
        aim = gr.Dropdown([AS_PLANNED, "balanced", "quality", "speed"], value=AS_PLANNED, label="Aim")
        split = gr.Dropdown([AS_PLANNED, "layer", "tensor"], value=AS_PLANNED, label="Split over GPUs")
    with gr.Row():
        gpu = gr.Textbox(label="GPUs", info="Numbers or UUIDs, with commas. Empty: all.")
        draft = gr.Textbox(label="Draft model", info="A small model that guesses ahead; off for none.")
        lora = gr.Textbox(label="LoRA adapters", info="FILE or FILE:SCALE, with commas.")
    return [ctx, slots, kv, aim, split, layers, gpu, draft, lora]
