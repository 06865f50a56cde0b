"""`nemolocal models quantize`: a smaller file of a model, and what it would be before it is made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemolocal import units
from nemolocal.cli import options, output
from nemolocal.cli.pull import bar
from nemolocal.config import Config, expand
from nemolocal.errors import DoesNotFitError

if TYPE_CHECKING:
    from nemolocal.hardware import Hardware
    from nemolocal.models.gguf import GgufInfo
    from nemolocal.models.sizing import Plan
    from nemolocal.models.store import LocalModel
    from nemolocal.quantizing import Preview

_N_NAMED = 3  # kinds of tensors in a line


@options.takes_settings("models_dir", "hardware", "threads", "log_level")
def quantize(
    config: Config,
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A .gguf file (of a split model any part), or a model's REF.")
    ],
    quant: Annotated[
        str, typer.Argument(metavar="TYPE", help="The quantization, such as Q4_K_M; a wrong one lists them.")
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--out",
            help="The file to write; default: beside IN, or in the models folder where IN is a repository's.",
            metavar="FILE",
        ),
    ] = None,
    is_dry: Annotated[
        bool,
        typer.Option("--dry-run", help="Only say what it would take, and gain in the plan.", metavar=""),
    ] = False,
    imatrix: Annotated[
        str | None,
        typer.Option(
            "--imatrix", help="Importance matrix, as llama.cpp's imatrix writes it.", metavar="FILE"
        ),
    ] = None,
    may_requantize: Annotated[
        bool,
        typer.Option(
            "--allow-requantize", help="Also quantize what is quantized already; it loses twice.", metavar=""
        ),
    ] = False,
    may_replace: Annotated[bool, typer.Option("--force", help="Replace FILE.", metavar="")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Write a smaller file of a model.

    The size and what it gains in the plan are told first. The file appears when it is whole, and not before.
    """
    from nemolocal import quantizing
    from nemolocal.hardware import survey
    from nemolocal.models import importance

    label = quantizing.quant_named(quant)
    model = _source(source, config)
    target = expand(out) if out else _target(model, label, config)
    if not is_dry:  # before anything is read
        quantizing.check_target(model.info, target, may_replace=may_replace)
    matrix = importance.read(expand(imatrix)) if imatrix else {}
    job = quantizing.Job(model.info, label, matrix, may_requantize, config.settings.threads)
    made = quantizing.preview(job, target, config)
    if not as_json or is_dry:
        _tell(made, config, survey(config), as_json=as_json)
    if is_dry:
        return
    with bar(f"Quantizing to {label}") as (advance, _):
        written = quantizing.quantize(made, config, may_replace=may_replace, progress=advance)
    if as_json:
        output.print_json({**_facts(made), "bytes": written.size_bytes})
    else:
        _tell_written(written, config)


def _source(ref: str, config: Config) -> LocalModel:
    """The model that is meant; of several files the one that most can be taken from."""
    from nemolocal import quantizing
    from nemolocal.models import reference, store

    parsed = reference.parse(ref)
    found = store.find(parsed, config)
    whole = [model for model in found if model.info.quant in quantizing.WHOLE_TYPES]
    return (whole or found or [store.resolve(parsed, config)])[0]


def _target(model: LocalModel, label: str, config: Config) -> Path:
    """The source's name with the new quantization in place of the old. What came from a repository gets its
    place beside the repositories: it is no file of theirs."""
    from nemolocal.models import reference

    stem = reference.stem_of(model.path.name)
    for old in {model.quant, model.info.quant} - {""}:
        stem = re.sub(rf"[-._]{re.escape(old)}$", "", stem, flags=re.IGNORECASE)
    return (config.models_dir if model.repo else model.path.parent) / f"{stem}-{label}.gguf"


# Telling ------------------------------------------------------------------------------------------


