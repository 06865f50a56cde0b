"""`nemolocal bench`: how fast a model runs on this machine, and whether it was faster before."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemolocal import units
from nemolocal.cli import options, output
from nemolocal.config import Config
from nemolocal.errors import UsageError

if TYPE_CHECKING:
    from nemolocal.baselines import Comparison
    from nemolocal.bench import Bench, Report

Baseline = tuple[str, dict[str, Any]]
"""Its name and what it holds."""


@options.takes_settings(*options.LOADING, *options.PLANNING, *options.NETWORK, *options.MACHINE)
def bench(
    config: Config,
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="The model; default: the configured one.")
    ] = None,
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="N,…", help="How many answers at a time.")
    ] = "1,8,32",
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="N", help="Length of each prompt.")
    ] = 512,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", metavar="N", help="Length of each answer.")
    ] = 128,
    save: Annotated[
        str | None,
        typer.Option("--save", metavar="NAME|FILE.json", help="Keep the result as a baseline."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="NAME|FILE.json",
            help="Baseline to compare with; default: the last one of this model on this machine.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure how fast a model reads and writes here, one answer at a time and many, and its memory.

    Each stream has a prompt of its own, of random tokens; no answer ends early. Without flags that say
    otherwise the model is loaded with a slot for each stream and a context that holds them all.
    """
    from nemolocal import baselines
    from nemolocal.bench import Load, prepare, run
    from nemolocal.cli.pull import ensure_local
    from nemolocal.service import Service

    load = Load(_streams(concurrency), prompt_tokens, new_tokens)
    model = ensure_local(Service(config), ref)
    made = prepare(ref or model.id, config, load)
    baseline, target = _baseline(made, compare), _target(made, save)
    report = asyncio.run(run(made, output.note))
    result = report.to_dict()
    comparison = baselines.compare(result, baseline[1], baseline[0]) if baseline else None
    if as_json:
        shown = (
            asdict(comparison) | {"slower": [run.streams for run in comparison.slower]}
            if comparison
            else None
        )
        output.print_json({**result, "comparison": shown})
    else:
        _show(report, comparison)
    if target:  # last: what was measured has been shown where it cannot be kept
        baselines.write(result, target)
        if not as_json:
            print(f"Saved as the baseline {target}.")


def _streams(text: str) -> tuple[int, ...]:
    """Each number once, in the order given."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(
            f"--concurrency: '{text}' is not a list of whole numbers.", hint="Write it like 1,8,32."
        ) from None


def _baseline(made: Bench, compare: str | None) -> Baseline | None:
    """The baseline that was named, else the last one that was saved, else None. Read before anything is
    measured, so that a wrong name costs no time."""
    from nemolocal import baselines

    hardware = asdict(made.hardware)
    path: Path | None
    if compare:
        path = baselines.place(compare, made.config, model=made.model.ref, hardware=hardware)
    else:
        path = baselines.last(made.config, model=made.model.ref, hardware=hardware)
    return (compare or path.stem, baselines.read(path)) if path else None


def _target(made: Bench, save: str | None) -> Path | None:
    from nemolocal import baselines

    if save is None:
        return None
    return baselines.place(save, made.config, model=made.model.ref, hardware=asdict(made.hardware))


def _show(report: Report, comparison: Comparison | None) -> None:
    load, names = report.plan.load, [gpu.name for gpu in report.plan.placement.gpus]
    cpu = report.hardware.cpu
    print(f"{report.model} on {', '.join(names) or 'the CPU'} ({cpu.name}, {cpu.physical_cores} cores)")
    of = "shared by" if load.kv_layout == "shared" else "for each of"
    answers = "1 answer" if load.n_slots == 1 else f"{load.n_slots} answers"
    print(f"Context {load.n_ctx:,} tokens {of} {answers} at a time, {load.kv_type} cache")
    print(f"NemoLocal {report.nemolocal}, {report.library}, {report.date}")
    _show_runs(report, comparison)
    rows = output.table("Memory", "Planned", "Taken", right=["Planned", "Taken"])
    for entry in report.memory:
        taken = "–" if entry.taken_bytes is None else units.gib(entry.taken_bytes)
        rows.add_row(entry.name, units.gib(entry.forecast_bytes), taken)
    output.console().print(rows)
    for left_out in report.left_out:
        print(f"- Not measured: {left_out.why}")
    for run in report.runs:
        if run.n_short:
            print(f"- {run.streams} at a time: {run.n_short} answers did not have {run.new_tokens} tokens.")
    for line in _verdict(comparison) if comparison else ():
        print(f"- {line}")


def _show_runs(report: Report, comparison: Comparison | None) -> None:
    """A row for each number of streams; speeds are tokens per second."""
    columns = ["At a time", "First text", "Reading tok/s", "Each tok/s", "In all tok/s"]
    shares = {run.streams: run.tokens_per_s_total for run in comparison.runs} if comparison else {}
    if comparison:
        columns.append("To baseline")
    rows = output.table(*columns, right=columns)
    for run in report.runs:
        speeds = (run.prompt_tokens_per_s, run.tokens_per_s_stream, run.tokens_per_s_total)
        cells = [str(run.streams), f"{run.ttft_p50 * 1000:,.0f} ms", *(f"{speed:,.1f}" for speed in speeds)]
        if comparison:
            cells.append(f"{shares[run.streams]:.2f}" if run.streams in shares else "–")
        rows.add_row(*cells)
    print(f"Prompts of {report.runs[0].prompt_tokens} tokens, answers of {report.runs[0].new_tokens}:")
    output.console().print(rows)


def _verdict(comparison: Comparison) -> list[str]:
    lines = [*comparison.differences]
    of = f"the baseline {comparison.name} of {comparison.date}"
    if not comparison.runs:
        return [*lines, f"No run is like one of {of}."]
    slower = ", ".join(str(run.streams) for run in comparison.slower)
    if slower:
        return [*lines, f"More than 10 % slower than {of}: {slower} at a time."]
    return [*lines, f"Nothing is more than 10 % slower than {of}."]
