"""EPUB: the chapters in the order in which they are read."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Iterator
from urllib.parse import unquote

from nemolocal.documents.limits import Limits
from nemolocal.documents.load import html
from nemolocal.documents.load.archive import open_archive, read_entry
from nemolocal.documents.load.source import OnPage, Source
from nemolocal.documents.load.text import decode
from nemolocal.documents.parts import Block, Document, NotRead


def read(source: Source, limits: Limits, on_page: OnPage) -> Document:
    """Raises DocumentError for a damaged book, and for one whose text is encrypted."""
    with open_archive(source, limits) as packed:
        names = set(packed.namelist())
        chapters, title = _spine(packed, source)
        if "META-INF/encryption.xml" in names and b"aes" in read_entry(
            packed, "META-INF/encryption.xml", source
        ):
            raise source.unsupported("its text is encrypted (DRM)")
        if len(chapters) > limits.max_pages:
            raise source.too_large(f"{len(chapters):,} chapters are more than {limits.max_pages:,}")
        blocks: list[Block] = []
        not_read = []
        for number, name in enumerate(chapters, 1):
            found = list(_chapter(packed, name, number, source)) if name in names else []
            if not found:
                not_read.append(NotRead(number, "there is no text in it"))
            blocks += found
            on_page(number, len(chapters))
    return Document(
        name=source.name,
        kind="epub",
        sha256=source.sha256,
        blocks=tuple(blocks),
        n_pages=max(len(chapters), 1),
        unit="chapter",
        title=title,
        not_read=tuple(not_read),
        has_outline=any(block.kind == "heading" for block in blocks),
    )


def _chapter(packed: zipfile.ZipFile, name: str, number: int, source: Source) -> Iterator[Block]:
    return html.blocks(html.parse(decode(read_entry(packed, name, source))), number)


def _spine(packed: zipfile.ZipFile, source: Source) -> tuple[list[str], str]:
    """The chapters' names in the archive, and the book's title."""
    from bs4 import BeautifulSoup

    container = BeautifulSoup(read_entry(packed, "META-INF/container.xml", source), "xml")
    root = container.find("rootfile")
    name = str(root.get("full-path") or "") if root else ""
    if not name or name not in packed.namelist():
        raise source.damaged("it does not say where its text begins")
    package = BeautifulSoup(read_entry(packed, name, source), "xml")
    folder = posixpath.dirname(name)
    places = {
        str(item.get("id")): posixpath.normpath(posixpath.join(folder, unquote(str(item.get("href") or ""))))
        for item in package.find_all("item")
    }
    order = [
        places[str(ref.get("idref"))] for ref in package.find_all("itemref") if ref.get("idref") in places
    ]
    title = package.find("title")
    if not order:
        raise source.damaged("it has no chapters")
    return order, title.get_text().strip() if title else ""
