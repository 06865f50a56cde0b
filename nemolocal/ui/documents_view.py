"""The Documents tab as HTML: files on their way, the library, questions with what their answers rest on,
summaries with what was read. Pure; every text of a document, a name or a model is escaped (drawing.py,
prose.py), since the page shows this HTML as it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from html import escape
from typing import Final
from urllib.parse import quote as url_quoted

from nemolocal import units
from nemolocal.documents.answer import Answer, Citation
from nemolocal.documents.coverage import Coverage
from nemolocal.documents.library import Row
from nemolocal.documents.load.sniff import SUFFIXES
from nemolocal.documents.summarise import Progress, Summary
from nemolocal.ui.drawing import button, progress, text
from nemolocal.ui.intake import unread_lines
from nemolocal.ui.prose import prose
from nemolocal.ui.rooms import PageText, Quoted, Read, Room, Summing, Talk, Turn
from nemolocal.ui.status import notice

UNITS: Final = {"pdf": "page", "docx": "page", "pptx": "slide", "xlsx": "sheet", "epub": "chapter"}
"""What is counted of a kind of document; of others, their letters."""
N_BUCKETS: Final = 400
"""Parts of a coverage bar: more could not be told apart."""

NOTHING_PICKED: Final = '<p class="quiet">Choose one or more documents of the list to ask about them.</p>'
NOTHING_ASKED: Final = (
    '<p class="quiet">Answers are taken from the chosen documents alone, each with the place that it rests '
    "on.</p>"
)


def drop() -> str:
    """Where documents are dropped or chosen; page.js does the rest, and reads the endings here."""
    return (
        f'<div class="drop" data-accept="{text(",".join(SUFFIXES))}">'
        '<button type="button" class="act main" id="documents-choose">Add documents</button>'
        "<span>or drop them anywhere on this page. PDF, Word, PowerPoint, Excel, EPUB, HTML, Markdown, "
        "mails, text and code. They stay on this machine.</span></div>"
    )


# Files on their way --------------------------------------------------------------------------------


def reads(found: Sequence[Read]) -> str:
    if not found:
        return ""
    rows = "".join(map(_read, found))
    clear = button("Clear", "clear-reads", "") if any(read.is_over for read in found) else ""
    return f'<div class="now reads">{rows}<div class="now-row last">{clear}</div></div>'


def _read(read: Read) -> str:
    match read.state:
        case "arriving":
            state = f"{_bar(read)} {units.size(read.n_done)}"
        case "waiting":
            state = "Waiting"
        case "reading":
            pages = f"{read.n_done:,} of {read.n_all:,} pages" if read.n_all else "Reading"
            state = f"{_bar(read)} {pages}"
        case _:
            look = "problem" if read.state == "failed" else "quiet"
            state = f'<span class="{look}">{text(read.said)}</span>'
    can_stop = read.state in ("waiting", "reading")
    stop = button("Stop", "stop-read", str(read.key), of=f"reading {read.name}") if can_stop else ""
    look = " locked" if read.is_locked else ""
    return (
        f'<div class="now-row{look}"><span class="now-name">{text(read.name)}</span>'
        f'<span class="now-state">{state}</span>{stop}</div>'
    )


def _bar(read: Read) -> str:
    return progress(read.n_done / read.n_all if read.n_all else 0.0, f"Share of {read.name} that is read")


# The library -----------------------------------------------------------------------------------


def rows(found: Sequence[Row], picked: Sequence[int]) -> str:
    if not found:
        return '<p class="quiet">No documents yet.</p>'
    n = len(found)
    head = (
        f'<div class="list-head"><b>{n:,} document{"" if n == 1 else "s"}</b>'
        f"{button('All', 'all', '', of='documents')}{button('None', 'none', '', of='of the documents')}</div>"
    )
    return f'{head}<div class="rows papers">{"".join(_row(row, row.id in picked) for row in found)}</div>'


def _row(row: Row, is_picked: bool) -> str:
    when = time.strftime("%Y-%m-%d", time.localtime(row.at_s))
    return (
        f'<button type="button" role="checkbox" class="entry{" chosen" if is_picked else ""}" '
        f'aria-checked="{"true" if is_picked else "false"}" data-act="pick" data-ref="{row.id}">'
        f'<span class="box" aria-hidden="true"></span><span class="entry-name">{text(row.name)}</span>'
        f'<span class="entry-mark">{text(row.kind)}</span>'
        f'<span class="entry-line"><span>{_extent(row)}</span><span class="entry-right">{when}</span></span>'
        "</button>"
    )


def _extent(row: Row) -> str:
    if unit := UNITS.get(row.kind):
        return f"{row.n_pages:,} {unit}{'' if row.n_pages == 1 else 's'}"
    return f"{row.n_chars:,} character{'' if row.n_chars == 1 else 's'}"


def head(picked: Sequence[Row], *, is_removing: bool) -> str:
    """What is chosen, and its removal."""
    if not picked:
        return NOTHING_PICKED
    names = text(picked[0].name) if len(picked) == 1 else f"{len(picked):,} documents"
    if not is_removing:
        removal = button("Remove", "remove", "", of=_spoken(picked))
        return f'<div class="head"><h2>{names}</h2>{removal}</div>'
    what = "it" if len(picked) == 1 else "them"
    asked = (
        f'<div class="warning" role="alert"><span>Remove {names} from the library, with all that was made of '
        f"{what}? The files themselves stay where they are.</span> "
        f"{button('Yes, remove', 'remove-yes', '', kind='danger', of=_spoken(picked))}"
        f"{button('No', 'remove-no', '')}</div>"
    )
    return f'<div class="head"><h2>{names}</h2></div>{asked}'


def _spoken(picked: Sequence[Row]) -> str:
    return picked[0].name if len(picked) == 1 else f"{len(picked)} documents"


# Questions -------------------------------------------------------------------------------------


def talk(turns: Talk, *, is_picked: bool) -> str:
    """What was asked, the last one first, where the question was written."""
    if not turns:
        return NOTHING_ASKED if is_picked else ""
    return "".join(turn(each) for each in reversed(turns))


def turn(each: Turn) -> str:
    """A question with its answer, and what that rests on."""
    parts = [f'<h3 class="question" dir="auto">{text(each.question)}</h3>']
    cited = {citation.n for citation in each.answer.citations} if each.answer else set()
    if each.text:
        parts.append(f'<div class="prose-own">{prose(each.text, cited=cited)}</div>')
    if each.answer:
        parts += [_citations(each.answer, each.quoted), _ways(each.answer)]
    if each.note:
        parts.append(f'<p class="quiet"><em>{text(each.note)}</em></p>')
    return f'<article class="turn">{"".join(parts)}</article>'


def growing(each: Turn, waiting: str) -> str:
    """A question whose answer is being written."""
    said = f'<div class="prose-own">{prose(each.text)}</div>' if each.text else ""
    going_on = "" if each.text else f'<p class="quiet busy" role="status">{text(waiting)}</p>'
    return (
        f'<article class="turn growing"><h3 class="question" dir="auto">{text(each.question)}</h3>'
        f"{said}{going_on}</article>"
    )


def _citations(answer: Answer, quoted: Sequence[Quoted | None]) -> str:
    shown = list(zip(answer.citations, quoted, strict=True))
    return f'<div class="citations">{"".join(_citation(*each) for each in shown)}</div>' if shown else ""


def _citation(citation: Citation, quoted: Quoted | None) -> str:
    number = f'<span class="cite-n" aria-hidden="true">{citation.n}</span>'
    if quoted is None or not citation.verified:
        where = text(citation.document) or "There is no such source"
        return (
            f'<details class="citation unverified" data-n="{citation.n}"><summary>{number}'
            f'<span class="cite-where">{where}</span><span class="mark-missing">not found</span></summary>'
            f'<blockquote dir="auto">{text(citation.quote)}</blockquote>'
            '<p class="problem">These words do not stand in the documents.</p></details>'
        )
    ref = f"{citation.document_id}/{citation.page}/{citation.start}/{citation.end}"
    page = button(f"Show {citation.where}", "page", ref, of=f"of {citation.document}")
    return (
        f'<details class="citation" data-n="{citation.n}"><summary>{number}'
        f'<span class="cite-where">{text(citation.document)}, {text(citation.where)}</span>'
        f'<span class="cite-quote">{text(citation.quote)}</span></summary>'
        f'<blockquote dir="auto">{_marked(quoted)}</blockquote>{page}</details>'
    )


def _marked(quoted: Quoted) -> str:
    return f"{_lines(quoted.before)}<mark>{_lines(quoted.quote)}</mark>{_lines(quoted.after)}"


def _lines(words: str) -> str:
    """Text with its line breaks, in which nothing else is read."""
    return escape(words).replace("\r", "").replace("\n", "<br>")


def _ways(answer: Answer) -> str:
    """Which way was used, and what was not read."""
    lines = []
    if answer.is_found and not any(citation.verified for citation in answer.citations):
        lines.append('<p class="problem">Nothing in the documents was found that supports this answer.</p>')
    if answer.is_cut:
        lines.append('<p class="problem">The answer was cut off: it had no more tokens.</p>')
    n = len(answer.passages)
    if answer.mode == "whole":
        lines.append('<p class="quiet way">Read whole</p>')
    elif not n:
        lines.append('<p class="quiet way">No passage was read</p>')
    else:
        places = "".join(f"<li>{text(each.document)}, {text(each.where)}</li>" for each in answer.passages)
        named = f"{n} passage{'' if n == 1 else 's'} read"
        lines.append(f'<details class="way"><summary>{named}</summary><ul>{places}</ul></details>')
    groups: dict[str, list[tuple[int, str]]] = {}
    for unread in answer.not_read:
        groups.setdefault(unread.document, []).append((unread.page, unread.why))
    lines += [
        f'<p class="quiet way">{text(name)}: {text(line)}</p>'
        for name, found in groups.items()
        for line in unread_lines(found)
    ]
    return f'<div class="ways">{"".join(lines)}</div>'


def page(shown: PageText | None) -> str:
    """A page of a document, to be looked at beside the rest."""
    if shown is None:
        return ""
    body = _marked(shown.quote) if shown.quote else _lines(shown.text)
    cut = '<p class="quiet">Only this part of it is shown.</p>' if shown.is_cut else ""
    title = f"{shown.name}, {shown.where}"
    return (
        f'<section class="reader" aria-label="{text(title)}"><div class="head"><h3>{text(title)}</h3>'
        f'{button("Close", "page-close", "", of=title)}</div><div class="page-text" tabindex="0" '
        f'role="group" aria-label="Text of the page" dir="auto">{body}</div>{cut}</section>'
    )


# Summaries -------------------------------------------------------------------------------------


def summary(summing: Summing | None, tab: str) -> str:
    if summing is None:
        return ""
    return _going_on(summing) if summing.state == "running" else _made(summing, tab)


def _going_on(summing: Summing) -> str:
    n_all, n_done = len(summing.documents), len(summing.made) + len(summing.lost)
    name = "All documents together" if summing.is_joining else summing.documents[min(n_done, n_all - 1)][1]
    which = f" ({n_done + 1} of {n_all})" if n_all > 1 and not summing.is_joining else ""
    stop = button("Stop", "stop-summary", "", of="the summary")
    return (
        f'<div class="now summing"><div class="now-row"><span class="now-name">{text(name)}{which}</span>'
        f'<span class="now-state" role="status">{_how_far(summing)}</span>{stop}</div></div>'
    )


def _how_far(summing: Summing) -> str:
    found: Progress | None = summing.progress
    if summing.is_joining or found is None:
        return "Writing one text over all" if summing.is_joining else "Beginning"
    bar = progress(found.n_done / max(found.n_parts, 1), "Share of the document that is summarised")
    pages = f"{found.pages_done:,} of {found.pages:,} page{'' if found.pages == 1 else 's'}"
    if found.n_done == found.n_parts and found.n_parts:
        left = ", putting its parts together"
    else:
        left = "" if found.left_s is None else f", about {units.span_of_time(found.left_s)} left"
    return f"{bar} {pages}{left}"


def _made(summing: Summing, tab: str) -> str:
    parts = [notice(summing.problem)]
    if summing.state == "stopped":
        parts.append(
            '<p class="quiet">Stopped. What is done of it is kept: a summary with the same settings goes on '
            "from there.</p>"
        )
    parts += [f'<p class="problem">{text(line)}</p>' for line in summing.lost]
    if summing.made:
        parts.append(
            f'<p><a class="act more" href="summary.md?tab={text(url_quoted(tab, safe=""))}" download>'
            "Download as Markdown</a></p>"
        )
    if summing.overall:
        parts.append(f'<div class="prose-own"><h2>All documents</h2>{prose(summing.overall)}</div>')
    for id, made in summing.made:
        parts.append(coverage(made.name, made.coverage, _took(made)))
        written = prose(made.text, place=partial(_place, id))
        parts.append(f'<div class="prose-own">{written}</div>')
    return f'<div class="summary">{"".join(parts)}</div>'


def _took(made: Summary) -> str:
    n_read, n_written = made.usage.prompt_tokens, made.usage.completion_tokens
    took = f"in {units.span_of_time(made.seconds)}, {n_read:,} tokens read and {n_written:,} written"
    if made.n_reused:
        took += f", {made.n_reused:,} part{'' if made.n_reused == 1 else 's'} kept from an earlier run"
    return took


def _place(id: int, page: int) -> str:
    return f"{id}/{page}"


def coverage(name: str, covered: Coverage, took: str) -> str:
    """Which pages a summary rests on: as a bar from the first to the last, and in words."""
    n_read = len(covered.read)
    told = (
        f"{n_read:,} of {covered.pages:,} page{'' if covered.pages == 1 else 's'} read, "
        f"{covered.n_pieces_read:,} of {covered.n_pieces:,} pieces, {took}"
    )
    skipped = "".join(
        f'<li class="problem">{text(line)}</li>'
        for line in unread_lines([(each.page, each.why) for each in covered.skipped])
    )
    return (
        f'<div class="covered"><span class="covered-name">{text(name)}</span>'
        f'<span class="covered-told">{told}</span>'
        f'<span class="memory" role="img" aria-label="{text(f"{told} of {name}")}">{_strip(covered)}</span>'
        f"{f'<ul>{skipped}</ul>' if skipped else ''}</div>"
    )


def _strip(covered: Coverage) -> str:
    """Runs of pages that were read or not, each as wide as its share. A bucket of pages of which one was not
    read counts as not read."""
    read = set(covered.read)
    n = min(covered.pages, N_BUCKETS)
    runs: list[list[int]] = []
    for bucket in range(n):
        begin, end = bucket * covered.pages // n + 1, (bucket + 1) * covered.pages // n + 1
        is_read = all(page in read for page in range(begin, end))
        if not runs or runs[-1][0] != is_read:
            runs.append([is_read, 0])
        runs[-1][1] += 1
    return "".join(
        f'<i class="{"read" if is_read else "skipped"}" style="width:{100 * count / n:.3f}%"></i>'
        for is_read, count in runs
    )


def all_of(room: Room, found: Sequence[Row], tab: str) -> dict[str, str]:
    """The tab's changing parts, by name."""
    picked = [row for row in found if row.id in room.picked]
    return {
        "reads": reads(list(room.reads.values())),
        "listed": rows(found, room.picked),
        "head": head(picked, is_removing=room.is_removing),
        "talk": talk(room.talk(), is_picked=bool(picked)),
        "summary": summary(room.summing, tab),
        "page": page(room.page),
        "said": notice(room.said),
    }
