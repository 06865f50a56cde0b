"""Plain text in any encoding, and what the readers of other texts share: decoding, and parts by lines."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from nemolocal.documents.limits import Limits
from nemolocal.documents.load.source import OnPage, Source
from nemolocal.documents.parts import Block, Document

N_PART_LINES = 100
"""What is counted as a page where there are none."""
N_SAMPLE_BYTES = 1 << 16
N_LONG_LINE = 8_000  # characters; a longer line is cut at blanks into paragraphs of its own
SHARE_OF_CONTROLS = 0.1  # of the characters, above which it is no text

_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTROLS = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff\ud800-\udfff]")


def read(source: Source, limits: Limits, on_page: OnPage) -> Document:
    """Paragraphs are what stands between empty lines. Raises DocumentError for what is no text."""
    text = text_of(source, limits)
    on_page(1, 1)
    return of_lines(source, "text", text, paragraphs(text))


def text_of(source: Source, limits: Limits) -> str:
    """The file's text with plain newlines and no control characters."""
    data = source.data()
    if len(data) > 4 * limits.max_chars:
        raise source.too_large(f"{len(data) >> 20} MiB of text are more than is read")
    text = decode(data)
    n_controls = len(_CONTROLS.findall(text[:N_SAMPLE_BYTES]))
    if n_controls > SHARE_OF_CONTROLS * min(len(text), N_SAMPLE_BYTES):
        raise source.unsupported("it is no text")
    if len(text) > limits.max_chars:
        raise source.too_large(f"{len(text):,} characters are more than {limits.max_chars:,}")
    text = clean(text)
    if not text.strip():
        raise source.empty()
    return text


def decode(data: bytes, declared: str = "") -> str:
    """The text, in the encoding that its first bytes or `declared` name, else UTF-8, else the likeliest."""
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            return data.decode(encoding, "replace")
    if declared:
        try:
            return data.decode(declared, "replace")
        except LookupError:
            pass
    sample = data[:N_SAMPLE_BYTES]
    if sample.count(0) > len(sample) // 8:
        n_even, n_odd = sample[::2].count(0), sample[1::2].count(0)
        return data.decode("utf-16-be" if n_even > n_odd else "utf-16-le", "replace")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        told = _telling(data, error.start)
    return data.decode(_likeliest(told), "replace")


def _telling(data: bytes, at: int) -> bytes:
    """Lines from `at` on that are not plain ASCII, which would only hide what tells the encoding."""
    begin = max(data.rfind(b"\n", 0, at) + 1, at - N_SAMPLE_BYTES // 4)
    lines = data[begin : begin + 16 * N_SAMPLE_BYTES].splitlines(keepends=True)
    return b"".join(line for line in lines if not line.isascii())[:N_SAMPLE_BYTES]


def _likeliest(sample: bytes) -> str:
    from charset_normalizer import from_bytes

    found = from_bytes(sample).best()
    return found.encoding if found else "cp1252"


def clean(text: str) -> str:
    """Plain newlines, and no control characters but tabs and form feeds."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x85", "\n").replace("\u2028", "\n")
    return _CONTROLS.sub("", text)


def paragraphs(text: str) -> Iterator[tuple[int, Block]]:
    """(line, block), lines counted from 0."""
    begin = 0
    gathered: list[str] = []
    for number, line in enumerate(text.replace("\x0c", "\n").split("\n")):
        if line.strip():
            begin = begin if gathered else number
            gathered.append(line.rstrip())
        elif gathered:
            yield from _paragraph(begin, gathered)
            gathered = []
    yield from _paragraph(begin, gathered)


def _paragraph(begin: int, lines: list[str]) -> Iterator[tuple[int, Block]]:
    """A long run of lines is several paragraphs, so that each lies in its part; so is a very long line."""
    for at in range(0, len(lines), N_PART_LINES // 4):
        for text in _bearable("\n".join(lines[at : at + N_PART_LINES // 4])):
            yield begin + at, Block("paragraph", text)


def _bearable(text: str) -> Iterator[str]:
    """By offsets: to copy what is left at each cut would take minutes for a line of 100 MB."""
    begin = 0
    while len(text) - begin > N_LONG_LINE:
        cut = max(text.rfind(mark, begin, begin + N_LONG_LINE) for mark in ("\n", ". ", " "))
        cut = cut + 1 if cut > begin else begin + N_LONG_LINE
        if part := text[begin:cut].strip():
            yield part
        begin = cut
    if text[begin:].strip():
        yield text[begin:]


def of_lines(
    source: Source, kind: str, text: str, found: Iterator[tuple[int, Block]], title: str = ""
) -> Document:
    """A document whose pages are parts of so many lines, called by them."""
    from dataclasses import replace

    blocks = []
    for line, block in found:
        n_more = block.text.count("\n")
        page, last = line // N_PART_LINES + 1, (line + n_more) // N_PART_LINES + 1
        blocks.append(replace(block, page=page, page_to=last if last > page else 0))
    n_lines = text.count("\n") + 1
    n_pages = (n_lines - 1) // N_PART_LINES + 1
    begins = range(1, n_lines + 1, N_PART_LINES)
    labels = tuple(f"lines {n}–{min(n + N_PART_LINES - 1, n_lines)}" for n in begins)
    return Document(
        name=source.name,
        kind=kind,
        sha256=source.sha256,
        blocks=tuple(blocks),
        n_pages=n_pages,
        unit="part",
        title=title,
        labels=labels,
        has_outline=any(block.kind == "heading" for block in blocks),
    )
