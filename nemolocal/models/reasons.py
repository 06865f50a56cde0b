"""A plan in words: why it is what it is, and when nothing fits, by how much and what would help.

Each reason is a sentence that a person can act on. Decides nothing; asks the search of sizing.py again
where it needs to know what another choice would have come to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nemolocal.errors import DoesNotFitError
from nemolocal.models import choice, placement
from nemolocal.models.choice import Candidate
from nemolocal.models.memory import CUDA_CONTEXT_BYTES, Load
from nemolocal.models.placement import Job

if TYPE_CHECKING:
    from nemolocal.models.sizing import Found, Search, Wish

GIB = 1 << 30
N_CTX_REFUSED = 8_192
HELD_WORTH_TELLING = 512 << 20  # of a card; less belongs to any desktop
CTX_OFFERS = (65_536, 32_768, 16_384, 8_192, 4_096, 2_048)


def explain(found: Found, files: Sequence[Candidate], wish: Wish, search: Search) -> Iterator[str]:
    """Why this file, in these places, with this context."""
    candidate, load, place = found
    yield _where(found, wish, search)
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
        yield f"{_gib(wish.margin_bytes)} stay free on each GPU."
    if wish.beside_bytes and place.gpus:
        yield f"{_gib(wish.beside_bytes)} more are kept there for the draft model and adapters."
    if place.gpus and not place.is_whole:
        yield from _about_holders(search)


def refusal(model: str, files: Sequence[Candidate], wish: Wish, search: Search) -> DoesNotFitError:
    """Nothing fits: what the smallest way needs, what there is, and the smallest change that would fit."""
    smallest = min(files, key=lambda c: c.size_bytes)
    n_ctx = wish.n_ctx or min(N_CTX_REFUSED, smallest.shape.n_ctx_train)
    load = search.load(smallest.shape, n_ctx=n_ctx, n_slots=wish.n_slots or 1, kv_type=wish.kv_type or "f16")
    needed = placement.in_ram(search.job(smallest, load)).host.total_bytes
    needed += CUDA_CONTEXT_BYTES * len(search.gpus)
    where, available = "in all", search.available_bytes
    if search.gpus and (wish.n_gpu_layers >= 0 or wish.split == "tensor"):
        where, available = "on the GPUs", available - search.ram_bytes
        needed = _needed_on_gpus(search.job(smallest, load), wish)
    fits_badly = ", but not on any one device as a whole layer" if needed <= available else ""
    return DoesNotFitError(
        f"{model} does not fit: {smallest.quant} with a context of {n_ctx:,} tokens needs {_gib(needed)} "
        f"{where}, and {_gib(available)} can be used{fits_badly}.",
        needed_bytes=needed,
        available_bytes=available,
        hint=" ".join([_smallest_change(files, wish, search), *_about_holders(search)]),
    )


def _needed_on_gpus(job: Job, wish: Wish) -> int:
    """What the layers that were asked for would take on one GPU."""
    shape = job.shape
    if wish.split != "tensor" and 0 <= wish.n_gpu_layers <= shape.n_layer:
        shape = replace(shape, layers=shape.layers[shape.n_layer_all + 1 - wish.n_gpu_layers :])
    return placement.needed_bytes(replace(job, shape=shape))


def _smallest_change(files: Sequence[Candidate], wish: Wish, search: Search) -> str:
    if wish.n_ctx:
        for n_ctx in CTX_OFFERS:
            if n_ctx < wish.n_ctx and search.again(n_ctx=n_ctx).any(files):
                return f"--ctx {n_ctx} would fit."
    if wish.n_slots > 1 and search.again(n_slots=1).any(files):
        return "Fewer --slots would fit."
    if wish.kv_layout == "split" and search.again(kv_layout="shared").any(files):
        return "It would fit without --kv-layout split."
    if wish.kv_type == "f16" and search.again(kv_type="q8_0").any(files):
        return "--kv q8_0 would fit."
    if wish.n_gpu_layers >= 0 and search.again(n_gpu_layers=-1).any(files):
        return "It would fit without --gpu-layers."
    if wish.split == "tensor" and search.again(split="layer").any(files):
        return "--split layer would fit."
    if wish.gpus and search.with_all_gpus().any(files):
        return "It would fit without --gpu."
    if wish.n_ctx and search.again(n_ctx=0, n_slots=0, kv_type="").any(files):
        return "It would fit without --ctx, --slots and --kv."
    return "Close other programs, or choose a smaller model."


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
    why = "as asked for" if wish.n_gpu_layers >= 0 else "which is all that fits"
    if candidate.shape.is_assumed:
        return (
            f"About {n / n_layer:.0%} lies on {names}, {why}; the rest runs on the CPU, which is much slower."
        )
    return f"{n} of {n_layer} layers lie on {names}, {why}; the rest runs on the CPU, which is much slower."


def _names(place: placement.Placement) -> str:
    names = Counter(gpu.name for gpu in place.gpus)
    return " and ".join(name if n == 1 else f"{n} × {name}" for name, n in names.items())


def _why_cpu(wish: Wish, search: Search) -> str:
    if wish.n_gpu_layers == 0:
        return "that was asked for."
    if search.gpus:
        most = max(gpu.free_bytes for gpu in search.gpus)
        return f"not one layer fits a GPU, of which {_gib(most)} are free."
    return search.hardware.reason or "there is no GPU."


def _about_quant(found: Found, files: Sequence[Candidate], search: Search) -> str:
    candidate, load, place = found
    classes = choice.prefer(files, aim=search.aim_rank)
    wanted = [*classes.good, *classes.fair, *classes.poor]
    larger = [c for c in wanted if c.size_bytes > candidate.size_bytes]
    if not larger and search.gpus:
        return f"{candidate.quant} is the best of those whose bytes are worth their room."
    if not larger:
        return f"{candidate.quant}: on a CPU each token reads every weight, so more bytes would be slower."
    best = larger[0]
    if candidate.is_local and not best.is_local:
        return f"{candidate.quant} is here already; {best.quant} would have to be downloaded."
    if place.gpus and not place.is_whole and search.wish.n_gpu_layers >= 0:
        return f"{candidate.quant} is the best that fits with so many layers on the GPUs."
    if place.gpus and not place.is_whole:
        if candidate.rank < choice.GOOD:
            return f"{candidate.quant} is the best that fits at all; at so few bits the answers suffer."
        left = "experts in RAM" if place.host_experts else "layers to the CPU"
        return f"{candidate.quant} leaves the fewest {left} without harm to the answers."
    lacks = f"with {load.n_ctx:,} tokens it needs {_gib(placement.needed_bytes(search.job(best, load)))}"
    room = f"of {_gib(search.available_bytes - search.ram_bytes)} that can be used on the GPUs"
    if not place.gpus:
        lacks = f"it needs {_gib(placement.in_ram(search.job(best, load)).host.total_bytes)}"
        room = f"of {_gib(search.ram_bytes)} of RAM"
    if search.place(best, load):
        return f"{candidate.quant} leaves room for a longer context than {best.quant}."
    return f"{candidate.quant} is the best that fits; {best.quant} does not: {lacks} {room}."


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
    if place.gpus and not place.is_whole and wish.n_gpu_layers < 0 and load.n_ctx >= N_CTX_REFUSED:
        return (
            f"A context of {load.n_ctx:,} tokens, to leave the least to the CPU; --ctx takes more, "
            f"up to {n_train:,}."
        )
    larger = [n for n in search.contexts(candidate) if n > load.n_ctx]
    if larger and search.gpus and not search.place(candidate, replace(load, n_ctx=larger[-1])):
        return f"A context of {load.n_ctx:,} tokens; {larger[-1]:,} would not fit."
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
        each = candidate.shape.state_bytes / (1 << 20)
        return f"{answers} at a time; each keeps a state of {each:.0f} MiB."
    return f"{answers} at a time, which share the context."


def _about_holders(search: Search) -> Iterator[str]:
    """Who holds most of what is not free on the GPUs."""
    holders = sorted((h for gpu in search.gpus for h in gpu.holders), key=lambda h: -h.used_bytes)
    if holders and holders[0].used_bytes > HELD_WORTH_TELLING:
        largest = holders[0]
        yield f"{largest.name} (process {largest.pid}) holds {_gib(largest.used_bytes)} of GPU memory."


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.1f} GiB"
