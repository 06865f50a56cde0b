"""PDF by PDFium: the text with its places, the outline, the page labels, and OCR for pages without text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from nemolocal.documents.limits import Limits
from nemolocal.documents.load import ocr, prose
from nemolocal.documents.load.layout import Box, Line, lines
from nemolocal.documents.load.source import OnPage, Source
from nemolocal.documents.load.text import clean
from nemolocal.documents.parts import Block, Document, NotRead
from nemolocal.errors import DocumentError

N_OUTLINE_MOST = 20_000
SHARE_IN_RECTANGLES = 0.9
"""Of a page's letters; where fewer are, each letter is asked for its place, which takes longer."""
_PASSWORD = 4  # FPDF_ERR_PASSWORD


def read(source: Source, limits: Limits, on_page: OnPage) -> Document:
    import pypdfium2
    from pypdfium2 import PdfiumError

    try:
        pdf = pypdfium2.PdfDocument(source.path, password=source.password or None)
    except PdfiumError as error:
        raise _refusal(source, error) from None
    with closing(pdf):
        n_pages = len(pdf)
        if n_pages == 0:
            raise source.empty("it has no pages")
        if n_pages > limits.max_pages:
            raise source.too_large(f"{n_pages:,} pages are more than {limits.max_pages:,}")
        pages: list[list[Line]] = []
        not_read, by_ocr, n_chars = [], {}, 0
        for number in range(1, n_pages + 1):
            try:
                found, text, why = _page(pdf, number, limits)
            except PdfiumError as error:
                found, text, why = [], "", f"the page is damaged: {error}"
            if text:
                by_ocr[number] = text
            elif not found:
                not_read.append(NotRead(number, why))
            pages.append(found)
            n_chars += sum(len(line.text) for line in found)
            if n_chars > limits.max_chars:
                raise source.too_large(f"it has more than {limits.max_chars:,} characters")
            on_page(number, n_pages)
        headings = _outline(pdf)
        blocks = _with_ocr(prose.blocks(pages, headings), by_ocr)
        title = clean(str(pdf.get_metadata_value("Title") or "")).strip()
        labels = tuple(pdf.get_page_label(index) or str(index + 1) for index in range(n_pages))
    if not blocks:
        raise source.empty(
            f"not one of its {n_pages} pages has a text layer, so it may be a scan; {ocr.why_not(limits)}"
        )
    is_plain = labels == tuple(str(number) for number in range(1, n_pages + 1))
    return Document(
        name=source.name,
        kind="pdf",
        sha256=source.sha256,
        blocks=tuple(blocks),
        n_pages=n_pages,
        title=title,
        labels=() if is_plain else labels,
        not_read=tuple(not_read),
        n_ocr_pages=len(by_ocr),
        has_outline=bool(headings),
    )


def _refusal(source: Source, error: Any) -> DocumentError:
    if getattr(error, "err_code", None) == _PASSWORD or "password" in str(error).lower():
        what = "the password is wrong" if source.password else "it is protected by a password"
        return DocumentError(
            f"{source.name} is not read: {what}.", kind="encrypted", hint="Give its password."
        )
    return source.damaged(
        re.sub(r"^Failed to load document", "PDFium cannot open it", str(error)).rstrip(".")
    )


def _page(pdf: Any, number: int, limits: Limits) -> tuple[list[Line], str, str]:
    """The lines of a page, or what OCR reads of it, or why there is nothing."""
    with closing(pdf[number - 1]) as page:
        with closing(page.get_textpage()) as text:
            found = lines(_boxes(text))
        if not found and limits.ocr and ocr.is_there():
            return [], *ocr.read(page, limits.ocr_languages)
    return found, "", "" if found else ocr.why_not(limits)


def _boxes(text: Any) -> list[Box]:
    """The page's runs of text. PDFium's rectangles are quick, but lose what a font that is not in the file
    has no widths for, as Chinese files often have it."""
    found = list(_rectangles(text))
    n_there = sum(not letter.isspace() for letter in text.get_text_range())
    n_found = sum(not letter.isspace() for box in found for letter in box.text)
    return found if n_found >= SHARE_IN_RECTANGLES * n_there else list(_by_letters(text))


def _by_letters(text: Any) -> Iterator[Box]:
    """Runs of letters that stand beside each other, from the place of each."""
    from pypdfium2 import raw

    run: list[tuple[float, float, float, float, str]] = []
    for index in range(text.count_chars()):
        letter = chr(raw.FPDFText_GetUnicode(text.raw, index) or 32)
        x0, y0, x1, y1 = text.get_charbox(index, loose=True)
        if run:
            height = run[-1][3] - run[-1][1]
            is_level = abs((y0 + y1) / 2 - (run[-1][1] + run[-1][3]) / 2) < 0.5 * max(height, 0.1)
            is_near = -height < x0 - run[-1][2] < height
            if letter in "\r\n" or not (letter.isspace() or (is_level and is_near)):
                yield from _run(run)
                run = []
        if letter not in "\r\n" and (run or not letter.isspace()):
            run.append((x0, y0, x1, y1, letter))
    yield from _run(run)


def _run(run: list[tuple[float, float, float, float, str]]) -> Iterator[Box]:
    said = clean("".join(each[4] for each in run)).strip()
    seen = [each for each in run if not each[4].isspace()]
    if said and seen:
        x0, y0 = min(each[0] for each in seen), min(each[1] for each in seen)
        x1, y1 = max(each[2] for each in seen), max(each[3] for each in seen)
        yield Box(x0, y0, x1, y1, said, y1 - y0)


def _rectangles(text: Any) -> Iterator[Box]:
    """PDFium's rectangles: pieces of one line in one font."""
    from pypdfium2 import raw

    for index in range(text.count_rects()):
        x0, y0, x1, y1 = text.get_rect(index)
        at = text.get_index((x0 + min(x1, x0 + 4)) / 2, (y0 + y1) / 2, 3, 3)
        size = raw.FPDFText_GetFontSize(text.raw, at) if at is not None else 0.0
        said = clean(text.get_text_bounded(x0, y0, x1, y1).replace("\x02", "-").replace("\ufffe", "-"))
        for each in said.split("\n"):
            if each.strip():
                yield Box(x0, y0, x1, y1, each, _on_page(size, y1 - y0))


def _on_page(size: float, height: float) -> float:
    """The font's size as it is seen: where all of a page is scaled, a font of size 1 may be of any height."""
    return size if 0.6 * size <= height <= 1.6 * size else height


def _outline(pdf: Any) -> dict[tuple[int, str], int]:
    """The level of each heading by its page and text."""
    from pypdfium2 import PdfiumError

    found: dict[tuple[int, str], int] = {}
    try:
        for bookmark in pdf.get_toc(max_depth=6):
            if len(found) >= N_OUTLINE_MOST:
                break
            dest = bookmark.get_dest()
            index = dest.get_index() if dest else None
            if index is not None:
                found.setdefault((index + 1, prose.key(bookmark.get_title())), bookmark.level + 1)
    except (PdfiumError, RecursionError, ValueError):
        return found
    return found


def _with_ocr(blocks: list[Block], by_ocr: dict[int, str]) -> list[Block]:
    read = [
        Block("paragraph", paragraph.strip(), page=number)
        for number, text in by_ocr.items()
        for paragraph in re.split(r"\n\s*\n", text)
        if paragraph.strip()
    ]
    return sorted([*blocks, *read], key=lambda block: block.page) if read else blocks
