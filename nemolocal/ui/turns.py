"""Which of the page's answers still count: a person goes on while an earlier one is being made."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import gradio as gr

N_PAGES: Final = 256


class Turns:
    """How often each open page has asked for something, so that an answer that comes late is told from one
    that still counts."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()

    def next(self, request: gr.Request) -> int:
        """Count one more; the page that was longest silent is forgotten when they are many."""
        page = str(request.session_hash)
        self._counts[page] = self._counts.get(page, 0) + 1
        self._counts.move_to_end(page)
        while len(self._counts) > N_PAGES:
            self._counts.popitem(last=False)
        return self._counts[page]

    def now(self, request: gr.Request) -> int:
        return self._counts.get(str(request.session_hash), 0)
