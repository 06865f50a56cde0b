"""`nemolocal models search`, and what `models show` and `models verify --online` ask the model hub."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemolocal import units
from nemolocal.cli import options, output
from nemolocal.config import Config

if TYPE_CHECKING:
    from nemolocal.models.offers import Offer
    from nemolocal.models.reference import HubRef
    from nemolocal.models.repos import HubRepo, RemoteModel
    from nemolocal.models.store import LocalModel

Facts = dict[str, Any]

WHAT = {
    "projector": "eyes or ears",
    "imatrix": "statistics for quantizing",
    "draft": "draft that guesses ahead",
    "adapter": "LoRA adapter",
    "other": "part of something else",
}


@options.takes_settings("offline", "log_level")
def search(
    config: Config,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Words to look for.")],
    as_json: options.AsJson = False,
) -> None:
    """Search the model hub for repositories with GGUF files."""
    from nemolocal.errors import UsageError
    from nemolocal.models import hub

    if not query.strip():
        raise UsageError("There is nothing to look for.", hint="Give a word or two, such as nemotron.")
    hits = hub.search(query, config)
    if as_json:
        output.print_json(
            [
                {
                    "ref": f"hf:{hit.repo}",
                    "downloads": hit.n_downloads,
                    "likes": hit.n_likes,
                    "gated": hit.is_gated,
                    "updated": hit.updated,
                    "quants": list(hit.quants),
                }
                for hit in hits
            ]
        )
        return
    if not hits:
        output.note(f"The hub has no GGUF models for '{query}'.")
        return
    for hit in hits:  # no table: references are long, and must be whole to be copied
        print(f"hf:{hit.repo}")
        terms = ["terms to be accepted"] if hit.is_gated else []
        facts = [f"{hit.n_downloads:,} downloads, {hit.n_likes:,} liked it", hit.updated, *terms]
        for line in (facts, hit.quants):
            _print_wrapped(", ".join(filter(None, line)))


def _print_wrapped(text: str) -> None:
    for line in textwrap.wrap(text, output.console().width - 4, break_on_hyphens=False):
        print(f"    {line}")


# Showing a repository -----------------------------------------------------------------------------


def repo_facts(ref: HubRef, config: Config) -> Facts:
    """What a repository holds and what the headers of its models say, with the files that are here already.
    `files` are the models, `companions` what only goes with one."""
    from nemolocal.errors import OfflineError
    from nemolocal.models import offers, store

    here = [model for model in store.list_models(config) if store.matches(model, ref)]
    try:
        repo, note = offers.look_up(ref.repo, config)
    except OfflineError as error:
        if not here:
            raise
        output.note(f"Only what is on this machine: {error}")
        return {"id": f"hf:{ref.repo}", "files": [local_row(model) for model in here], "companions": []}
    if note:
        output.note(note)
    models = offers.usable(repo, ref, config)
    shared, headers = _headers(repo, models, config)
    lacking = [model for model in repo.chat_models if model.missing and not (ref.quant or ref.file)]
    local = {(model.quant, model.bytes): model for model in here}
    rows = []
    for model in sorted([*models, *lacking], key=lambda m: (-m.bytes, m.first)):
        own = local.get((model.quant, model.bytes))
        row = local_row(own) if own else _remote_row(repo, model)
        rows.append({**row, "parts": model.n_parts, **_shape_facts(headers.get(model.first))})
    return {
        "id": f"hf:{repo.id}",
        "licence": repo.licence,
        "gated": repo.is_gated,
        "revision": repo.revision,
        "in_pieces": ", ".join(repo.pieces),
        **shared,
        "files": rows,
        "companions": [{**_remote_row(repo, model), "kind": model.kind} for model in repo.companions],
    }


def _headers(repo: HubRepo, models: Sequence[RemoteModel], config: Config) -> tuple[Facts, dict[str, Offer]]:
    """What all these models have in common, and the header of each; or why there is none."""
    from nemolocal.errors import NemoLocalError
    from nemolocal.models import offers

    try:
        found = {offer.model.first: offer for offer in offers.all_of(repo, models, config)}
    except NemoLocalError as error:
        return {"header": str(error)}, {}
    facts = [
        {"name": offer.summary.name, **_shape_facts(offer), "parameters": offer.summary.n_params}
        for offer in found.values()
    ]
    return facts[0] if all(fact == facts[0] for fact in facts) else {}, found


def _shape_facts(offer: Offer | None) -> Facts:
    return {
        "architecture": offer.summary.architecture if offer else None,
        "layers": offer.shape.n_layer if offer else None,
        "context": offer.summary.n_ctx_train if offer else None,
    }


def print_files(facts: Facts) -> None:
    """The files of `repo_facts` as tables."""
    rows = facts["files"]
    columns = {"Quant or file": "ref", "Size": "bytes", "Parts": "parts"}
    if "architecture" not in facts:  # else it is the same for all and stands above
        columns |= {"Architecture": "architecture", "Layers": "layers", "Context": "context"}
    shown = {title: key for title, key in columns.items() if any(row.get(key) for row in rows)}
    numbers = {"Size", "Parts", "Layers", "Context"}
    files = output.table(*shown, "State", right=[title for title in shown if title in numbers])
    begin = f"{facts['id']}:"
    for row in rows:
        state = "ready" if row["state"] == "local" else row["state"]
        cells = (_cell(key, row.get(key), begin) for key in shown.values())
        files.add_row(*cells, row["problem"] or state)
    output.console().print(files)
    if facts["companions"]:
        beside = output.table("Goes with a model", "What", "Size", right=["Size"])
        for row in facts["companions"]:
            name = row["ref"].removeprefix(begin)
            beside.add_row(name, WHAT[row["kind"]], units.size(row["bytes"]))
        output.console().print(beside)
    if "header" not in facts:
        print(f"Fetch what fits with `nemolocal models pull {facts['id']}`, or name one after a colon.")


def _cell(key: str, value: Any, begin: str) -> str:
    if key == "bytes":
        return units.size(value)
    if key == "ref":
        return str(value).removeprefix(begin)
    return f"{value:,}" if isinstance(value, int) else str(value or "")


def _remote_row(repo: HubRepo, model: RemoteModel) -> Facts:
    return {
        "ref": repo.ref(model),
        "quant": model.quant,
        "bytes": model.bytes,
        "state": "remote",
        "path": None,
        "problem": f"{model.missing[0]} is missing" if model.missing else None,
    }


def local_row(model: LocalModel) -> Facts:
    """A model on this machine, as `models show` lists it."""
    return {
        "ref": model.ref,
        "quant": model.quant,
        "bytes": model.bytes,
        "state": "local",
        "path": str(model.path),
        "problem": model.problem or None,
    }


# Is the catalogue still right? --------------------------------------------------------------------


def verify_online(ref: str | None, config: Config, *, as_json: bool) -> None:
    """Print what the hub says of the catalogue's rows; exits with 1 where one is gone or another file."""
    from nemolocal.models import online

    with _counting() as advance:
        checked = online.check(ref, config, progress=advance)
    if as_json:
        output.print_json([asdict(row) for row in checked])
    else:
        rows = output.table("Reference", "Repository", "State", "")
        for row in checked:
            if row.state != "ok":
                rows.add_row(row.ref, row.repo, row.state, row.detail)
        n_ok = sum(row.state == "ok" for row in checked)
        if n_ok < len(checked):
            output.console().print(rows)
        print(f"{n_ok} of {len(checked)} rows of the catalogue are as it says.")
    if any(row.state in ("gone", "changed") for row in checked):
        raise typer.Exit(1)


@contextmanager
def _counting() -> Iterator[Callable[[int, int], None]]:
    """How many repositories have answered, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda n_done, n_all: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=output.console(sys.stderr), transient=True) as progress:
        task = progress.add_task("Asking the hub", total=None)
        yield lambda n_done, n_all: progress.update(task, completed=n_done, total=n_all)
