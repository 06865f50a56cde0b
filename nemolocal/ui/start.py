"""The first start: above the chat, the model that fits this machine, while the starter answers already.
Handlers first, then `build`."""

from __future__ import annotations

import asyncio
from typing import Any

import gradio as gr

from nemolocal.models import catalog
from nemolocal.service import Service
from nemolocal.shelf import Proposal
from nemolocal.ui import drawn, models_view
from nemolocal.ui.problems import as_problem
from nemolocal.ui.status import notice

REFRESH_EVERY_S = 2.0


class Desk:
    """What is proposed is looked up once for each page, since it takes a look at the hardware."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def open(self) -> list[Any]:
        """Values for the proposal and its HTML."""
        try:
            found = self.service.shelf.proposal()
        except Exception as error:  # the page's border; no proposal is no misfortune
            as_problem(error)
            found = None
        return [found, self._draw(found)]

    async def press(self, press: str, found: Proposal | None) -> list[Any]:
        """One of its buttons. Values for the proposal and its HTML."""
        act, ref = drawn.pressed(press)
        try:
            if act == "download-yes" and found and ref in (found.ref, catalog.STARTER):
                self.service.shelf.downloads.start(ref)
            elif act == "load" and found and ref == found.ref:
                await self.service.load(ref)
                found = None
            elif act == "dismiss":
                found = None
        except Exception as error:  # the page's border
            return [found, notice(as_problem(error))]
        return [found, self._draw(found)]

    async def refresh(self, found: Proposal | None) -> Any:
        """The HTML while it is being downloaded."""
        running = (
            [self.service.shelf.downloads.get(ref) for ref in (found.ref, catalog.STARTER)] if found else []
        )
        if not any(running):
            return gr.skip()
        return await asyncio.to_thread(self._draw, found)

    def _draw(self, found: Proposal | None) -> str:
        downloads = self.service.shelf.downloads
        return models_view.proposal(
            found, downloads.get(found.ref) if found else None, downloads.get(catalog.STARTER)
        )


def build(service: Service, page: gr.Blocks) -> None:
    """Draw the proposal and wire it; it is looked up when the page is opened."""
    desk = Desk(service)
    quietly: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    found = gr.State(None)
    shown = drawn.html(elem_id="proposal")
    presses = drawn.presses("proposal-presses")
    page.load(desk.open, None, [found, shown], **quietly)
    presses.change(desk.press, [presses, found], [found, shown], **quietly)
    timer = gr.Timer(REFRESH_EVERY_S, active=False)
    presses.change(lambda: gr.Timer(active=True), None, timer, queue=False, **quietly)
    timer.tick(desk.refresh, found, shown, queue=False, **quietly)
