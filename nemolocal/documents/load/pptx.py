"""PPTX: each slide with its title, texts, tables and notes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemolocal.documents.limits import Limits
from nemolocal.documents.load.archive import PROBLEMS, open_archive
from nemolocal.documents.load.source import OnPage, Source
from nemolocal.documents.parts import Block, Document, NotRead


def read(source: Source, limits: Limits, on_page: OnPage) -> Document:
    import pptx
    from lxml.etree import LxmlError
    from pptx.exc import PythonPptxError

    open_archive(source, limits).close()
    blocks: list[Block] = []
    not_read = []
    try:
        slides = list(pptx.Presentation(str(source.path)).slides)
        if len(slides) > limits.max_pages:
            raise source.too_large(f"{len(slides):,} slides are more than {limits.max_pages:,}")
        for number, slide in enumerate(slides, 1):
            found = list(_slide(slide, number))
            if not found:
                not_read.append(NotRead(number, "there is no text on it"))
            elif any(str(shape.element.tag).endswith("}pic") for shape in _shapes(slide.shapes)):
                not_read.append(NotRead(0, f"the pictures on slide {number}"))
            blocks += found
            on_page(number, len(slides))
    except (*PROBLEMS, PythonPptxError, LxmlError, AttributeError, TypeError, IndexError) as error:
        raise source.damaged(error) from None
    return Document(
        name=source.name,
        kind="pptx",
        sha256=source.sha256,
        blocks=tuple(blocks),
        n_pages=max(len(slides), 1),
        unit="slide",
        not_read=tuple(not_read),
        has_outline=True,
    )


def _slide(slide: Any, number: int) -> Iterator[Block]:
    title = slide.shapes.title
    if title is not None and title.text_frame.text.strip():
        yield Block("heading", " ".join(title.text_frame.text.split()), page=number, level=1)
    for shape in _shapes(slide.shapes):
        if title is not None and shape.shape_id == title.shape_id:
            continue
        if shape.has_text_frame and shape.text_frame.text.strip():
            lines = [" ".join(p.text.split()) for p in shape.text_frame.paragraphs]
            yield Block("paragraph", "\n".join(line for line in lines if line), page=number)
        if getattr(shape, "has_table", False):
            rows = [" | ".join(" ".join(cell.text.split()) for cell in row.cells) for row in shape.table.rows]
            rows = [row for row in rows if row.replace("|", "").strip()]
            if rows:
                yield Block("table", "\n".join(rows), page=number, n_header_lines=1 if len(rows) > 1 else 0)
    if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame) and notes.text.strip():
        yield Block("note", f"Notes: {notes.text.strip()}", page=number)


def _shapes(shapes: Any) -> Iterator[Any]:
    """All of them, those in groups too."""
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _shapes(shape.shapes)
        else:
            yield shape
