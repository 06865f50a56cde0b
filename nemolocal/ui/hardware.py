"""The Hardware tab: what this machine is made of and what it does. Handlers first, then `build`."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import gradio as gr

from nemolocal.service import Service
from nemolocal.ui import drawn, hardware_view
from nemolocal.ui.problems import as_problem
from nemolocal.ui.status import notice

REFRESH_EVERY_S = 2.0
LOOK_EVERY_S = 15.0
"""What a machine is made of changes less often than what it does, which the monitor tells."""


def draw(service: Service) -> str:
    """The machine as it is now."""
    try:
        shelf = service.shelf
        samples = () if shelf.is_described else shelf.monitor.samples()
        found = shelf.machine(newer_than_s=LOOK_EVERY_S)
        return hardware_view.machine(
            found, samples, now_s=time.time(), is_described=shelf.is_described, ours=shelf.held(found)
        )
    except Exception as error:  # the page's border
        return notice(as_problem(error))


def build(service: Service, opened: gr.Button) -> gr.Timer:
    """Draw the tab and wire it; it is filled when `opened` is pressed. Returns the timer that is to run while
    it is seen."""
    quietly: dict[str, Any] = {
        "show_progress": "hidden",
        "api_visibility": "private",
        "concurrency_limit": drawn.N_AT_ONCE,
    }
    machine = drawn.html(elem_id="hardware-machine")
    timer = gr.Timer(REFRESH_EVERY_S, active=False)
    gr.on([opened.click, timer.tick], partial(draw, service), None, machine, **quietly)
    return timer