def _tell(made: Preview, config: Config, hardware: Hardware, *, as_json: bool) -> None:
    source = made.job.source
    plans = [_plan(info, config, hardware) for info in (source, made.result)]
    if as_json:
        before, after = (None if isinstance(plan, DoesNotFitError) else plan.to_dict() for plan in plans)
        output.print_json({**_facts(made), "plan_before": before, "plan_after": after})
        return
    sizes = f"{units.size(made.result.size_bytes)} ({made.result.size_bytes:,} bytes)"
    print(f"{made.result.path.name}: {sizes} in place of {units.size(source.size_bytes)}")
    kinds = ", ".join(f"{n} {name}" for name, n in made.types.items())
    print(f"{made.bits_per_weight:.2f} bits for each weight; its {len(made.changes)} tensors are {kinds}")
    rows = output.table("On this machine", source.quant, made.job.quant, right=[source.quant, made.job.quant])
    for name, *cells in zip(_ROWS, *map(_cells, plans), strict=True):
        if any(cells):
            rows.add_row(name, *cells)
    output.console().print(rows)
    for line in _notes(made):
        output.item(line)


def _tell_written(written: GgufInfo, config: Config) -> None:
    print(f"{written.path} is ready: {units.size(written.size_bytes)}.")
    if not written.path.resolve().is_relative_to(config.models_dir.resolve()):
        path = f'"{written.path}"' if " " in str(written.path) else written.path
        print(f"`nemolocal models import {path}` adds it to your models.")


def _notes(made: Preview) -> list[str]:
    """What a person should know before it is made."""
    lines = [
        f"{_tensors(x.n_tensors)} {x.becomes} in place of {' or '.join(x.wanted)}, since their rows of "
        f"{x.row:,} are no whole blocks of it: {_some(x.names)}."
        for x in made.fallbacks
    ]
    if made.result.size_bytes >= made.job.source.size_bytes:
        lines.append("The new file is not smaller than the old one.")
    if made.needs_importance:
        lines.append(
            f"To make it, an importance matrix is needed (--imatrix); {made.job.quant} is too small."
        )
    if made.n_lacking:
        lines.append(f"The importance matrix says nothing of {made.n_lacking} tensors that change.")
    return lines


def _tensors(n: int) -> str:
    return "1 tensor becomes" if n == 1 else f"{n} tensors become"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _N_NAMED} more kinds" if len(names) > _N_NAMED else ""
    return f"{', '.join(names[:_N_NAMED])}{more}"


def _plan(info: GgufInfo, config: Config, hardware: Hardware) -> Plan | DoesNotFitError:
    from nemolocal.models import planning
    from nemolocal.models.choice import Candidate

    alone = replace(config, settings=replace(config.settings, draft="off", lora=()))
    file = Candidate(info.quant, str(info.path), info.size_bytes, info.shape)
    try:
        return planning.decide(info.path.name, [file], hardware, alone, planning.wish(alone))
    except DoesNotFitError as error:
        return error


_ROWS = ("memory", "of it on GPUs", "layers on GPUs", "context", "tokens a second (forecast)")


def _cells(made: Plan | DoesNotFitError) -> tuple[str, ...]:
    if isinstance(made, DoesNotFitError):
        return f"{units.gib(made.needed_bytes)}, does not fit", "", "", "", ""
    place = made.placement
    on_gpus = sum(share.total_bytes for share in place.shares)
    n_layers = sum(share.n_layers for share in place.shares)
    return (
        units.gib(on_gpus + place.host.total_bytes),
        units.gib(on_gpus) if place.gpus else "",
        f"{n_layers} of {n_layers + place.host.n_layers}" if place.gpus else "",
        f"{made.load.n_ctx:,}",
        f"{made.tokens_per_s:.0f}" if made.tokens_per_s else "",
    )


def _facts(made: Preview) -> dict[str, Any]:
    source = made.job.source
    return {
        "path": str(made.result.path),
        "quant": made.job.quant,
        "bytes": made.result.size_bytes,
        "bits_per_weight": round(made.bits_per_weight, 3),
        "from": {"path": str(source.path), "quant": source.quant, "bytes": source.size_bytes},
        "types": made.types,
        "fallbacks": [
            {
                "tensors": list(x.names),
                "n": x.n_tensors,
                "row": x.row,
                "wanted": list(x.wanted),
                "becomes": x.becomes,
            }
            for x in made.fallbacks
        ],
        "needs_imatrix": made.needs_importance,
    }
