"""The model picker. Handlers first, then `build`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import gradio as gr

from nemolocal import units
from nemolocal.errors import NemoLocalError
from nemolocal.service import ModelCard, Service, Status

PROGRESS_EVERY_S = 0.2


def label(card: ModelCard) -> str:
    """A model as the picker names it, such as "SmolLM2 135M · Q4_1 · 98 MB"."""
    parts = [card.name or card.id, card.quant, units.size(card.size_bytes) if card.size_bytes else ""]
    return " · ".join(part for part in parts if part)


def choices(service: Service) -> list[tuple[str, str]]:
    """The models on this machine that chat as (label, id), the loaded one first."""
    return [(label(card), card.id) for card in service.list_models() if card.purpose == "chat"]


def selected(service: Service) -> str | None:
    """The model that a new page shows as chosen: the loaded one, else the configured one, else the first."""
    ids = [id for _, id in choices(service)]
    wanted = (service.status().model, service.config.settings.model)
    return next((ref for ref in wanted if ref in ids), ids[0] if ids else None)


def name_of(service: Service, ref: str) -> str:
    """What the service calls the model of a reference; the reference itself where it knows none."""
    try:
        return service.find_model(ref).id
    except NemoLocalError:
        return ref


def showing(service: Service, ref: str) -> Any:
    """The picker with this model as the chosen one, where it is one that chats; else as it is."""
    found, name = choices(service), name_of(service, ref)
    return gr.Dropdown(choices=found, value=name) if name in [id for _, id in found] else gr.skip()


async def load(service: Service, ref: str) -> AsyncGenerator[Status, None]:
    """Load a model; yields how far it is. Raises what the load raised. The load goes on when the page is
    closed meanwhile."""
    loading = asyncio.create_task(service.load(ref))
    _LOADS.add(loading)
    loading.add_done_callback(_LOADS.discard)
    while not loading.done():
        yield service.status()
        await asyncio.wait({loading}, timeout=PROGRESS_EVERY_S)
    loading.result()
    yield service.status()


# The event loop holds its tasks weakly, so that a load whose page is gone could vanish.
_LOADS: set[asyncio.Task[None]] = set()


def build() -> gr.Dropdown:
    """Draw the picker; it is filled when a page opens. What choosing does is wired by the chat, whose status
    line shows the progress."""
    return gr.Dropdown(
        choices=[],
        value=None,
        label="Model",
        show_label=False,
        container=False,
        filterable=True,
        elem_id="model-picker",
        min_width=220,
    )
