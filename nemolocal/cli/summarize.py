"""`nemolocal summarize`: documents summed up, each with the record of what was read of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nemolocal import units
from nemolocal.cli import options, output
from nemolocal.cli.ask import Paths, read_in
from nemolocal.config import Config, expand
from nemolocal.errors import DocumentError, NemoLocalError, UsageError

if TYPE_CHECKING:
    from nemolocal.documents.summarise import Options, Progress, Summary
    from nemolocal.papers import Added
    from nemolocal.service import Service

LENGTHS = ("short", "medium", "long")


@options.takes_settings("model", *options.LOADING, *options.PLANNING, *options.NETWORK, *options.MACHINE)
def summarize(
    config: Config,
    paths: Paths,
    out: Annotated[
        str | None, typer.Option("-o", "--out", metavar="FILE", help="Write it there; default: stdout.")
    ] = None,
    length: Annotated[
        str, typer.Option("--length", metavar="|".join(LENGTHS), help="How long it is to be.")
    ] = "medium",
    focus: Annotated[str, typer.Option("--focus", metavar="TEXT", help="What matters most.")] = "",
    language: Annotated[
        str, typer.Option("--language", metavar="NAME", help="Of the summary; default: the document's.")
    ] = "",
    password: Annotated[
        str, typer.Option("--password", metavar="TEXT", help="For PDFs that are protected by one.")
    ] = "",
    as_json: options.AsJson = False,
) -> None:
    """Summarise documents, all of each, and say which pages were read.

    A run that was broken off goes on where it was.
    """
    from nemolocal.cli.pull import ensure_local
    from nemolocal.documents.summarise import Options
    from nemolocal.service import Service

    wish = Options(_length(length), focus, language)
    target = _target(out)
    with asyncio.Runner() as runner:
        service = Service(config)
        try:
            added = runner.run(read_in(service, paths, password=password))
            if not any(each.row for each in added):
                raise DocumentError("There is no readable document to summarise.", kind="empty")
            ref = ensure_local(service, config.settings.model or None).id
            made, failed = runner.run(_summaries(service, added, wish, ref))
            many = len(made) > 1
            overall = runner.run(service.papers.overall(made, ref=ref, options=wish)) if many else None
        finally:
            runner.run(service.close())
    text = _markdown(made, overall)
    if as_json:
        found = [as_plain(summary, path) for summary, path in zip(made, _paths(added), strict=False)]
        output.print_json({"documents": found, "overall": overall})
    elif not target:
        print(text)
    if target:
        _write(target, text)
    for summary in made:
        output.note(covered(summary))
    if failed or any(each.error for each in added):
        raise typer.Exit(1)


def _length(text: str) -> Literal["short", "medium", "long"]:
    for known in ("short", "medium", "long"):
        if text == known:
            return known
    raise UsageError(f"--length: '{text}' is not one of {', '.join(LENGTHS)}.")


def _target(out: str | None) -> Path | None:
    """Checked before an hour of work."""
    if out is None:
        return None
    target = expand(out)
    if target.is_dir():
        raise UsageError(f"{target} is a folder.", hint="Give -o with the name of a file.")
    if not target.parent.is_dir():
        raise UsageError(f"There is no folder {target.parent}.")
    return target


async def _summaries(
    service: Service, added: Sequence[Added], wish: Options, ref: str
) -> tuple[list[Summary], int]:
    """One for each document, and how many could not be made."""
    made, n_failed = [], 0
    for each in {each.row.id: each for each in added if each.row}.values():
        assert each.row is not None
        try:
            show = _shower(each.row.name)
            made.append(await service.papers.summarise(each.row.id, ref=ref, options=wish, on_progress=show))
        except NemoLocalError as error:
            output.error(f"{each.row.name}: {error}")
            n_failed += 1
    if not made:
        raise typer.Exit(1)
    return made, n_failed


def _shower(name: str) -> Any:
    """Draws how far a summary is, where a person looks on."""

    def show(progress: Progress) -> None:
        if not sys.stderr.isatty():
            return
        left = "" if progress.left_s is None else f", {units.span_of_time(progress.left_s)} left"
        is_last = progress.n_done == progress.n_parts
        sys.stderr.write(
            f"\r\x1b[K{name}: {progress.pages_done:,} of {progress.pages:,} pages{'' if is_last else left}"
            + ("\n" if is_last else "")
        )
        sys.stderr.flush()

    return show


def _paths(added: Sequence[Added]) -> list[str]:
    return [each.path for each in {each.row.id: each for each in added if each.row}.values()]


def _markdown(made: Sequence[Summary], overall: str | None) -> str:
    parts = [f"# All documents\n\n{overall}\n"] if overall else []
    return "\n".join([*parts, *(summary.text for summary in made)])


def _write(target: Path, text: str) -> None:
    target.write_text(text, encoding="utf-8")
    output.note(f"{target} is written.")


def as_plain(summary: Summary, path: str) -> dict[str, Any]:
    """As JSON; pages count from 1, times are in seconds."""
    coverage = summary.coverage
    return {
        "path": path,
        "summary": summary.text,
        "coverage": {
            "pages": coverage.pages,
            "read": list(coverage.read),
            "skipped": [asdict(each) for each in coverage.skipped],
            "pieces": coverage.n_pieces,
            "pieces_read": coverage.n_pieces_read,
        },
        "usage": asdict(summary.usage),
        "seconds": round(summary.seconds, 3),
        "reused_parts": summary.n_reused,
    }


def covered(summary: Summary) -> str:
    """What was read, in a line."""
    coverage = summary.coverage
    line = f"{summary.name}: {len(coverage.read):,} of {coverage.pages:,} pages read, "
    line += f"{coverage.n_pieces_read:,} of {coverage.n_pieces:,} pieces"
    reasons: dict[str, list[int]] = {}
    for each in coverage.skipped:
        reasons.setdefault(each.why, []).append(each.page)
    for why, pages in reasons.items():
        where = f"page{'s' if len(pages) > 1 else ''} {units.ranges(pages)}" if any(pages) else "not read"
        line += f"; {where}: {why}"
    return f"{line} ({units.span_of_time(summary.seconds)})"
