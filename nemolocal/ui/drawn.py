"""HTML of our own on the page, and the buttons in it. Gradio's own component for HTML evaluates it as a
template, which the port's policy forbids; its Markdown shows it as it is. What is shown is escaped where it
is made (drawing.py)."""

from __future__ import annotations

import json
from typing import Any

import gradio as gr

N_AT_ONCE = 16
"""So many pages are answered side by side, where one may have to wait for the hub or the hardware."""


def html(value: str = "", *, elem_id: str) -> gr.Markdown:
    """A place for HTML without line breaks."""
    return gr.Markdown(value, elem_id=elem_id, container=False, sanitize_html=False, latex_delimiters=[])


def presses(elem_id: str) -> gr.Textbox:
    """A field that nobody sees, into which page.js writes which of the drawn buttons was pressed."""
    return gr.Textbox(
        label="Pressed", show_label=False, container=False, elem_id=elem_id, elem_classes="presses"
    )


def pressed(value: Any) -> tuple[str, str]:
    """(act, ref) of a press, ("", "") for anything else."""
    try:
        found = json.loads(value)
        return str(found["act"]), str(found["ref"])
    except (TypeError, ValueError, KeyError):
        return "", ""
