"""`nemolocal models …`: what can be had, what is here, and how to get or be rid of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemolocal import units
from nemolocal.cli import hub, options, output
from nemolocal.cli.pull import bar, local_json, pull
from nemolocal.cli.quantize import quantize
from nemolocal.config import Config

if TYPE_CHECKING:
    from nemolocal.models.fits import Fit
    from nemolocal.models.overview import ListedFile, ListedModel
    from nemolocal.models.reference import NamedRef, PathRef
    from nemolocal.models.store import LocalModel

Facts = dict[str, Any]
"""One object of the JSON that a command prints."""

app = typer.Typer(help="List, fetch, check, quantize and remove models.", no_args_is_help=True)

Ref = Annotated[
    str, typer.Argument(metavar="REF", help="ID, ID:QUANT, hf:OWNER/REPO[:QUANT or FILE], or a path.")
]


@app.command("list")
@options.takes_settings("models_dir", "hardware", "log_level")
def list_(
    config: Config,
    has_fit: Annotated[
        bool, typer.Option("--fit", help="Say for each model whether it fits this machine.", metavar="")
    ] = False,
    tag: Annotated[
        str | None,
        typer.Option(
            "--tag",
            help="Only models for this: chat, reasoning, code, vision, embedding, rerank.",
            metavar="TAG",
        ),
    ] = None,
    family: Annotated[
        str | None, typer.Option("--family", help="Only models of this family.", metavar="FAMILY")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """List the models of the catalogue and those on this machine."""
    from nemolocal.cli import listing
    from nemolocal.models import overview

    models = listing.chosen(overview.build(config), tag=tag, family=family)
    fits = _fits(models, config) if has_fit else None
    if as_json:
        output.print_json([_listed_json(model, (fits or {}).get(model.id)) for model in models])
    else:
        listing.show(models, fits, output.console())


app.command("search")(hub.search)


@app.command("show")
@options.takes_settings("offline", "models_dir", "log_level")
def show(config: Config, ref: Ref, as_json: options.AsJson = False) -> None:
    """Show what is known of a model: of the catalogue, of this machine, or of a repository on the hub."""
    from nemolocal.models import reference

    parsed = reference.parse(ref)
    if isinstance(parsed, reference.HubRef):
        facts = hub.repo_facts(parsed, config)
        if as_json:
            output.print_json(facts)
        else:
            _print_facts({key: value for key, value in facts.items() if key not in ("files", "companions")})
            hub.print_files(facts)
        return
    facts, rows = _model_facts(parsed, config)
    if as_json:
        output.print_json({**facts, "files": rows})
        return
    _print_facts(facts)
    files = output.table("Reference", "Quant", "Size", "State", right=["Size"])
    for row in rows:
        state = "ready" if row["state"] == "local" else row["state"]
        files.add_row(row["ref"], row["quant"], units.size(row["bytes"]), row["problem"] or state)
    output.console().print(files)


def _print_facts(facts: Facts) -> None:
    shown = {key.replace("_", " ").capitalize(): _fact(key, value) for key, value in facts.items()}
    width = max(map(len, shown)) + 2
    for label, text in shown.items():
        if text:
            print(f"{label:{width}}{text}")


app.command("pull")(pull)


@app.command("verify")
@options.takes_settings("offline", "models_dir", "log_level")
def verify(
    config: Config,
    ref: Annotated[str | None, typer.Argument(metavar="REF", help="The model; default: all.")] = None,
    online: Annotated[
        bool, typer.Option("--online", help="Ask the hub whether the catalogue is still right.", metavar="")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Read models on this machine and compare them with what was published."""
    from nemolocal.models import upkeep

    if online:
        hub.verify_online(ref, config, as_json=as_json)
        return
    with bar("Reading", has_lines=False) as (advance, _):
        checked = upkeep.verify(ref, config, progress=advance)
    if as_json:
        output.print_json([{**asdict(file), "path": str(file.path)} for file in checked])
    else:
        rows = output.table("Reference", "File", "State")
        for file in checked:
            rows.add_row(file.ref, str(file.path), _VERDICTS[file.state])
        if checked:
            output.console().print(rows)
        else:
            output.note("There is no model on this machine.")
    if any(file.state == "damaged" for file in checked):
        raise typer.Exit(1)


