"""`nemolocal plan`: how a model would lie on this machine's devices, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nemolocal import units
from nemolocal.cli import bars, options, output
from nemolocal.config import Config
from nemolocal.errors import DoesNotFitError

if TYPE_CHECKING:
    from nemolocal.models.sizing import Plan


@options.takes_settings(*options.LOADING, "margin_mib", *options.NETWORK, *options.MACHINE)
def plan(
    config: Config,
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="The model: here, of the catalogue, or hf:OWNER/REPO.")
    ],
    as_json: options.AsJson = False,
) -> None:
    """Show which file of a model would run here, on which devices, and why. Downloads nothing."""
    from nemolocal import load_settings
    from nemolocal.hardware import survey
    from nemolocal.models import planning

    hardware = survey(config)
    try:
        made = planning.plan(ref, load_settings.applied(config, [ref]), hardware)
    except DoesNotFitError as error:
        if not as_json:
            raise
        output.print_json(
            {
                "model": ref,
                "fits": False,
                "error": str(error),
                "needed_bytes": error.needed_bytes,
                "available_bytes": error.available_bytes,
            }
        )
        raise typer.Exit(1) from None
    if as_json:
        output.print_json(made.to_dict())
        return
    _show_head(made)
    bars.show(made, hardware, output.console())
    for reason in made.reasons:
        output.item(reason)
    for line in speeds(made):
        output.item(line)


def speeds(made: Plan) -> list[str]:
    """What the plan says of speed: what was measured, what is a forecast."""
    lines = []
    measured, forecast, reading = made.measured_tokens_per_s, made.tokens_per_s, made.prompt_tokens_per_s
    if forecast:
        lines.append(f"Forecast: about {_round(forecast)} tokens a second for one answer.")
    if measured:
        lines.append(f"Measured here: {_round(measured)} tokens a second for one answer.")
    if reading:
        lines.append(f"Forecast: about {_round(reading)} tokens a second when it reads a long prompt.")
    return lines


def _show_head(made: Plan) -> None:
    candidate, load = made.candidate, made.load
    where = "" if candidate.is_local else ", not on this machine yet"
    print(f"{made.model}: {candidate.quant or candidate.file} ({units.size(candidate.size_bytes)}){where}")
    if candidate.shape.pooling:
        print(f"Inputs of up to {load.n_ctx:,} tokens, {load.n_slots} at a time")
        return
    answers = "1 answer" if load.n_slots == 1 else f"{load.n_slots} answers"
    each = " each" if load.kv_layout == "split" else ""
    print(f"Context {load.n_ctx:,} tokens{each}, {answers} at a time, {load.kv_type} cache")


def _round(speed: float) -> str:
    """Two digits: a forecast is no better, and what was measured differs as much from run to run."""
    return f"{float(f'{speed:.2g}'):,.0f}" if speed >= 10 else f"{speed:.1f}"
