"""The page's border for errors: whatever was raised becomes one line that a person can read."""

from __future__ import annotations

import logging
import re
from typing import Final

from nemolocal.errors import NemoLocalError

log = logging.getLogger(__name__)


FIELDS: Final = {
    "ctx": "Context",
    "slots": "Answers at a time",
    "gpu-layers": "Layers on the GPUs",
    "gpu": "GPUs",
    "kv": "KV cache",
    "aim": "Aim",
    "split": "Split over GPUs",
    "draft": "Draft model",
    "lora": "LoRA adapters",
    "margin-mib": "Left free on each GPU",
}
"""What the page calls the settings that the terminal has flags for (load_fields.py)."""
_FLAG: Final = re.compile(rf"--({'|'.join(FIELDS)})(?![\w-])")
_COMMANDS: Final = {"`nemolocal hardware`": "the Hardware tab", "`nemolocal models list`": "the Models tab"}


def in_page_words(line: str) -> str:
    """A line that was written for the terminal, with the names that things have on the page."""
    line = _FLAG.sub(lambda found: f"“{FIELDS[found[1]]}”", line)
    for command, place in _COMMANDS.items():
        line = line.replace(command, place)
    return line


def as_problem(error: BaseException) -> str:
    """The line to show. A fault of our own goes to the log in full."""
    if isinstance(error, NemoLocalError):
        line = str(error)
        where = " That is on the Models tab, under “How it is loaded”." if _FLAG.search(line) else ""
        return in_page_words(line) + where
    log.error("The page met an error that is our own.", exc_info=error)
    return f"NemoLocal itself failed ({type(error).__name__}). The log says more; please report it."
