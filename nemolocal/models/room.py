"""Whether a model finds room beside those that are loaded, and if not, which of them would have to go.

Pure: plans on views of the hardware, as it would be with some of the loaded models gone. Knows neither
processes nor turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from nemolocal.errors import DoesNotFitError
from nemolocal.hardware import Gpu, Hardware
from nemolocal.models import choice
from nemolocal.models.plans import Plan

PlanOn = Callable[[Hardware], Plan]
"""Plans one model for a hardware; raises DoesNotFitError."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a loaded model holds: of each GPU, by its UUID, and of the RAM. A GPU without memory of its
    own counts as RAM."""

    gpu_bytes: tuple[tuple[str, int], ...] = ()
    ram_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tenant:
    """One loaded model; `is_idle` says that it could go at once."""

    footprint: Footprint
    is_idle: bool


@dataclass(frozen=True, slots=True)
class Room:
    """The plan of a model, for the hardware as it is once the tenants at `leaving` have gone; () where it
    fits beside all of them."""

    plan: Plan
    leaving: tuple[int, ...] = ()


def footprint(plan: Plan) -> Footprint:
    """What a plan takes."""
    place = plan.placement
    shares = zip(place.gpus, place.shares, strict=True)
    own = tuple((gpu.uuid, share.total_bytes) for gpu, share in shares if not gpu.shares_ram)
    return Footprint(own, place.ram_bytes)


def without(hardware: Hardware, footprints: Iterable[Footprint]) -> Hardware:
    """The hardware with these bytes taken from what is free."""
    return _changed(hardware, footprints, sign=-1)


def given_back(hardware: Hardware, footprints: Iterable[Footprint]) -> Hardware:
    """The hardware with these bytes free again."""
    return _changed(hardware, footprints, sign=1)


def cautious(hardware: Hardware, n_bytes: int) -> Hardware:
    """The hardware with so much less free on every device."""
    own = tuple((gpu.uuid, n_bytes) for gpu in hardware.gpus if not gpu.shares_ram)
    return without(hardware, [Footprint(own, n_bytes)])


def find(plan_on: PlanOn, hardware: Hardware, tenants: Sequence[Tenant], *, n_most: int = 0) -> Room:
    """Room for one more model, of at most `n_most` in all (0: any number).

    `hardware` is as it is now, with the tenants loaded; they are in the order in which they would have to
    go. The idle ones go before those in use, and no more than are needed. Raises DoesNotFitError when the
    model would not fit even alone, so that no other has to go for it.
    """
    order = sorted(range(len(tenants)), key=lambda i: not tenants[i].is_idle)

    def plan_after(leaving: Sequence[int]) -> Plan:
        return plan_on(given_back(hardware, [tenants[i].footprint for i in leaving]))

    alone = plan_after(order)

    def try_after(leaving: Sequence[int]) -> Plan | None:
        if n_most and len(tenants) - len(leaving) >= n_most:
            return None
        try:
            plan = plan_after(leaving)
        except DoesNotFitError:
            return None
        return plan if _is_worth_it(plan, alone) else None

    for n in range(len(order)):
        leaving = order[:n]
        if plan := try_after(leaving):
            break
    else:
        leaving, plan = order, alone
    for spared in leaving[-2::-1]:  # the last one is needed, since without it nothing was found
        fewer = [i for i in leaving if i != spared]
        if found := try_after(fewer):
            leaving, plan = fewer, found
    return Room(plan, tuple(leaving))


def _is_worth_it(plan: Plan, alone: Plan) -> bool:
    """Whether a plan beside others will do, given the one that the model would have alone: wholly on GPUs at
    a fair quantization, else just as well as alone. Layers on the CPU cost more than loading another model
    again."""
    if plan.placement.is_whole:
        return plan.candidate.rank >= min(choice.FAIR, alone.candidate.rank)
    return (
        not alone.placement.is_whole
        and plan.candidate == alone.candidate
        and plan.load.n_ctx >= alone.load.n_ctx
        and plan.placement.n_gpu_layers >= alone.placement.n_gpu_layers
    )


def _changed(hardware: Hardware, footprints: Iterable[Footprint], *, sign: int) -> Hardware:
    gpu_bytes: dict[str, int] = {}
    ram_bytes = 0
    for taken in footprints:
        ram_bytes += taken.ram_bytes
        for uuid, n_bytes in taken.gpu_bytes:
            gpu_bytes[uuid] = gpu_bytes.get(uuid, 0) + n_bytes

    def gpu_after(gpu: Gpu) -> Gpu:
        n_bytes = ram_bytes if gpu.shares_ram else gpu_bytes.get(gpu.uuid, 0)
        return replace(gpu, free_bytes=_within(gpu.free_bytes + sign * n_bytes, gpu.total_bytes))

    ram = hardware.ram
    available = _within(ram.available_bytes + sign * ram_bytes, ram.total_bytes)
    return replace(
        hardware,
        gpus=tuple(gpu_after(gpu) for gpu in hardware.gpus),
        ram=replace(ram, available_bytes=available),
    )


def _within(n_bytes: int, total_bytes: int) -> int:
    return min(max(n_bytes, 0), total_bytes)
