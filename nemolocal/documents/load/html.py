"""HTML: what a reader of the page would read, without scripts, styles and what is hidden."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemolocal.documents.limits import Limits
from nemolocal.documents.load.source import OnPage, Source
from nemolocal.documents.load.text import clean, decode
from nemolocal.documents.parts import Block, Document

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag

_GONE = (
    "script",
    "style",
    "noscript",
    "template",
    "svg",
    "iframe",
    "object",
    "nav",
    "head",
    "form",
    "button",
)
_LEAVES = ("p", "li", "dt", "dd", "blockquote", "figcaption", "caption", "address", "summary")
_BLOCKS = (
    "p",
    "div",
    "table",
    "ul",
    "ol",
    "li",
    "dt",
    "dd",
    "pre",
    "section",
    "h1",
    "h2",
    "h3",
    "h4",
    "blockquote",
)
_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)
_BLANKS = re.compile(r"[ \t\n\xa0]+")


def read(source: Source, limits: Limits, on_page: OnPage) -> Document:
    data = source.data()
    if len(data) > 4 * limits.max_chars:
        raise source.too_large(f"{len(data) >> 20} MiB of HTML are more than is read")
    found = _CHARSET.search(data[:4096])
    soup = parse(decode(data, found[1].decode("ascii") if found else ""))
    title = _flat(soup.title.get_text()) if soup.title else ""
    found_blocks = tuple(blocks(soup))
    on_page(1, 1)
    return Document(
        name=source.name,
        kind="html",
        sha256=source.sha256,
        blocks=found_blocks,
        title=title,
        has_outline=any(block.kind == "heading" for block in found_blocks),
    )


def parse(text: str) -> BeautifulSoup:
    from bs4 import BeautifulSoup

    return BeautifulSoup(clean(text), "lxml")


def blocks(soup: BeautifulSoup | Tag, page: int = 1) -> Iterator[Block]:
    """The visible text of a parsed page."""
    from bs4 import Comment, Tag

    for comment in soup.find_all(string=lambda text: isinstance(text, Comment)):
        comment.extract()
    for tag in soup.find_all(_is_hidden):
        if isinstance(tag, Tag) and not tag.decomposed:
            tag.decompose()
    body = soup.find("body") or soup
    main = body.find("main") or body.find("article") or body
    # An article that is a small part of its page is one of many.
    whole = len(body.get_text())
    chosen = main if len(main.get_text()) * 2 > whole else body
    yield from _walk(chosen, page)


def _is_hidden(tag: Tag) -> bool:
    style = str(tag.get("style") or "").replace(" ", "").lower()
    is_unseen = "display:none" in style or "visibility:hidden" in style
    return tag.name in _GONE or tag.has_attr("hidden") or tag.get("aria-hidden") == "true" or is_unseen


def _walk(root: Tag, page: int) -> Iterator[Block]:
    """Blocks in order; text between them counts as a paragraph. Without recursion: pages nest deep."""
    from bs4 import Tag
    from bs4.element import NavigableString

    loose: list[str] = []

    def flush() -> Iterator[Block]:
        text = _flat("".join(loose))
        loose.clear()
        if text:
            yield Block("paragraph", text, page=page)

    stack = [iter(root.children)]
    while stack:
        child = next(stack[-1], None)
        if child is None:
            stack.pop()
            yield from flush()
        elif isinstance(child, Tag):
            block = _block(child, page)
            if block is not None or child.name in ("table", "pre", *_LEAVES):
                yield from flush()
                if block is not None:
                    yield block
            elif child.name == "br":
                loose.append("\n")
            elif child.find(_BLOCKS) is None:
                loose.append(child.get_text() if child.name in _INLINE else f"\n{child.get_text()}\n")
                if child.name not in _INLINE:
                    yield from flush()
            else:
                yield from flush()
                stack.append(iter(child.children))
        elif isinstance(child, NavigableString):
            loose.append(str(child))


_INLINE = (
    "a",
    "b",
    "i",
    "em",
    "strong",
    "span",
    "code",
    "sup",
    "sub",
    "small",
    "u",
    "s",
    "mark",
    "abbr",
    "q",
    "label",
)


def _block(tag: Tag, page: int) -> Block | None:
    name = tag.name
    if re.fullmatch("h[1-6]", name):
        text = _flat(tag.get_text())
        return Block("heading", text, page=page, level=int(name[1])) if text else None
    if name == "table":
        return _table(tag, page)
    if name == "pre":
        code = tag.get_text().strip("\n")
        return Block("code", code, page=page) if code.strip() else None
    if name in _LEAVES and tag.find(("p", "table", "ul", "ol", "pre", "div")) is None:
        text = _flat(tag.get_text())
        kind = "list" if name in ("li", "dt", "dd") else "paragraph"
        return Block("list" if kind == "list" else "paragraph", text, page=page) if text else None
    return None


def _table(table: Tag, page: int) -> Block | None:
    rows: list[str] = []
    n_header_lines = 0
    for row in table.find_all("tr"):
        cells = row.find_all(("td", "th"))
        texts = [_flat(cell.get_text(" ")) for cell in cells]
        if any(texts):
            if len(rows) == n_header_lines and all(cell.name == "th" for cell in cells):
                n_header_lines += 1
            rows.append(" | ".join(texts))
    if not rows:
        return None
    return Block("table", "\n".join(rows), page=page, n_header_lines=n_header_lines)


def _flat(text: str) -> str:
    return _BLANKS.sub(" ", text).strip()
