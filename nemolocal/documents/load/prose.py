"""From the lines of pages to paragraphs: hyphenation undone, ligatures spelt out, running heads and page
numbers left out, sentences joined over page breaks. Knows lines, not PDF."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from nemolocal.documents.load.layout import Line
from nemolocal.documents.parts import Block

LIGATURES = str.maketrans(
    {"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st", "\u00ad": ""}
)
N_FURNITURE_LINES = 3  # at the top and at the bottom of a page that may be running heads
FURNITURE_GAP = 0.7  # font sizes that part it from the text
SHARE_OF_FURNITURE = 0.6  # of the pages that must have them
N_FURNITURE_PAGES = 3
HEADING_SIZE = 1.15  # times the text's
N_HEADING_CHARS = 120
GAP = 0.9  # font sizes between two lines, above which a paragraph begins
N_TAIL = 40  # characters at the end of a text that say how it ends
N_CHARS_OVER_PAGES = 8_000  # a longer paragraph is not joined with the next page's

_HYPHEN_END = re.compile(r"[^\W\d_][-\u2010\u00ad\x02\ufffe]$")
_JOINT_END = re.compile(r"[^\W_][-\u2010]$")  # "North-" before "South", "2019-" before "2020"
_SHARED = re.compile(r"(and|or|to|und|oder|bis|sowie|et|ou|y|o)\b")  # "pre- and post-", "Ein- und Ausgang"
_INNER = re.compile(r"-(a|an|and|at|by|de|for|from|in|of|on|or|out|the|to|up|with|und|zu)$", re.IGNORECASE)
_ENDS_SENTENCE = re.compile(r"""[.!?:;…。！？]["'”’»)\]]*$""")
_BULLET = re.compile(r"^\s*([•▪◦‣·*–-]|\d{1,3}[.)]|[a-z][.)])\s+")
_UNSPACED = re.compile("[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef]")
_TRUE_HYPHEN = re.compile(
    r"\b(well|self|non|ex|half|all|cross|co|high|low|long|short|mid|semi|multi|post|pre|anti|part|full|"
    r"twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|old|new|so|one|two|three|four|five|six|in|by)-$",
    re.IGNORECASE,
)

Pages = Sequence[Sequence[Line]]


