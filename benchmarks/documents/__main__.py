"""`python -m benchmarks.documents`: how often a fact's page is among the first five pieces."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.documents.book import WHERE
from benchmarks.documents.measure import N_FIRST, Asked, Kept, Plan, Way, measure
from nemolocal import config
from nemolocal.service import Service

PLANS = (
    Plan("en", ".pdf", 500, 100),
    Plan("en", ".docx", 100, 60),
    Plan("en", ".html", 50, 40),
    Plan("de", ".pdf", 300, 80),
    Plan("de", ".docx", 50, 40),
    Plan("de", ".md", 100, 60),
    Plan("zh", ".pdf", 200, 80),
    Plan("zh", ".txt", 100, 60),
    Plan("zh", ".html", 50, 40),
)
WAYS: tuple[Way, ...] = ("keywords", "keywords, all documents", "paraphrase", "paraphrase, vectors")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.documents", description=__doc__)
    parser.add_argument(
        "--embedder", metavar="GGUF", help="a model that embeds, for the figures with vectors"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NEMOLOCAL_HOME"] = str(Path(folder, "home"))
        settings = config.load()
        with asyncio.Runner() as runner:
            service = Service(settings)
            try:
                embedder = None
                if asked.embedder:
                    service.admit(asked.embedder)
                    embedder = service.find_embedder(asked.embedder)
                found = measure(
                    PLANS,
                    Path(folder),
                    settings,
                    embedder=embedder,
                    run=runner.run,
                    say=lambda line: print(line, file=sys.stderr),
                )
            finally:
                runner.run(service.close())
    print(report(*found))


def report(kept: Sequence[Kept], asked: Sequence[Asked]) -> str:
    """A table in Markdown: a line for each language, format, kind of place and depth."""
    lines = [
        f"| facts found in the first {N_FIRST} pieces | facts | {' | '.join(WAYS)} |",
        f"|---|---|{'---|' * len(WAYS)}",
        _line("all", asked, lambda each: True),
    ]
    for each in kept:
        plan = each.plan
        name = f"{plan.language}, {plan.suffix[1:]}, {plan.n_pages} pages, {len(each.pieces):,} pieces"
        lines.append(_line(name, asked, lambda one, plan=plan: one.plan == plan))  # type: ignore[misc]
    for where in WHERE:
        if where != "border":
            lines.append(_line(f"in a {where}", asked, lambda one, where=where: one.fact.where == where))  # type: ignore[misc]
    lines.append(_line("right after a piece's border", asked, lambda one: one.is_after_border))
    for third, name in enumerate(("first", "second", "last")):
        lines.append(
            _line(f"in the {name} third", asked, lambda one, third=third: int(one.fact.depth * 3) == third)  # type: ignore[misc]
        )
    n_pages = sum(each.plan.n_pages for each in kept)
    read_s, index_s = sum(each.read_s for each in kept), sum(each.index_s for each in kept)
    return "\n".join([*lines, "", f"{n_pages:,} pages: read in {read_s:.1f} s, indexed in {index_s:.1f} s."])


def _line(name: str, asked: Sequence[Asked], choose: Callable[[Asked], bool]) -> str:
    chosen = [one for one in asked if choose(one)]
    return f"| {name} | {len(chosen)} | {' | '.join(_share(chosen, way) for way in WAYS)} |"


def _share(asked: Sequence[Asked], way: Way) -> str:
    measured = [one.found[way] for one in asked if way in one.found]
    return f"{sum(measured) / len(measured):.1%}" if measured else "not measured"


if __name__ == "__main__":
    main()
