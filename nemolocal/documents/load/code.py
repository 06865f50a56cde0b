"""Source code: its lines as they are, in blocks that begin where something is defined or after empty
lines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nemolocal.documents.limits import Limits
from nemolocal.documents.load.source import OnPage, Source
from nemolocal.documents.load.text import of_lines, text_of
from nemolocal.documents.parts import Block, Document

N_LINES_MOST = 60
N_LINES_LEAST = 8
_BEGIN = re.compile(
    r"^(async def|def|class|func|fn|pub|impl|function|export|public|private|static|interface|module|@)\b"
)


def read(source: Source, limits: Limits, on_page: OnPage) -> Document:
    text = text_of(source, limits)
    on_page(1, 1)
    return of_lines(source, "code", text, _blocks(text))


def _blocks(text: str) -> Iterator[tuple[int, Block]]:
    begin = 0
    gathered: list[str] = []
    for number, line in enumerate(text.split("\n")):
        is_border = bool(_BEGIN.match(line)) or (bool(gathered) and not gathered[-1].strip())
        if gathered and ((is_border and len(gathered) >= N_LINES_LEAST) or len(gathered) >= N_LINES_MOST):
            yield from _block(begin, gathered)
            begin, gathered = number, []
        gathered.append(line.rstrip())
    yield from _block(begin, gathered)


def _block(begin: int, lines: list[str]) -> Iterator[tuple[int, Block]]:
    while lines and not lines[0].strip():
        begin, lines = begin + 1, lines[1:]
    code = "\n".join(lines).rstrip()
    if code:
        yield begin, Block("code", code)