def blocks(pages: Pages, headings: Mapping[tuple[int, str], int]) -> list[Block]:
    """The blocks of all pages. `headings` has the level of each heading that the outline names, by page
    (from 1) and text in small letters without blanks; without any, larger lines are taken for headings."""
    furniture = _furniture(pages)
    sizes = [line.size for page in pages for line in page for _ in range(max(len(line.text) // 20, 1))]
    usual = statistics.median(sizes) if sizes else 0.0
    words = _hyphenated(pages)
    found: list[Block] = []
    for number, page in enumerate(pages, 1):
        kept = [line for line in page if _mark(line) not in furniture]
        for block in _page(kept, number, headings, usual=usual, words=words):
            last = found[-1] if found else None
            if last and last.last_page == number - 1 and _goes_on(last, block):
                found[-1] = replace(last, text=_join(last.text, block.text, words), page_to=number)
            else:
                found.append(block)
    return [block for block in found if block.text.strip()]


def key(title: str) -> str:
    """A heading as it is compared: titles in outlines differ from the page's in blanks and letters."""
    return re.sub(r"\W+", "", title.translate(LIGATURES)).casefold()


def _mark(line: Line) -> tuple[int, str]:
    """A line without its numbers, and where it stands, roughly."""
    return round(line.y0 / 8), re.sub(r"[\divxlc]+\b", "#", line.text.strip().casefold())


def _furniture(pages: Pages) -> set[tuple[int, str]]:
    if len(pages) < N_FURNITURE_PAGES:
        return set()
    found: set[tuple[int, str]] = set()
    for group in (pages, pages[::2], pages[1::2]):  # left pages of books have other heads than right ones
        counts: Counter[tuple[int, str]] = Counter()
        for page in group:
            ordered = sorted(page, key=lambda line: -line.y0)
            counts.update({_mark(line) for line in (*_edge(ordered), *_edge(ordered[::-1]))})
        n_least = max(N_FURNITURE_PAGES, SHARE_OF_FURNITURE * len(group))
        found |= {mark for mark, n in counts.items() if n >= n_least}
    return found


def _edge(lines: Sequence[Line]) -> Iterator[Line]:
    """The first lines of a page, seen from its edge, that stand apart from its text."""
    for index, (line, following) in enumerate(itertools.pairwise(lines)):
        gap = max(line.y0 - following.y1, following.y0 - line.y1)
        if index == N_FURNITURE_LINES or gap < FURNITURE_GAP * line.size:
            return
        yield line


def _hyphenated(pages: Pages) -> set[str]:
    """Words that are written with a hyphen within a line, in small letters."""
    pattern = re.compile(r"\b[^\W\d_]+(?:-[^\W\d_]+)+\b")
    return {word.casefold() for page in pages for line in page for word in pattern.findall(line.text)}


def _page(
    page: Sequence[Line],
    number: int,
    headings: Mapping[tuple[int, str], int],
    *,
    usual: float,
    words: set[str],
) -> Iterator[Block]:
    gathered: list[Line] = []
    for line in page:
        level = _level(line, number, headings, usual)
        if level:
            yield from _block(gathered, number, words)
            gathered = []
            yield Block("heading", line.text.translate(LIGATURES), page=number, level=level)
        elif gathered and _begins(gathered, line):
            yield from _block(gathered, number, words)
            gathered = [line]
        else:
            gathered.append(line)
    yield from _block(gathered, number, words)


def _level(line: Line, number: int, headings: Mapping[tuple[int, str], int], usual: float) -> int:
    if headings:
        return headings.get((number, key(line.text)), 0)
    is_short = len(line.text) <= N_HEADING_CHARS and not line.text.rstrip().endswith((".", ",", ";"))
    if is_short and not line.is_row and line.size >= HEADING_SIZE * usual and re.search(r"\w", line.text):
        return 1 if line.size >= 1.5 * usual else 2
    return 0


def _begins(gathered: Sequence[Line], line: Line) -> bool:
    """Whether a line begins a paragraph, after those that were gathered."""
    last = gathered[-1]
    if line.is_row != last.is_row or _BULLET.match(line.text):
        return True
    if line.is_row:
        return False
    gap = last.y0 - line.y1
    if gap < -2 * last.size:  # the next column
        return bool(_ENDS_SENTENCE.search(last.text))
    width = max(each.x1 for each in gathered) - min(each.x0 for each in gathered)
    is_short = len(gathered) > 1 and last.x1 - min(each.x0 for each in gathered) < 0.8 * width
    return gap > GAP * line.size or (is_short and bool(_ENDS_SENTENCE.search(last.text)))


def _block(lines: Sequence[Line], number: int, words: set[str]) -> Iterator[Block]:
    if not lines:
        return
    if lines[0].is_row:
        rows = [line.text.translate(LIGATURES) for line in lines]
        yield Block("table", "\n".join(rows), page=number, n_header_lines=1 if len(rows) > 1 else 0)
        return
    text = lines[0].text
    for line in lines[1:]:
        text = _join(text, line.text, words)
    yield Block("list" if _BULLET.match(text) else "paragraph", text.translate(LIGATURES), page=number)


def _join(text: str, more: str, words: set[str]) -> str:
    """Two lines as one. A hyphen at the end goes where it only parts a word."""
    text, more = text.rstrip(), more.lstrip()
    tail = text[-N_TAIL:]
    if _JOINT_END.search(tail) and (more[:1].isupper() or (more[:1].isdigit() and tail[-2].isdigit())):
        return text + more
    if not (_HYPHEN_END.search(tail) and more[:1].islower()) or (tail[-1] == "-" and _SHARED.match(more)):
        is_unspaced = _UNSPACED.match(text[-1:]) and _UNSPACED.match(more[:1])
        return f"{text}{more}" if is_unspaced else f"{text} {more}"
    begin = re.split(r"\s", tail[:-1])[-1]
    end = re.split(r"[\s.,;:!?)]", more[:N_TAIL])[0]
    is_known = f"{begin}-{end}".casefold() in words or bool(_TRUE_HYPHEN.search(f"{tail[:-1]}-"))
    is_true = is_known or len(begin) == 1 or bool(_INNER.search(begin))
    return f"{text[:-1]}-{more}" if is_true else text[:-1] + more


def _goes_on(last: Block, block: Block) -> bool:
    """Whether a paragraph runs over the page break."""
    if last.kind not in ("paragraph", "list") or block.kind != "paragraph":
        return False
    if len(last.text) > N_CHARS_OVER_PAGES:
        return False
    return not _ENDS_SENTENCE.search(last.text[-N_TAIL:]) or block.text[:1].islower()
