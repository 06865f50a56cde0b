"""Which facts are found: documents are read as any other is, kept in a library, and asked for their facts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.documents.book import Fact, write_book
from benchmarks.documents.words import LANGUAGES
from benchmarks.documents.write import write
from nemolocal.config import Config
from nemolocal.documents.library import Hit, Library
from nemolocal.documents.load import load
from nemolocal.documents.parts import Piece
from nemolocal.documents.retrieve import N_HITS, fuse
from nemolocal.vectors import Embedder

N_FIRST = 5
"""A fact is found if its piece is among so many."""
N_LETTERS_AFTER_BORDER = 160
N_EMBEDDED_AT_ONCE = 64
Way = Literal["keywords", "paraphrase", "paraphrase, vectors", "keywords, all documents"]


@dataclass(frozen=True)
class Plan:
    """A document that is to be made."""

    language: str
    suffix: str
    n_pages: int
    n_facts: int


@dataclass(frozen=True)
class Asked:
    """A fact, whether each way of asking found it, and whether it stands right after a piece's border."""

    plan: Plan
    fact: Fact
    is_after_border: bool
    found: dict[Way, bool]


@dataclass(frozen=True)
class Kept:
    plan: Plan
    id: int
    facts: tuple[Fact, ...]
    pieces: list[Piece]
    has_pages: bool
    read_s: float
    index_s: float


def keep(plan: Plan, folder: Path, library: Library, *, seed: int) -> Kept:
    """Make a document, read it and index it."""
    book = write_book(LANGUAGES[plan.language], n_pages=plan.n_pages, n_facts=plan.n_facts, seed=seed)
    path = folder / f"{plan.language}-{plan.n_pages}-{seed}{plan.suffix}"
    write(book, path)
    begun_s = time.perf_counter()
    document = load(path)
    read_s = time.perf_counter() - begun_s
    has_pages = plan.suffix in (".pdf", ".docx")
    if has_pages and document.n_pages != plan.n_pages:
        raise ValueError(f"{path.name} was read with {document.n_pages} pages")
    for fact in book.facts:
        if fact.value not in document.text:
            raise ValueError(f"{path.name} was read without {fact}")
    begun_s = time.perf_counter()
    row = library.add(document, path=path)
    index_s = time.perf_counter() - begun_s
    pieces = library.pieces(row.id)
    return Kept(plan, row.id, tuple(book.facts), pieces, has_pages, read_s, index_s)


def ask(library: Library, kept: Kept, embed: Callable[[str], bytes] | None, model: str) -> Iterable[Asked]:
    for fact in kept.facts:
        at = next(piece.text.find(fact.value) for piece in kept.pieces if fact.value in piece.text)
        words = library.search(fact.keywords, k=N_HITS, ids=[kept.id])
        told = library.search(fact.paraphrase, k=N_HITS, ids=[kept.id])
        found: dict[Way, bool] = {
            "keywords": _is_found(fact, kept, words),
            "keywords, all documents": _is_found(fact, kept, library.search(fact.keywords, k=N_FIRST)),
            "paraphrase": _is_found(fact, kept, told),
        }
        if embed:
            near = library.nearest(model, embed(fact.paraphrase), k=N_HITS, ids=[kept.id])
            found["paraphrase, vectors"] = _is_found(fact, kept, fuse([told, near]))
        is_after = fact.where == "border" and at <= N_LETTERS_AFTER_BORDER
        yield Asked(kept.plan, fact, is_after, found)


def _is_found(fact: Fact, kept: Kept, hits: Sequence[Hit]) -> bool:
    """Whether one of the first pieces holds the fact, and says its page where the format has pages."""
    for hit in hits[:N_FIRST]:
        if hit.document_id == kept.id and fact.value in (piece := kept.pieces[hit.number]).text:
            return not kept.has_pages or piece.page_from <= fact.page <= piece.page_to
    return False


def measure(
    plans: Sequence[Plan],
    folder: Path,
    config: Config,
    *,
    embedder: Embedder | None = None,
    run: Callable[[Awaitable[object]], object] = lambda task: asyncio.run(task),  # type: ignore[arg-type]
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[Kept], list[Asked]]:
    """All documents go into one library; each is asked for itself, and all at once."""
    library = Library(config)
    kept = []
    for seed, plan in enumerate(plans):
        kept.append(keep(plan, folder, library, seed=seed))
        say(f"{plan.language} {plan.suffix}, {plan.n_pages} pages: {len(kept[-1].pieces)} pieces")
    embed = None
    if embedder:
        missing = library.without_vectors(embedder.id)
        for at in range(0, len(missing), N_EMBEDDED_AT_ONCE):
            some = missing[at : at + N_EMBEDDED_AT_ONCE]
            made = run(embedder.embed([text for _, text in some]))
            library.keep_vectors(embedder.id, dict(zip((id for id, _ in some), made.values, strict=True)))  # type: ignore[attr-defined]

        def embed(question: str) -> bytes:
            return run(embedder.embed([question])).values[0]  # type: ignore[attr-defined, no-any-return]

    model = embedder.id if embedder else ""
    return kept, [asked for each in kept for asked in ask(library, each, embed, model)]
