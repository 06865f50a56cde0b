"""A load that found too little memory: by how much its plan was wrong, and how that is told.

Pure; knows plans and what the engine said of the allocation that failed.
"""

from __future__ import annotations

from nemolocal.errors import OutOfMemoryError
from nemolocal.failures import CAUTION_BYTES
from nemolocal.hardware import Hardware
from nemolocal.measuring import OVERHEAD_MOST, share_of
from nemolocal.models.plans import Plan
from nemolocal.units import gib


def missing_bytes(plan: Plan, error: OutOfMemoryError, now: Hardware, *, before: int = 0) -> int:
    """What the next plan is to leave free on the device, beyond its margin, with the machine as it is `now`
    that the engine is gone; `before` is what this plan left free already.

    What was neither free nor llama.cpp's when the allocation failed, and is free now, the engine itself held:
    more than planned, perhaps. What was asked for may be more than was to come, too. Where neither explains
    the failure, the plan is made smaller by a guess, but not where others have taken the memory since, which
    the next plan sees by itself.
    """
    gpu, share = share_of(plan, error.device)
    free_now = next((x.free_bytes for x in now.gpus if x.uuid == error.device), now.ram.available_bytes)
    n_held_more = 0
    if gpu is not None and error.free_bytes is not None:
        n_held = free_now - error.held_bytes - error.free_bytes
        if n_held <= OVERHEAD_MOST:  # else others came and went
            n_held_more = n_held - share.overhead_bytes
    n_to_come = share.total_bytes - share.overhead_bytes - error.held_bytes
    found = max(n_held_more, 0) + max(error.wanted_bytes - n_to_come, 0)
    kept_bytes = plan.kept_bytes if gpu else 0
    would_fit_again = share.total_bytes + kept_bytes + max(found, before) <= free_now
    return max(found, before) + (CAUTION_BYTES if would_fit_again else 0)


def describe(name: str, plan: Plan, error: OutOfMemoryError, *, is_second: bool) -> OutOfMemoryError:
    """The same error in a line with all figures."""
    gpu, share = share_of(plan, error.device)
    free = "" if error.free_bytes is None else f" with {_gib(error.free_bytes)} free"
    planned = f"{_gib(share.total_bytes)} in all"
    planned += f", of {_gib(gpu.free_bytes)} that were free" if gpu else ""
    tried = "It was planned again with what the first try showed, and failed again. " if is_second else ""
    return OutOfMemoryError(
        f"{name} ran out of memory while loading: {gpu.name if gpu else 'the RAM'} was asked for "
        f"{_gib(error.wanted_bytes)} more{free}, beside {_gib(error.held_bytes)} that the model had. "
        f"Planned were {planned}",
        hint=f"{tried}Close other programs, or use a smaller --ctx or quantization.",
        device=error.device,
        wanted_bytes=error.wanted_bytes,
        free_bytes=error.free_bytes,
        held_bytes=error.held_bytes,
    )


def _gib(n_bytes: int) -> str:
    return gib(n_bytes, n_digits=2)
