"""A plan in words: why it is what it is, and what each thing that gave way costs.

Each reason is a sentence that a person can act on. Decides nothing; asks the search again where it needs to
know what another choice would have come to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nemolocal.models import choice, placement, refusals, speed
from nemolocal.models.choice import Candidate
from nemolocal.models.memory import CUDA_CONTEXT_BYTES, Load
from nemolocal.units import gib

if TYPE_CHECKING:
    from nemolocal.models.search import Found, Search
    from nemolocal.models.wish import Wish

UNBOUNDED = 1 << 60  # bytes


def explain(found: Found, files: Sequence[Candidate], wish: Wish, search: Search) -> Iterator[str]:
    """Why this file, in these places, with this context."""
    candidate, load, place = found
    yield _where(found, wish, search)
    yield from _what_cannot_be_used(search)
    if place.gpus and not wish.gpus:
        yield from _what_a_slice_excludes(place, search)
    if place.gpus and not place.is_whole:
        yield from _what_the_ram_costs(found, search)
    if candidate.shape.is_assumed:
        yield "How its layers are made is not known before the file is here; more is kept than it may need."
    if len(files) > 1:
        yield _about_quant(found, files, search)
    elif wish.quant:
        yield f"{candidate.quant} was asked for."
    yield _about_context(found, wish, search)
    if load.kv_type != "f16":
        kind = f"The cache is kept in {load.kv_type}"
        cost = "half the room of f16; answers come about a fifth slower at 8,192 tokens, a third at 32,768"
        yield f"{kind}, as asked for." if wish.kv_type else f"{kind}, which takes {cost}."
    yield _about_slots(candidate, load, wish)
    if place.gpus:
        yield f"{gib(wish.margin_bytes)} stay free on each GPU."
    if wish.beside_bytes and place.gpus:
        yield f"{gib(wish.beside_bytes)} more are kept there for the draft model and adapters."
    yield from _what_another_program_costs(found, files, search)


def _where(found: Found, wish: Wish, search: Search) -> str:
    candidate, _, place = found
    n_layer = candidate.shape.n_layer
    if not place.gpus:
        return f"All {n_layer} layers run on the CPU: {_why_cpu(wish, search)}"
    names = _names(place)
    if place.split_mode == "tensor":
        why = "as asked for" if wish.split == "tensor" else "which is faster than one after another"
        return f"The tensors of all {n_layer} layers are split over {names}, {why}."
    if place.is_whole:
        if len(place.gpus) > 1:
            return f"All {n_layer} layers fit on {names}, split by their bytes, as no card holds them alone."
        others = ", and one card is faster than two" if len(search.gpus) > 1 else ""
        return f"All {n_layer} layers fit on {names}{others}."
    if place.host_experts and not place.host.n_layers:
        n_sparse = sum(layer.expert_bytes > 0 for layer in candidate.shape.layers)
        return (
            f"All {n_layer} layers lie on {names}, but the experts of {len(place.host_experts)} of "
            f"{n_sparse} stay in RAM, where the CPU reads the few that each token needs."
        )
    n = sum(share.n_layers for share in place.shares)
    if wish.n_gpu_layers == n + 1:  # the output layer counts as one
        return (
            f"{n} of {n_layer} layers and the output layer lie on {names}, as asked for; the rest runs on "
            "the CPU, which is much slower."
        )
    why = "as asked for" if wish.n_gpu_layers >= 0 else "which is all that fits with this context"
    if candidate.shape.is_assumed:
        return (
            f"About {n / n_layer:.0%} lies on {names}, {why}; the rest runs on the CPU, which is much slower."
        )
    return f"{n} of {n_layer} layers lie on {names}, {why}; the rest runs on the CPU, which is much slower."


def _what_cannot_be_used(search: Search) -> Iterator[str]:
    """The GPUs that are there and do nothing, where that is not told as the reason for the CPU already."""
    for gpu in search.hardware.gpus:
        if gpu.state not in ("ok", "mig") and gpu.problem and gpu.problem != search.hardware.reason:
            yield f"GPU {gpu.index} ({gpu.name}) is not used: {gpu.problem}"


def _what_a_slice_excludes(place: placement.Placement, search: Search) -> Iterator[str]:
    """A process can use one slice that MIG has cut, and no other GPU beside it."""
    usable = [gpu for gpu in search.hardware.gpus if gpu.state == "ok"]
    n_slices = sum(gpu.is_slice for gpu in usable)
    if place.gpus[0].is_slice and len(usable) > 1:
        name = place.gpus[0].name
        yield f"{name} is used alone, as CUDA uses a slice that MIG has cut beside no other GPU."
    elif n_slices and not place.gpus[0].is_slice:
        which = "The slice" if n_slices == 1 else f"The {n_slices} slices"
        yield f"{which} that MIG has cut cannot be used beside whole cards, and no slice alone does better."


def _what_the_ram_costs(found: Found, search: Search) -> Iterator[str]:
    candidate, load, place = found
    card = replace(place.gpus[0], free_bytes=UNBOUNDED)
    alone = placement.on_gpus(search.job(candidate, load), [card])
    now = speed.token_s(candidate.shape, load, place)
    then = speed.token_s(candidate.shape, load, alone) if alone else None
    if now and then:
        yield f"Answers are forecast at {then / now:.0%} of the speed of such a card that held all of it."


def _names(place: placement.Placement) -> str:
    names = Counter(gpu.name for gpu in place.gpus)
    return " and ".join(name if n == 1 else f"{n} × {name}" for name, n in names.items())


def _why_cpu(wish: Wish, search: Search) -> str:
    if wish.n_gpu_layers == 0:
        return "that was asked for."
    if search.gpus:
        most = max(gpu.free_bytes for gpu in search.gpus)
        return f"not one layer fits a GPU, of which {gib(most)} are free."
    return search.hardware.reason or "there is no GPU."


def _about_quant(found: Found, files: Sequence[Candidate], search: Search) -> str:
    candidate, load, place = found
    if candidate.is_local and (elsewhere := _better_elsewhere(candidate, files, search)):
        return f"{candidate.quant} is here already; {elsewhere} would suit better, after its download."
    classes = choice.prefer(files, aim=search.aim_rank)
    wanted = [*classes.good, *classes.fair, *classes.poor]
    larger = [c for c in wanted if c.size_bytes > candidate.size_bytes]
    if not larger and search.gpus:
        return f"{candidate.quant} is the best of those whose bytes are worth their room."
    if not larger:
        return f"{candidate.quant}: on a CPU each token reads every weight, so more bytes would be slower."
    if place.gpus and not place.is_whole and search.wish.n_gpu_layers >= 0:
        return f"{candidate.quant} is the best that fits with so many layers on the GPUs."
    if place.gpus and not place.is_whole:
        if candidate.rank < choice.GOOD:
            return f"{candidate.quant} is the best that fits at all; at so few bits the answers suffer."
        left = "experts in RAM" if place.host_experts else "layers to the CPU"
        return f"{candidate.quant} leaves the fewest {left} without harm to the answers."
    better = larger[-1]
    lacks = f"with {load.n_ctx:,} tokens it needs {gib(_needed_bytes(better, load, search))}"
    room = f"of {gib(search.available_bytes - search.ram_bytes)} that can be used on the GPUs"
    if not place.gpus:
        lacks = f"it needs {gib(placement.in_ram(search.job(better, load)).host.total_bytes)}"
        room = f"of {gib(search.ram_bytes)} of RAM"
    if search.place(better, load):
        return f"{candidate.quant} leaves room for a longer context than {better.quant}."
    return f"{candidate.quant} is the best that fits; {better.quant} does not: {lacks} {room}."


def _better_elsewhere(candidate: Candidate, files: Sequence[Candidate], search: Search) -> str:
    """The quantization that would be taken if all files were here; "" where that is the one that is."""
    if all(c.is_local for c in files):
        return ""
    best = search.any(files)
    return best[0].quant if best and not best[0].is_local and best[0].quant != candidate.quant else ""


def _needed_bytes(candidate: Candidate, load: Load, search: Search) -> int:
    """What a file takes on all GPUs together, with what each of them costs however little it holds."""
    job, n_more = search.job(candidate, load), max(len(search.gpus) - 1, 0)
    each = CUDA_CONTEXT_BYTES + job.compute_bytes(n_gpus=len(search.gpus))
    return placement.needed_bytes(job) + n_more * each


def _about_context(found: Found, wish: Wish, search: Search) -> str:
    candidate, load, place = found
    n_train = candidate.shape.n_ctx_train
    if candidate.shape.pooling:
        more = f"; --ctx takes more, up to {n_train:,}" if load.n_ctx < n_train and not wish.n_ctx else ""
        if wish.n_ctx > n_train:
            more = f"; the {wish.n_ctx:,} asked for are more than the {n_train:,} that the model reads"
        return f"Inputs of up to {load.n_ctx:,} tokens{more}."
    if wish.n_ctx > n_train:
        return f"A context of {load.n_ctx:,} tokens, as asked for, but the model was trained for {n_train:,}."
    if wish.n_ctx:
        return f"A context of {load.n_ctx:,} tokens, as asked for."
    if load.n_ctx >= n_train:
        return f"A context of {load.n_ctx:,} tokens, all that the model was trained for."
    if place.gpus and not place.is_whole and wish.n_gpu_layers < 0 and load.n_ctx >= refusals.N_CTX_REFUSED:
        return (
            f"A context of {load.n_ctx:,} tokens, as long as costs little speed; --ctx takes more, "
            f"up to {n_train:,}."
        )
    larger = [n for n in search.contexts(candidate) if n > load.n_ctx]
    if larger and search.gpus and not search.place(candidate, replace(load, n_ctx=larger[-1])):
        jobs = [search.job(candidate, replace(load, n_ctx=n_ctx)) for n_ctx in (load.n_ctx, larger[-1])]
        now, then = (placement.needed_bytes(job) for job in jobs)
        return f"A context of {load.n_ctx:,} tokens; {larger[-1]:,} would take {gib(then - now)} more."
    return f"A context of {load.n_ctx:,} tokens; --ctx takes more, up to {n_train:,}."


def _about_slots(candidate: Candidate, load: Load, wish: Wish) -> str:
    if candidate.shape.pooling:
        at_once = "1 input" if load.n_slots == 1 else f"Up to {load.n_slots} inputs"
        return f"{at_once} at a time{', as asked for' if wish.n_slots else ''}."
    answers = "1 answer" if load.n_slots == 1 else f"{load.n_slots} answers"
    if load.kv_layout == "split":
        asked = ", as asked for" if wish.n_slots else ""
        return f"{answers} at a time{asked}, each with a context of its own."
    if wish.n_slots:
        return f"{answers} at a time, as asked for."
    if candidate.shape.state_bytes:
        each = gib(candidate.shape.state_bytes, n_digits=2)
        return f"{answers} at a time; each keeps a state of {each}."
    return f"{answers} at a time, which share the context."


def _what_another_program_costs(found: Found, files: Sequence[Candidate], search: Search) -> Iterator[str]:
    """The program that holds most of the GPUs' memory, where the plan would be another without it."""
    candidate, load, place = found
    largest = refusals.largest_holder(search)
    alike = [c for c in files if c.is_local] if candidate.is_local else files
    better = search.without(largest).any(alike) if largest else None
    if not largest or not better:
        return
    if better[2].is_whole > place.is_whole:
        gain = f"all of {better[0].quant} would fit on the GPUs"
    elif better[0].rank > candidate.rank:
        gain = f"{better[0].quant} would fit"
    elif better[0] == candidate and better[1].n_ctx > load.n_ctx:
        gain = f"the context would be {better[1].n_ctx:,} tokens"
    else:
        return
    yield f"{refusals.naming(largest)} holds {gib(largest.used_bytes)} of GPU memory; without it, {gain}."
