"""What a load has taken beside what was planned for it: compared, told in a line, and as a correction.

Knows plans and what engines and drivers tell, neither processes nor the database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from nemolocal.engine.messages import Held
from nemolocal.hardware import Gpu, Hardware
from nemolocal.models.measured import OVERHEAD_DOUBTED_BYTES, Bytes, Kind
from nemolocal.models.placement import Share
from nemolocal.models.plans import Plan
from nemolocal.models.room import Footprint

MIB: Final = 1 << 20
SHARE_TOLD: Final = 0.02
"""A device that takes so much more or less than planned is told of."""
LEAST_TOLD_BYTES: Final = MIB
OVERHEAD_LEAST: Final = 64 * MIB
OVERHEAD_MOST: Final = 4096 * MIB
"""Beyond these, what a GPU holds besides llama.cpp's buffers is not of this load: another program came or
went meanwhile."""

RAM: Final = ""
_KINDS: Final[tuple[Kind, ...]] = ("weights", "kv", "state", "compute", "overhead")
_WORDS: Final[Mapping[str, str]] = {"kv": "cache", "compute": "buffers"}


def used_of_gpus(
    plan: Plan, held: Sequence[Held], *, before: Hardware, after: Hardware, pid: int | None
) -> dict[str, int]:
    """Bytes that the engine's process `pid` holds on each GPU of the plan, by UUID, as the driver tells;
    where it does not name the process, by how much less is free than before the load. A GPU without memory
    of its own is left out, and one of which no figure is told that llama.cpp's buffers there bear out."""
    buffers = {each.device: each.total_bytes for each in held}
    free_before = {gpu.uuid: gpu.free_bytes for gpu in before.gpus if gpu.state == "ok"}
    used = {}
    for gpu in after.gpus:
        if gpu.uuid not in plan.visible_devices or gpu.uuid not in buffers or gpu.shares_ram:
            continue
        named = sum(holder.used_bytes for holder in gpu.holders if holder.pid == pid)
        n_bytes = named or free_before.get(gpu.uuid, 0) - gpu.free_bytes
        if OVERHEAD_LEAST <= n_bytes - buffers[gpu.uuid] <= OVERHEAD_MOST:
            used[gpu.uuid] = n_bytes
    return used


def credible(
    plan: Plan, held: Sequence[Held], used: Mapping[str, int], *, after: Hardware, pid: int | None
) -> dict[str, int]:
    """What of that is a model's beyond doubt: where the driver does not name its process and a GPU holds much
    more besides llama.cpp's buffers than is known of it, another program may have taken it meanwhile."""
    buffers = {each.device: each.total_bytes for each in held}
    named = {gpu.uuid for gpu in after.gpus if any(h.pid == pid and h.used_bytes for h in gpu.holders)}
    return {
        uuid: n_bytes
        for uuid, n_bytes in used.items()
        if uuid in named
        or n_bytes - buffers[uuid] <= share_of(plan, uuid)[1].overhead_bytes + OVERHEAD_DOUBTED_BYTES
    }


def compare(plan: Plan, held: Sequence[Held], used: Mapping[str, int]) -> tuple[Bytes, ...]:
    """What was planned and what was taken, by device and kind: `held` are llama.cpp's buffers, `used` the
    whole of each GPU where that is known."""
    of_device = {each.device: each for each in held}
    found: list[Bytes] = []
    for gpu, share in zip(plan.placement.gpus, plan.placement.shares, strict=True):
        each = of_device.get(gpu.uuid)
        if each:
            whole = used.get(gpu.uuid)
            overhead = None if whole is None else whole - each.total_bytes
            found += _rows(gpu.uuid, share, each, overhead=overhead)
    host, ram = plan.placement.host, of_device.get(RAM)
    if ram:
        # What llama.cpp keeps in RAM for the GPUs are buffers too. Pages of a mapped file come and go.
        share = replace(host, compute_bytes=host.compute_bytes + host.overhead_bytes, overhead_bytes=0)
        ram = replace(ram, compute_bytes=ram.compute_bytes + ram.output_bytes)
        ram = replace(ram, weights_bytes=host.weights_bytes) if ram.is_mapped else ram
        found += _rows(RAM, share, ram, overhead=0)
    return tuple(found)


def difference(plan: Plan, rows: Sequence[Bytes]) -> str:
    """Where a device takes other than was planned by more than SHARE_TOLD: one line, by kind; "" where none
    does. What could not be told counts as planned."""
    names = {gpu.uuid: gpu.name for gpu in plan.placement.gpus} | {RAM: "RAM"}
    told = []
    for device in dict.fromkeys(row.device for row in rows):
        of_device = [row for row in rows if row.device == device]
        planned = sum(row.planned_bytes for row in of_device)
        used = sum(_used(row) for row in of_device)
        if abs(used - planned) > max(SHARE_TOLD * planned, LEAST_TOLD_BYTES):
            parts = [
                f"{_WORDS.get(row.kind, row.kind)} {_mib(_used(row))} for {_mib(row.planned_bytes)}"
                for row in of_device
                if abs(_used(row) - row.planned_bytes) > LEAST_TOLD_BYTES
            ]
            told.append(f"{names[device]} {_mib(used)} for {_mib(planned)} MiB ({', '.join(parts)})")
    return "; ".join(told)


def compute_ratio(plan: Plan, held: Sequence[Held], corrected_by: float) -> float | None:
    """What the buffers took over what would be planned for them without the correction of this plan, on the
    device where that is most; None where it says nothing.

    A quantized cache is copied to f16 only as far as it is filled, so that less than planned at the load is
    no reason to plan less.
    """
    place, of_device = plan.placement, {each.device: each for each in held}
    pairs = [
        (share.compute_bytes, of_device[gpu.uuid].compute_bytes)
        for gpu, share in zip(place.gpus, place.shares, strict=True)
        if gpu.uuid in of_device
    ]
    if not place.gpus and RAM in of_device:
        pairs = [(place.host.compute_bytes, of_device[RAM].compute_bytes)]
    ratios = [used * corrected_by / planned for planned, used in pairs if planned and used]
    if not ratios:
        return None
    return max(ratios) if plan.load.kv_type == "f16" else max(1.0, *ratios)


def footprint(planned: Footprint, used: Mapping[str, int]) -> Footprint:
    """What a model holds: of each GPU what was measured, where it was."""
    gpu_bytes = tuple((uuid, used.get(uuid, n_bytes)) for uuid, n_bytes in planned.gpu_bytes)
    return replace(planned, gpu_bytes=gpu_bytes)


def share_of(plan: Plan, device: str) -> tuple[Gpu | None, Share]:
    """The planned share of a GPU, or of the RAM for any other device."""
    for gpu, share in zip(plan.placement.gpus, plan.placement.shares, strict=True):
        if gpu.uuid == device:
            return gpu, share
    return None, plan.placement.host


def _rows(device: str, share: Share, held: Held, *, overhead: int | None) -> list[Bytes]:
    used = (held.weights_bytes, held.kv_bytes, held.state_bytes, held.compute_bytes, overhead)
    planned = (
        share.weights_bytes,
        share.kv_bytes,
        share.state_bytes,
        share.compute_bytes,
        share.overhead_bytes,
    )
    return [Bytes(device, *each) for each in zip(_KINDS, planned, used, strict=True)]


def _used(row: Bytes) -> int:
    return row.planned_bytes if row.used_bytes is None else row.used_bytes


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.0f}"
