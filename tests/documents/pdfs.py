"""PDF files, written on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reportlab.lib.pagesizes import A4
from reportlab.pdfgen.canvas import Canvas

Draw = Callable[[Any], None]
TOP = 760


def write(path: Path, pages: Sequence[Draw], **options: Any) -> Path:
    """A page for each function that draws one."""
    canvas = Canvas(str(path), pagesize=A4, **options)
    for draw in pages:
        draw(canvas)
        canvas.showPage()
    canvas.save()
    return path


def lines(
    texts: Sequence[str], *, x: float = 72, y: float = TOP, size: float = 11, font: str = "Helvetica"
) -> Draw:
    """Lines below each other."""

    def draw(canvas: Any) -> None:
        canvas.setFont(font, size)
        for n, text in enumerate(texts):
            canvas.drawString(x, y - 1.3 * size * n, text)

    return draw


def both(*draws: Draw) -> Draw:
    def draw(canvas: Any) -> None:
        for each in draws:
            each(canvas)

    return draw


def blank(canvas: Any) -> None:
    """Nothing."""


def picture(canvas: Any) -> None:
    canvas.rect(100, 100, 300, 400, fill=1)
