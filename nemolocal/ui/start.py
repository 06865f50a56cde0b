"""The first start: above the chat, the model that fits this machine, while the starter answers already.
Handlers first, then `build`."""

from __future__ import annotations

import asyncio
from typing import Any

import gradio as gr

from nemolocal.models import catalog
from nemolocal.models.proposal import Proposal
from nemolocal.service import Service
from nemolocal.ui import drawn, picker, start_view
from nemolocal.ui.problems import as_problem
from nemolocal.ui.works import Work, Works

REFRESH_EVERY_S = 2.0


class Desk:
    """What is proposed is looked up once for each page, since it takes a look at the hardware."""

    def __init__(self, service: Service, works: Works) -> None:
        self.service = service
        self.works = works

    def open(self) -> list[Any]:
        """Values for the proposal, its HTML and the timer, which runs while there is one."""
        try:
            self.service.shelf.downloads.find_begun()
            found = self.service.shelf.proposal()
        except Exception as error:  # the page's border; no proposal is no misfortune
            as_problem(error)
            found = None
        if found and self._is_loaded(found):
            found = None
        return [found, self._draw(found), gr.Timer(active=found is not None)]

    def press(self, press: str, found: Proposal | None) -> list[Any]:
        """One of its buttons. Values for the proposal, its HTML and the chat's picker."""
        act, ref = drawn.pressed(press)
        chosen = gr.skip()
        try:
            if act == "dismiss":
                self.service.shelf.is_proposal_dismissed = True
                found = None
            elif found and ref in (found.ref, catalog.STARTER):
                if act == "download-yes":
                    self.service.shelf.downloads.start(ref)
                elif act == "pause":
                    self.service.shelf.downloads.pause(ref)
                elif act == "load":
                    chosen = picker.showing(self.service, ref)
        except Exception as error:  # the page's border
            as_problem(error)
        return [found, self._draw(found), chosen]

    async def load(self, press: str, found: Proposal | None) -> None:
        """Begin the load that was asked for; it goes on without the page."""
        act, ref = drawn.pressed(press)
        if found and (act, ref) == ("load", found.ref):
            name = await asyncio.to_thread(picker.name_of, self.service, ref)
            self.works.begin(Work("load", ref, name), lambda: self.service.load(ref))

    def refresh(self, found: Proposal | None, html: str) -> list[Any]:
        """Values for the proposal and its HTML, where that has changed by itself."""
        if found and self._is_loaded(found):
            found = None
        new = self._draw(found)
        return [gr.skip(), gr.skip()] if new == html else [found, new]

    def _is_loaded(self, found: Proposal) -> bool:
        return any(found.ref in (model.ref, model.id) for model in self.service.loaded())

    def _draw(self, found: Proposal | None) -> str:
        if found is None:
            return ""
        downloads, status = self.service.shelf.downloads, self.service.status()
        work = next((each for each in self.works.all() if each.ref == found.ref), None)
        is_loading = work is not None and status.state == "loading" and status.model == work.name
        return start_view.proposal(
            found,
            downloads.get(found.ref),
            downloads.get(catalog.STARTER),
            work=work,
            share=status.progress if is_loading else None,
        )


def build(service: Service, works: Works, page: gr.Blocks, chat_picker: gr.Dropdown) -> None:
    """Draw the proposal and wire it; it is looked up when the page is opened."""
    desk = Desk(service, works)
    quietly: dict[str, Any] = {
        "show_progress": "hidden",
        "api_visibility": "private",
        "concurrency_limit": drawn.N_AT_ONCE,
    }
    found = gr.State(None)
    shown = drawn.html(elem_id="proposal")
    presses = drawn.presses("proposal-presses")
    timer = gr.Timer(REFRESH_EVERY_S, active=False)
    page.load(desk.open, None, [found, shown, timer], **quietly)
    loading = presses.change(desk.load, [presses, found], None, trigger_mode="multiple", **quietly)
    loading.then(desk.press, [presses, found], [found, shown, chat_picker], **quietly)
    timer.tick(desk.refresh, [found, shown], [found, shown], **quietly)
