"""The fields that say how a model is to be loaded: what they stand for, and how they are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from nemolocal.errors import UsageError
from nemolocal.ui.problems import FIELDS

AS_PLANNED = "as planned"
_WORDS = {
    "ctx": "The context",
    "slots": "Answers at a time",
    "gpu_layers": "Layers on the GPUs",
    "margin_mib": "Left free on each GPU",
}


@dataclass(frozen=True, slots=True)
class Fields:
    """How a model is to be loaded, in the order of the page's components; empty where the plan decides. What
    the page has not drawn yet comes as None."""

    ctx: float | None = None
    slots: float | None = None
    kv: str | None = AS_PLANNED
    aim: str | None = AS_PLANNED
    split: str | None = AS_PLANNED
    gpu_layers: float | None = None
    gpu: str | None = ""
    draft: str | None = ""
    lora: str | None = ""
    margin_mib: float | None = None

    def values(self) -> dict[str, Any]:
        """The settings that they stand for. Raises UsageError for figures that are no whole numbers."""
        found: dict[str, Any] = {}
        for name, words in _WORDS.items():
            number = getattr(self, name)
            if number is not None:
                if number != int(number) or number < 0:
                    raise UsageError(f"{words}: {number:g}.", hint="Give a whole number from 0 up.")
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
        kept.get("margin_mib"),
    ]


def draw() -> list[gr.components.Component]:
    """The components, in the order of `Fields`."""
    with gr.Row():
        ctx = gr.Number(label=FIELDS["ctx"], info="Tokens. Empty: as planned.", precision=0, minimum=0)
        slots = gr.Number(label=FIELDS["slots"], info="Empty: as planned.", precision=0, minimum=0)
        layers = gr.Number(label=FIELDS["gpu-layers"], info="Empty: all that fit.", precision=0, minimum=0)
    with gr.Row():
        kv = gr.Dropdown(
            [AS_PLANNED, "f16", "q8_0", "q4_0"], value=AS_PLANNED, label=FIELDS["kv"], filterable=False
        )
        aim = gr.Dropdown(
            [AS_PLANNED, "balanced", "quality", "speed"],
            value=AS_PLANNED,
            label=FIELDS["aim"],
            filterable=False,
        )
        split = gr.Dropdown(
            [AS_PLANNED, "layer", "tensor"], value=AS_PLANNED, label=FIELDS["split"], filterable=False
        )
    with gr.Row():
        gpu = gr.Textbox(label=FIELDS["gpu"], info="Numbers or UUIDs, with commas. Empty: all.")
        draft = gr.Textbox(label=FIELDS["draft"], info="A small model that guesses ahead; off for none.")
        lora = gr.Textbox(label=FIELDS["lora"], info="FILE or FILE:SCALE, with commas.")
        margin = gr.Number(label=FIELDS["margin-mib"], info="MiB. Empty: as planned.", precision=0, minimum=0)
    return [ctx, slots, kv, aim, split, layers, gpu, draft, lora, margin]
