"""`nemolocal plan`: how a model would lie on this machine's devices, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nemolocal.cli import options, output
from nemolocal.config import Config

if TYPE_CHECKING:
    from nemolocal.models.placement import Share
    from nemolocal.models.sizing import Plan

BAR_WIDTH = 30


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

    made = planning.plan(ref, load_settings.applied(config, [ref]), survey(config))
    if as_json:
        output.print_json(made.to_dict())
    else:
        _show(made)


def _show(made: Plan) -> None:
    size = output.size(made.candidate.size_bytes)
    print(f"{made.model}: {made.candidate.quant or made.candidate.file} ({size})")
    load = made.load
    if made.candidate.shape.pooling:
        print(f"Inputs of up to {load.n_ctx:,} tokens, {load.n_slots} at a time")
    else:
        print(f"Context {load.n_ctx:,} tokens, {load.n_slots} answers at a time, {load.kv_type} cache")
    columns = ("Device", "Layers", "Weights", "Cache", "State", "Buffers", "In all", "Of", "")
    rows = output.table(*columns, right=columns[1:-1])
    for gpu, share in zip(made.placement.gpus, made.placement.shares, strict=True):
        rows.add_row(gpu.name, *_cells(share), output.gib(gpu.free_bytes), _bar(share, gpu.free_bytes))
    rows.add_row("RAM", *_cells(made.placement.host), "", "")
    output.console().print(rows)
    for reason in made.reasons:
        print(f"- {reason}")
    if made.tokens_per_s:
        print(f"- About {made.tokens_per_s:.0f} tokens per second for one answer (a forecast).")
    if made.measured_tokens_per_s:
        print(f"- {made.measured_tokens_per_s:g} tokens per second were measured here.")


def _cells(share: Share) -> list[str]:
    buffers = share.compute_bytes + share.overhead_bytes
    parts = (share.weights_bytes, share.kv_bytes, share.state_bytes, buffers, share.total_bytes)
    return [str(share.n_layers), *map(output.gib, parts)]


def _bar(share: Share, free_bytes: int) -> str:
    n_full = min(round(BAR_WIDTH * share.total_bytes / max(free_bytes, 1)), BAR_WIDTH)
    return "█" * n_full + "░" * (BAR_WIDTH - n_full)
