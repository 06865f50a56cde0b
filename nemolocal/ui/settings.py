"""The side panel of settings. It begins with the model's own; the browser remembers what was changed.
Handlers first, then `build`, which draws, and `wire`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from typing import Any

import gradio as gr

from nemolocal.errors import NemoLocalError
from nemolocal.service import Service
from nemolocal.types import SamplingParams
from nemolocal.ui.options import Options, changed, defaults, overlaid

STORAGE_KEY = "nemolocal.settings"
START = Options()


@dataclass(frozen=True, slots=True)
class Panel:
    """The panel's components, in the order of `Options`, the button that resets them, and what the browser
    keeps of them."""

    fields: list[gr.components.Component]
    reset: gr.Button
    kept: gr.BrowserState


def base(service: Service, ref: str | None) -> Options:
    """The settings that a model comes with."""
    try:
        return defaults(service.sampling_defaults(ref))
    except NemoLocalError:  # no such model: whoever asks it something is told so
        return defaults(SamplingParams())


def to_keep(service: Service, ref: str | None, *values: Any) -> dict[str, Any]:
    """What the browser keeps of the panel's values."""
    return changed(given(service, ref, *values), base(service, ref))


def given(service: Service, ref: str | None, *values: Any) -> Options:
    """The panel's values as they were sent. A field that was emptied, or that the page has not drawn yet,
    comes without a value and is as the model has it."""
    names = [field.name for field in fields(Options)]
    return overlaid(base(service, ref), dict(zip(names, values, strict=True)))


def restored(service: Service, ref: str | None, kept: Any) -> list[Any]:
    """The panel's values for a model: its own, but for what was changed."""
    return list(astuple(overlaid(base(service, ref), kept)))


def build() -> Panel:
    """Draw the panel."""
    gr.Markdown("## Settings", elem_id="settings-title")
    system = gr.Textbox(
        label="System prompt",
        lines=4,
        max_lines=12,
        placeholder="You are a helpful assistant.",
        info="Read before every answer. Empty leaves the model's own.",
        elem_id="system-prompt",
    )
    panel: list[gr.components.Component] = [system]
    with gr.Column(elem_classes="settings-group"):
        panel += [
            _slider("Temperature", "temperature", 0, 2, 0.05, "Lower is steadier, higher is more varied."),
            _slider("Top P", "top_p", 0, 1, 0.01, "Only the likeliest tokens that make up this share."),
            _slider("Top K", "top_k", 0, 200, 1, "Only this many of the likeliest tokens. 0: no limit."),
            _slider(
                "Min P", "min_p", 0, 1, 0.01, "Leaves out what is less likely than this share of the best."
            ),
        ]
    with gr.Column(elem_classes="settings-group"):
        panel += [
            gr.Number(
                START.max_tokens,
                label="Longest answer",
                info="In tokens. 0: up to the context.",
                precision=0,
                elem_id="max-tokens",
            ),
            gr.Number(
                START.seed,
                label="Seed",
                info="The same seed gives the same answer. Empty: a fresh one each time.",
                precision=0,
                elem_id="seed",
            ),
        ]
    with gr.Accordion("Repetition and stop strings", open=False, elem_classes="settings-more"):
        panel += [
            _slider("Repeat penalty", "repeat_penalty", 0.5, 2, 0.05, "1: none."),
            _slider("Presence penalty", "presence_penalty", -2, 2, 0.1, "0: none."),
            _slider("Frequency penalty", "frequency_penalty", -2, 2, 0.1, "0: none."),
            gr.Textbox(
                label="Stop strings", lines=2, max_lines=6, info="One a line.", elem_id="stop-strings"
            ),
        ]
    reset = gr.Button("Back to the model's own", size="sm", variant="secondary", elem_id="reset-settings")
    # The secret only scrambles what the browser stores in its own profile; it guards nothing.
    return Panel(panel, reset, gr.BrowserState({}, storage_key=STORAGE_KEY, secret=STORAGE_KEY))


def wire(service: Service, panel: Panel, picker: gr.Dropdown, opened: Callable[..., Any]) -> None:
    """Connect the panel; `opened` adds what follows on a page that was opened and filled."""
    quietly: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}

    def show(ref: str | None, kept: Any) -> list[Any]:
        return restored(service, ref, kept)

    def keep(ref: str | None, *values: Any) -> dict[str, Any]:
        return to_keep(service, ref, *values)

    def forget(ref: str | None) -> list[Any]:
        return [*restored(service, ref, {}), {}]

    opened(show, [picker, panel.kept], panel.fields, **quietly)
    picker.change(show, [picker, panel.kept], panel.fields, **quietly)  # the Models tab chooses, too
    panel.reset.click(forget, picker, [*panel.fields, panel.kept], **quietly)
    edits = [field.input for field in panel.fields]  # type: ignore[attr-defined]
    gr.on(edits, keep, [picker, *panel.fields], panel.kept, trigger_mode="always_last", **quietly)


def _slider(label: str, name: str, low: float, high: float, step: float, info: str) -> gr.Slider:
    return gr.Slider(low, high, value=getattr(START, name), step=step, label=label, info=info, elem_id=name)
