"""Made-up documents as files: PDF, DOCX, Markdown, HTML and plain text."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.documents.book import Book, Page

MARGIN, WIDTH, HEIGHT = 50, 595, 842
SIZE, LEADING = 8, 9.5


def write(book: Book, path: Path) -> None:
    """In the format that the suffix names."""
    {".pdf": _pdf, ".docx": _docx, ".md": _markdown, ".html": _html, ".txt": _text}[path.suffix](book, path)


def _pdf(book: Book, path: Path) -> None:
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.cidfonts import UnicodeCIDFont
    from reportlab.pdfgen import canvas

    font = "Helvetica"
    if book.language.code == "zh":
        font = "STSong-Light"
        pdfmetrics.registerFont(UnicodeCIDFont(font))
    sheet = canvas.Canvas(str(path), pagesize=(WIDTH, HEIGHT))
    for number, page in enumerate(book.pages, 1):
        _draw(sheet, page, font, book.language.header)
        sheet.setFont(font, SIZE)
        sheet.drawCentredString(WIDTH / 2, 20, str(number))
        sheet.showPage()
    sheet.save()


def _draw(sheet: Any, page: Page, font: str, header: tuple[str, ...]) -> None:
    y = HEIGHT - MARGIN
    if page.heading:
        sheet.setFont(font, 15)
        sheet.drawString(MARGIN, y, page.heading)
        y -= 24
    sheet.setFont(font, SIZE)
    for paragraph in page.paragraphs:
        for line in _lines(paragraph):
            sheet.drawString(MARGIN, y, line)
            y -= LEADING
        y -= LEADING
    for row in [header, *page.rows] if page.rows else []:
        for column, cell in enumerate(row):
            sheet.drawString(MARGIN + 125 * column, y, cell)
        y -= LEADING + 3
    low = MARGIN + LEADING * 2 * len(page.notes)
    assert y > low, "the page is too full"
    sheet.setFont(font, SIZE - 1)
    for number, note in enumerate(page.notes, 1):
        for line in _lines(f"{number} {note}"):
            sheet.drawString(MARGIN, low, line)
            low -= LEADING


def _lines(text: str, width: int = 118) -> Iterator[str]:
    """At blanks, or anywhere between wide characters."""
    line, n = "", 0
    for word in text.split(" ") if " " in text else text:
        n_word = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in word) + (" " in text)
        if n + n_word > width:
            yield line.rstrip()
            line, n = "", 0
        line += word + (" " if " " in text else "")
        n += n_word
    yield line.rstrip()


def _docx(book: Book, path: Path) -> None:
    """A note is the last paragraph of its page: the library that writes these files has no footnotes."""
    import docx

    file = docx.Document()
    for number, page in enumerate(book.pages):
        if number:
            file.add_page_break()
        if page.heading:
            file.add_heading(page.heading, level=1)
        for paragraph in page.paragraphs:
            file.add_paragraph(paragraph)
        if page.rows:
            table = file.add_table(rows=0, cols=len(book.language.header))
            for row in (book.language.header, *page.rows):
                for cell, text in zip(table.add_row().cells, row, strict=True):
                    cell.text = text
        for note in page.notes:
            file.add_paragraph(note)
    file.save(str(path))


def _markdown(book: Book, path: Path) -> None:
    parts = []
    for number, page in enumerate(book.pages):
        parts += [f"# {page.heading}"] if page.heading else []
        parts += page.paragraphs
        if page.rows:
            rows = [book.language.header, ("---",) * len(book.language.header), *page.rows]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
        parts += [f"[^{number}-{i}]: {note}" for i, note in enumerate(page.notes)]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _html(book: Book, path: Path) -> None:
    parts = []
    for page in book.pages:
        parts += [f"<h1>{html.escape(page.heading)}</h1>"] if page.heading else []
        parts += [f"<p>{html.escape(paragraph)}</p>" for paragraph in page.paragraphs]
        if page.rows:
            rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in page.rows]
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in book.language.header)
            parts.append(f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>")
        parts += [f"<p><small>{i} {html.escape(note)}</small></p>" for i, note in enumerate(page.notes, 1)]
    body = "\n".join(parts)
    path.write_text(
        f'<html lang="{book.language.code}"><meta charset="utf-8"><body><main>{body}</main></body></html>',
        encoding="utf-8",
    )


def _text(book: Book, path: Path) -> None:
    parts = []
    for page in book.pages:
        parts += [page.heading] if page.heading else []
        parts += ["\n".join(_lines(paragraph, 90)) for paragraph in page.paragraphs]
        if page.rows:
            parts.append("\n".join("\t".join(row) for row in (book.language.header, *page.rows)))
        parts += [f"{i} {note}" for i, note in enumerate(page.notes, 1)]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