@app.command("import")
@options.takes_settings("models_dir", "log_level")
def import_(
    config: Config,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .gguf file; of a split model any part.")],
    as_json: options.AsJson = False,
) -> None:
    """Add a model file where it lies; nothing is copied."""
    from nemolocal.models import upkeep

    model = upkeep.import_path(path, config)
    if as_json:
        output.print_json(local_json(model))
    else:
        print(f"{model.ref} is ready: {model.path}")


@app.command("rm")
@options.takes_settings("models_dir", "log_level")
def rm(config: Config, ref: Ref, as_json: options.AsJson = False) -> None:
    """Remove a model from this machine. The file of an imported one stays where it is."""
    from nemolocal.models import upkeep

    removed = upkeep.remove(ref, config)
    if as_json:
        files = [str(path) for path in removed.files]
        output.print_json({"ref": removed.ref, "files": files, "bytes": removed.bytes})
    elif removed.is_forgotten:
        print(f"{removed.ref} is forgotten; its file stays.")
    else:
        print(f"{removed.ref} is removed: {units.size(removed.bytes)} freed.")


app.command("quantize")(quantize)


def _fact(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key.endswith("parameters"):
        return units.parameters(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


_VERDICTS = {"ok": "as published", "damaged": "DAMAGED", "unknown": "nothing published to compare with"}


def _model_facts(ref: NamedRef | PathRef, config: Config) -> tuple[Facts, list[Facts]]:
    """A model of the catalogue, or one that is only on this machine."""
    from nemolocal.models import overview, store
    from nemolocal.models.reference import NamedRef

    listed = [m for m in overview.build(config) if isinstance(ref, NamedRef) and m.id == ref.name.casefold()]
    if not listed or not listed[0].listed:
        model = store.resolve(ref, config)
        return _header_facts(model), [hub.local_row(model)]
    known, files = listed[0].listed, listed[0].files
    if isinstance(ref, NamedRef) and ref.quant:
        files = tuple(file for file in files if file.quant.casefold() == ref.quant.casefold())
        if not files:
            known.file(ref.quant)  # raises, with the quantizations that there are
    usable = [file.local for file in files if file.local and file.local.is_usable]
    facts = {
        "id": known.id,
        "name": known.name,
        "maker": known.maker,
        "licence": known.licence,
        "must_be_accepted": known.must_accept,
        "repository": known.repo,
        "released": known.released,
        "family": known.family,
        "for": ", ".join(known.tags),
        "languages": ", ".join(known.languages),
        "parameters": known.n_params,
        "active_parameters": known.n_active_params if known.n_active_params < known.n_params else "",
        "context": known.n_ctx_trained,
        "context_by_its_maker": known.n_ctx if known.n_ctx != known.n_ctx_trained else "",
        "template": known.template,
        "notes": known.notes,
    }
    header = _header_facts(usable[0]) if usable else {}
    return {**header, **facts}, [_file_json(file) for file in files]


def _header_facts(model: LocalModel) -> Facts:
    """What the file's own header says. Raises ModelFileError."""
    info = model.info
    return {
        "id": model.id,
        "name": model.name,
        "architecture": info.architecture,
        "purpose": model.purpose,
        "layers": len(info.shape.layers),
        "parameters": info.n_params,
        "context": info.n_ctx_train,
        "tokenizer": info.tokenizer,
        "has_chat_template": bool(info.chat_template),
    }


def _fits(models: Sequence[ListedModel], config: Config) -> dict[str, Fit]:
    from nemolocal.hardware import survey
    from nemolocal.models import fits

    return fits.all_of(models, config, survey(config))


def _listed_json(model: ListedModel, fit: Fit | None) -> Facts:
    listed = model.listed
    facts: Facts = {"id": model.id, "name": model.name, "files": [_file_json(file) for file in model.files]}
    if listed:
        facts |= {"family": listed.family, "tags": list(listed.tags), "licence": listed.licence}
    if not fit:
        return facts
    plan = fit.plan
    more = {"context": plan.load.n_ctx, "tokens_per_s": plan.tokens_per_s} if plan else {}
    return {**facts, "fit": {"quant": fit.quant, "grade": fit.grade, "why": fit.why, **more}}


def _file_json(file: ListedFile) -> Facts:
    return {
        "quant": file.quant,
        "bytes": file.bytes,
        "state": file.state,
        "ref": file.ref,
        "done_bytes": file.done_bytes,
        "path": str(file.local.path) if file.local else None,
        "problem": file.problem or None,
    }
