"""`nemolocal models quantize`: a smaller file of a model, and what it would be before it is made."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemolocal.cli import options, output
from nemolocal.cli.pull import bar
from nemolocal.config import Config
from nemolocal.errors import DoesNotFitError

if TYPE_CHECKING:
    from nemolocal.models.choice import Candidate
    from nemolocal.models.gguf import GgufInfo
    from nemolocal.models.sizing import Plan
    from nemolocal.quantizing import Outcome


@options.takes_settings("models_dir", "hardware", "threads", "log_level")
def quantize(
    config: Config,
    source: Annotated[str, typer.Argument(metavar="IN", help="A .gguf file, or a model on this machine.")],
    quant: Annotated[str, typer.Argument(metavar="TYPE", help="The quantization, such as Q4_K_M.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="The file to write; default: beside IN.", metavar="FILE"),
    ] = None,
    is_dry: Annotated[
        bool,
        typer.Option("--dry-run", help="Only say what it would take, and gain in the plan.", metavar=""),
    ] = False,
    may_requantize: Annotated[
        bool,
        typer.Option("--allow-requantize", help="Also from what is quantized already.", metavar=""),
    ] = False,
    may_replace: Annotated[bool, typer.Option("--force", help="Replace FILE.", metavar="")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Write a smaller file of a model. The file of that name appears when it is whole, and not before."""
    from nemolocal import quantizing
    from nemolocal.models import store

    info = store.resolve(source, config).info
    label, _ = quantizing.file_type(quant)
    target = out or info.path.with_name(_name(info, label))
    if is_dry:
        outcome = quantizing.dry_run(info, label, may_requantize=may_requantize)
        _tell_dry_run(info, outcome, target, config, as_json=as_json)
        return
    with bar(f"Quantizing to {label}") as (advance, _):
        outcome = quantizing.quantize(
            info,
            label,
            target,
            n_threads=config.settings.threads,
            may_requantize=may_requantize,
            may_replace=may_replace,
            progress=advance,
        )
    size = target.stat().st_size
    if as_json:
        output.print_json({**_facts(info, outcome), "path": str(target), "bytes": size})
        return
    print(f"{target} is ready: {output.size(size)}, of {output.size(info.size_bytes)}.")
    _tell_odd(outcome)
    if not target.resolve().is_relative_to(config.models_dir.resolve()):
        print(f"`nemolocal models import {target}` adds it to your models.")


def _name(info: GgufInfo, label: str) -> str:
    """The source's name with the quantization's place taken by the new one."""
    stem = info.path.name.removesuffix(".gguf")
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", stem)
    stem = re.sub(rf"[-._]{re.escape(info.quant)}$", "", stem, flags=re.IGNORECASE)
    return f"{stem}-{label}.gguf"


def _tell_dry_run(info: GgufInfo, outcome: Outcome, target: Path, config: Config, *, as_json: bool) -> None:
    from nemolocal import quantizing
    from nemolocal.models.choice import Candidate

    now = Candidate(info.quant, info.path.name, info.size_bytes, info.shape)
    then = quantizing.candidate(info, outcome)
    plans = [_plan(candidate, config) for candidate in (now, then)]
    if as_json:
        facts = {**_facts(info, outcome), "path": str(target), "bytes": then.size_bytes}
        before, after = (None if isinstance(made, DoesNotFitError) else made.to_dict() for made in plans)
        output.print_json({**facts, "plan_before": before, "plan_after": after})
        return
    print(f"{target.name} would take {output.size(then.size_bytes)}, of {output.size(now.size_bytes)}.")
    kinds = ", ".join(f"{n} {name}" for name, n in sorted(outcome.types.items(), key=lambda kind: -kind[1]))
    print(f"Its {outcome.n_tensors} tensors would be {kinds}.")
    _tell_odd(outcome)
    rows = output.table("", "Memory", "Context", "Tokens per second", right=["Memory", "Context"])
    for candidate, made in zip((now, then), plans, strict=True):
        rows.add_row(candidate.quant, *_cells(made))
    output.console().print(rows)


def _plan(candidate: Candidate, config: Config) -> Plan | DoesNotFitError:
    from nemolocal.hardware import survey
    from nemolocal.models import planning

    bare = replace(config, settings=replace(config.settings, draft="off", lora=()))
    try:
        return planning.decide(candidate.file, [candidate], survey(config), bare, planning.wish(bare))
    except DoesNotFitError as error:
        return error


def _cells(made: Plan | DoesNotFitError) -> tuple[str, str, str]:
    if isinstance(made, DoesNotFitError):
        return output.size(made.needed_bytes), "does not fit", ""
    shares = (*made.placement.shares, made.placement.host)
    speed = f"about {made.tokens_per_s:.0f} (a forecast)" if made.tokens_per_s else ""
    return output.size(sum(share.total_bytes for share in shares)), f"{made.load.n_ctx:,}", speed


def _tell_odd(outcome: Outcome) -> None:
    if outcome.odd:
        output.note(
            f"{len(outcome.odd)} tensors have rows that are no multiple of 256 and became larger types, "
            f"{outcome.odd[0]} among them."
        )


def _facts(info: GgufInfo, outcome: Outcome) -> dict[str, Any]:
    return {
        "quant": outcome.quant,
        "from_quant": info.quant,
        "from_bytes": info.size_bytes,
        "types": outcome.types,
        "odd_tensors": outcome.odd,
    }
