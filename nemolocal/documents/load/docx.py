"""DOCX: paragraphs, lists and tables in their order, with headers, footnotes and text boxes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from nemolocal.documents.limits import Limits
from nemolocal.documents.load.archive import PROBLEMS, open_archive
from nemolocal.documents.load.source import OnPage, Source
from nemolocal.documents.parts import Block, Document, NotRead

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_AROUND = (f"{W}customXml", f"{W}ins", f"{W}moveTo")
_NOTES = {"footnotes": "Footnote", "endnotes": "Endnote"}
_LEVEL = re.compile(r"heading\s*(\d)|berschrift\s*(\d)|titre\s*(\d)", re.IGNORECASE)


def read(source: Source, limits: Limits, on_page: OnPage) -> Document:
    """Pages are counted where the file says where they ended when it was last shown."""
    import docx
    from docx.opc.exceptions import OpcError
    from lxml.etree import LxmlError

    open_archive(source, limits).close()
    try:
        opened = docx.Document(str(source.path))
        reader = _Reader(opened)
        blocks = [*reader.furniture("header"), *reader.body(opened.element.body)]
        blocks += [*reader.furniture("footer"), *reader.notes()]
        title = str(opened.core_properties.title or "").strip()
    except (*PROBLEMS, OpcError, LxmlError, AttributeError, TypeError, IndexError) as error:
        raise source.damaged(error) from None
    on_page(reader.page, reader.page)
    return Document(
        name=source.name,
        kind="docx",
        sha256=source.sha256,
        blocks=tuple(blocks) if any(block.kind != "heading" for block in blocks) or blocks else (),
        n_pages=reader.page,
        title=title,
        not_read=tuple(reader.not_read()),
        has_outline=any(block.kind == "heading" for block in blocks),
    )


class _Reader:
    """Goes through the body once; `page` is where it is."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened
        self.page = 1
        self._levels = {style.style_id: _level_of(style) for style in opened.styles}

    def body(self, parent: Any) -> Iterator[Block]:
        for element in parent.iterchildren():
            if element.tag == f"{W}p":
                yield from self._paragraph(element)
            elif element.tag == f"{W}tbl":
                yield from self._table(element)
            elif element.tag == f"{W}sdt":
                for content in element.iterchildren(f"{W}sdtContent"):
                    yield from self.body(content)
            elif element.tag in _AROUND:
                yield from self.body(element)

    def _paragraph(self, element: Any) -> Iterator[Block]:
        begun_on = self.page
        text = self._text(element).strip()
        properties = element.find(f"{W}pPr")
        style = _value(properties, "pStyle")
        outline = _value(properties, "outlineLvl")
        level = int(outline) + 1 if outline.isdecimal() and int(outline) < 9 else self._levels.get(style, 0)
        is_list = properties is not None and properties.find(f"{W}numPr") is not None
        if text:
            page_to = self.page if self.page > begun_on else 0
            if level:
                yield Block("heading", " ".join(text.split()), page=begun_on, level=level)
            elif is_list:
                yield Block("list", f"- {text}", page=begun_on, page_to=page_to)
            else:
                yield Block("paragraph", text, page=begun_on, page_to=page_to)
        for box in element.iter(f"{W}txbxContent"):
            if not _is_fallback(box):
                yield from self.body(box)

    def _text(self, element: Any) -> str:
        """What is shown of a paragraph, without deletions and text boxes; counts the pages that end in it."""
        said = []
        for part in element.iter():
            if _is_inside(part, element, (f"{W}txbxContent", f"{W}del", f"{W}moveFrom")):
                continue
            if part.tag == f"{W}t":
                said.append(part.text or "")
            elif part.tag == f"{W}tab":
                said.append("\t" if part.getparent().tag == f"{W}r" else "")
            elif part.tag == f"{W}lastRenderedPageBreak" or _is_page_break(part):
                # A break that was set is followed by the mark of the page that it began.
                self.page += part.tag == f"{W}lastRenderedPageBreak" or not self._is_rendered
            elif part.tag in (f"{W}br", f"{W}cr"):
                said.append("\n")
            elif part.tag in (f"{W}footnoteReference", f"{W}endnoteReference"):
                said.append(f"[{part.get(f'{W}id')}]")
        return "".join(said)

    @property
    def _is_rendered(self) -> bool:
        return next(self._opened.element.body.iter(f"{W}lastRenderedPageBreak"), None) is not None

    def _table(self, element: Any) -> Iterator[Block]:
        begun_on = self.page
        rows: list[str] = []
        nested: list[Block] = []
        n_header_lines = 0
        for row in _own(element, "tr", f"{W}tbl"):
            cells = []
            for cell in _own(row, "tc", f"{W}tr"):
                texts = [self._text(p).strip() for p in _own(cell, "p", f"{W}tc", f"{W}txbxContent")]
                cells.append(" ".join(" ".join(texts).split()))
                for inner in _own(cell, "tbl", f"{W}tc", f"{W}txbxContent"):
                    nested += list(self._table(inner))
                for box in _own(cell, "txbxContent", f"{W}tc", f"{W}txbxContent"):
                    nested += [] if _is_fallback(box) else list(self.body(box))
            if any(cells):
                is_header = row.find(f"{W}trPr/{W}tblHeader") is not None
                n_header_lines += is_header and n_header_lines == len(rows)
                rows.append(" | ".join(cells))
        if rows:
            headers = n_header_lines or (1 if len(rows) > 1 else 0)
            page_to = self.page if self.page > begun_on else 0
            yield Block("table", "\n".join(rows), page=begun_on, page_to=page_to, n_header_lines=headers)
        yield from nested

    def furniture(self, kind: str) -> Iterator[Block]:
        """Headers or footers, each text once."""
        seen = set()
        for section in self._opened.sections:
            part = getattr(section, kind)
            if part.is_linked_to_previous:
                continue
            for block in self.body(part._element):
                if block.text not in seen:
                    seen.add(block.text)
                    yield Block("note", block.text, page=1)

    def notes(self) -> Iterator[Block]:
        from lxml import etree

        for part in self._opened.part.package.iter_parts():
            name = str(part.partname).rsplit("/", 1)[-1].removesuffix(".xml")
            if name in _NOTES:
                root = etree.fromstring(part.blob, etree.XMLParser(resolve_entities=False))
                for note in root:
                    text = " ".join("".join(t.text or "" for t in note.iter(f"{W}t")).split())
                    if text:
                        yield Block("note", f"{_NOTES[name]} {note.get(f'{W}id')}: {text}", page=self.page)

    def not_read(self) -> Iterator[NotRead]:
        body = self._opened.element.body
        if next(body.iter("{http://schemas.openxmlformats.org/drawingml/2006/picture}pic"), None) is not None:
            yield NotRead(0, "the pictures in it")
        if any(
            str(part.partname).endswith("comments.xml") for part in self._opened.part.package.iter_parts()
        ):
            yield NotRead(0, "the comments on it")


def _level_of(style: Any) -> int:
    name = str(style.name or "")
    found = _LEVEL.search(name)
    if found:
        return int(next(group for group in found.groups() if group))
    return 1 if name.lower() == "title" else 0


def _value(properties: Any, name: str) -> str:
    found = None if properties is None else properties.find(f"{W}{name}")
    return "" if found is None else str(found.get(f"{W}val") or "")


def _is_page_break(part: Any) -> bool:
    return bool(part.tag == f"{W}br" and part.get(f"{W}type") == "page")


def _is_inside(part: Any, top: Any, tags: tuple[str, ...]) -> bool:
    while part is not None and part is not top:
        if part.tag in tags:
            return True
        part = part.getparent()
    return False


def _is_fallback(box: Any) -> bool:
    """Word writes a text box twice, once for older programs."""
    return any(str(above.tag).endswith("}Fallback") for above in box.iterancestors())


def _own(top: Any, name: str, *borders: str) -> Iterator[Any]:
    """What lies in `top`, in content controls too, but in no other of the `borders` within it."""
    for found in top.iter(f"{W}{name}"):
        if found is not top and next(found.iterancestors(*borders), None) is top:
            yield found
