"""`nemolocal ask`: a question answered from files, with the places that the answer rests on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemolocal import units
from nemolocal.cli import options, output
from nemolocal.config import Config
from nemolocal.errors import UsageError

if TYPE_CHECKING:
    from nemolocal.documents.answer import Answer, Citation
    from nemolocal.documents.retrieve import Passage
    from nemolocal.papers import Added
    from nemolocal.service import Service

N_PASSAGE_TOKENS = 4_000
"""Of all passages together, where no model says how much it can read."""

Paths = Annotated[list[str], typer.Argument(metavar="PATH…", help="Files, folders and patterns.")]


@options.takes_settings("model", *options.LOADING, *options.PLANNING, *options.NETWORK, *options.MACHINE)
def ask(
    config: Config,
    paths: Paths,
    question: Annotated[str, typer.Option("-q", "--question", metavar="TEXT", help="The question.")],
    passages_only: Annotated[
        bool,
        typer.Option("--passages-only", help="Only show what would be read; needs no model.", metavar=""),
    ] = False,
    password: Annotated[
        str, typer.Option("--password", metavar="TEXT", help="For PDFs that are protected by one.")
    ] = "",
    as_json: options.AsJson = False,
) -> None:
    """Answer a question from documents, with pages and quotes that were checked."""
    if not question.strip():
        raise UsageError("The question is empty.", hint="Give it after -q.")
    from nemolocal.service import Service

    with asyncio.Runner() as runner:
        service = Service(config)
        try:
            added = runner.run(read_in(service, paths, password=password))
            if passages_only:
                found = runner.run(_passages(service, question, added))
                _show_passages(found, added, as_json=as_json)
            else:
                _answer(runner, service, question, added, config, as_json=as_json)
        finally:
            runner.run(service.close())
    if any(each.error for each in added):
        raise typer.Exit(1)


async def read_in(service: Service, paths: Sequence[str], *, password: str = "") -> list[Added]:
    """Read files into the library, with a line for each that is read for the first time and for each that
    cannot be."""
    added = []

    def tell(name: str, n_done: int, n_all: int) -> None:
        if sys.stderr.isatty() and n_all > 1:
            end = "\n" if n_done == n_all else ""
            sys.stderr.write(f"\r{name}: {n_done:,} of {n_all:,} pages{end}")
            sys.stderr.flush()

    async for each in service.papers.add(paths, password=password, on_page=tell):
        if each.error:
            output.error(str(each.error))
        added.append(each)
    return added


def ids_of(added: Sequence[Added]) -> list[int]:
    return list(dict.fromkeys(each.row.id for each in added if each.row))


async def _passages(service: Service, question: str, added: Sequence[Added]) -> list[Passage]:
    ids = ids_of(added)
    return await service.papers.passages([question], ids=ids, n_tokens=N_PASSAGE_TOKENS) if ids else []


def _answer(
    runner: asyncio.Runner,
    service: Service,
    question: str,
    added: Sequence[Added],
    config: Config,
    *,
    as_json: bool,
) -> None:
    from nemolocal.cli.pull import ensure_local

    ids = ids_of(added)
    ref = ensure_local(service, config.settings.model or None).id if ids else None

    async def run() -> Answer:
        from nemolocal.documents.answer import Answer

        stream = service.papers.ask(question, ids=ids, ref=ref, unread=added)
        async with aclosing(stream):
            async for item in stream:
                if isinstance(item, Answer):
                    return item
                if not as_json:
                    print("\n" if item.is_restart else "", item.text, sep="", end="", flush=True)
        raise AssertionError("an answer ended without its last item")

    answer = runner.run(run())
    if as_json:
        output.print_json(as_plain(answer))
        return
    print("" if answer.passages or answer.mode == "whole" else answer.text)
    _show_citations(answer)


def as_plain(answer: Answer) -> dict[str, Any]:
    """As JSON: offsets are characters of the document's text, pages count from 1."""
    return {
        "answer": answer.text,
        "mode": answer.mode,
        "is_found": answer.is_found,
        "is_cut": answer.is_cut,
        "citations": [asdict(citation) for citation in answer.citations],
        "passages": [asdict(passage) for passage in answer.passages],
        "not_read": [asdict(unread) for unread in answer.not_read],
        "usage": asdict(answer.usage),
    }


def _show_citations(answer: Answer) -> None:
    if answer.is_found and not any(citation.verified for citation in answer.citations):
        output.note("Nothing in the documents was found that supports this answer.")
    if answer.is_cut:
        output.note("The answer was cut off; it had no more tokens.")
    n = len(answer.passages)
    how = "read whole" if answer.mode == "whole" else f"{n} passage{'' if n == 1 else 's'} read"
    print()
    for citation in answer.citations:
        output.item(cited(citation))
    output.note(f"The documents: {how}.")
    for line in not_read(answer):
        output.note(line)


def not_read(answer: Answer) -> Iterator[str]:
    """What was not read: pages of one document for one reason in a line."""
    groups: dict[tuple[str, str], list[int]] = {}
    for unread in answer.not_read:
        groups.setdefault((unread.document, unread.why), []).append(unread.page)
    for (name, why), pages in groups.items():
        name_of_pages = "page" if len(pages) == 1 else "pages"
        where = f", {name_of_pages} {units.ranges(pages)}" if any(pages) else ""
        yield f"Not read: {name}{where}: {why}"


def cited(citation: Citation) -> str:
    """A citation in a line."""
    if not citation.verified:
        return f"[{citation.n}] not found there: “{citation.quote}”"
    return f"[{citation.n}] {citation.document}, {citation.where}: “{citation.quote}”"


def _show_passages(found: Sequence[Passage], added: Sequence[Added], *, as_json: bool) -> None:
    unread = [{"document": each.path, "page": 0, "why": str(each.error)} for each in added if each.error]
    if as_json:
        passages = [asdict(passage) for passage in found]
        empty: dict[str, Any] = {"answer": None, "mode": "retrieval", "citations": [], "usage": None}
        output.print_json({**empty, "passages": passages, "not_read": unread})
        return
    for passage in found:
        print(f"{passage.document}, {passage.where}")
        for line in passage.text.splitlines():
            print(f"    {line}")
        print()
    if not found:
        print("Nothing in the documents has to do with the question.")
