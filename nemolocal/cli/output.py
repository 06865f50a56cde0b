"""What commands print: tables and JSON on stdout, notes and errors on stderr."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO

from nemolocal import config

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_N_COLUMNS_PIPED = 160

_NO_COMMAND = re.compile(r"No such command '([^']+)'")
_NO_NUMBER = re.compile(r"Invalid value for '([^']+)': Input should be a valid integer.*")

_log = logging.getLogger("nemolocal.cli")


def prepare_streams() -> None:
    """Let no character that a terminal or pipe cannot show end a command; pipes get UTF-8 on Windows too."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            encoding = "utf-8" if sys.platform == "win32" and not stream.isatty() else None
            stream.reconfigure(encoding=encoding, errors="replace")


def console(stream: TextIO | None = None) -> Console:
    """A rich console on stdout, or on another stream. It prints text as it is: no markup, no emoji codes.

    Without a terminal, lines are wide, so that what is piped does not wrap.
    """
    from rich.console import Console

    stream = stream or sys.stdout
    width = height = None
    if not stream.isatty():  # both, else rich takes a dumb terminal's 80 columns
        width, height = shutil.get_terminal_size((_N_COLUMNS_PIPED, 24))
    return Console(file=stream, width=width, height=height, markup=False, emoji=False, highlight=False)


def table(*columns: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in `right` hold numbers. Nothing is cut: long cells wrap, but for
    those of the columns in `whole`, which must be short."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=column in whole)
    return made


def print_json(value: Any) -> None:
    print(json.dumps(_plain(value), ensure_ascii=False, indent=2))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


def item(text: str) -> None:
    """A point of a list. On a terminal its lines break between words; what is piped keeps one line."""
    lines = [text]
    if sys.stdout.isatty():
        lines = textwrap.wrap(text, max(console().width - 2, 20), break_on_hyphens=False)
    print("- " + "\n  ".join(lines))


def note(text: str) -> None:
    """A line for the person at the terminal, out of the way of what is piped."""
    print(text, file=sys.stderr, flush=True)


def error(text: str) -> None:
    """One line, whatever the text holds."""
    note("error: " + " ".join(text.split()))


def drop_stdout() -> None:
    """The reader is gone (`| head`): keep the interpreter from finding that out again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def describe_usage(problem: Any) -> str:
    """A parser's complaint, with where to look."""
    context = getattr(problem, "ctx", None)
    path = context.command_path if context else "nemolocal"
    words = _NO_NUMBER.sub(r"\1 wants a whole number", problem.format_message().rstrip("."))
    unknown = _NO_COMMAND.match(words)
    if unknown and path == "nemolocal" and _is_model(unknown[1]):
        name = unknown[1]
        return f"'{name}' is a model, no command. Use `nemolocal chat {name}` or `nemolocal serve {name}`."
    end = "" if words.endswith("?") else "."
    return f"{words}{end} See `{path} --help`."


def _is_model(text: str) -> bool:
    from nemolocal.models import catalog

    is_ref = text.lower().endswith(".gguf") or text.startswith("hf:")
    return is_ref or catalog.load().get(text.partition(":")[0]) is not None


def describe_os_error(problem: OSError) -> str:
    where = f" {problem.filename}" if problem.filename else ""
    return f"The system refused{where}: {problem.strerror or problem}."


def report_bug(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
    """Stands in for sys.excepthook: what arrives here is a fault of ours, or Ctrl-C at an odd moment."""
    if issubclass(kind, KeyboardInterrupt):
        return
    if config.wants_debug():
        traceback.print_exception(kind, problem, trace)
        return
    _log.critical("unexpected %s", kind.__name__, exc_info=(kind, problem, trace))
    error(
        f"NemoLocal has a fault: {kind.__name__}: {problem}. "
        "The log holds the details; NEMOLOCAL_DEBUG=1 shows them here."
    )
