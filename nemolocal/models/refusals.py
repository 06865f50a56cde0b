"""When nothing fits: by how much, who holds the memory, and the smallest change that would fit.

Decides nothing; asks the search again with a little less wished or a little more free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nemolocal.errors import DoesNotFitError
from nemolocal.hardware import Holder
from nemolocal.models import placement
from nemolocal.models import wish as wishes
from nemolocal.models.choice import Candidate
from nemolocal.models.memory import CUDA_CONTEXT_BYTES
from nemolocal.models.placement import Job
from nemolocal.models.shape import ModelShape
from nemolocal.units import gib

if TYPE_CHECKING:
    from nemolocal.models.search import Search
    from nemolocal.models.wish import Wish

N_CTX_REFUSED = 8_192
CTX_OFFERED_LEAST = 2_048
MARGIN_OFFERED = 256 << 20
HELD_WORTH_TELLING = 512 << 20  # of a card; less belongs to any desktop


def refusal(
    model: str, files: Sequence[Candidate], candidates: Sequence[Candidate], search: Search
) -> DoesNotFitError:
    """Nothing fits: what the smallest way needs, what there is, and the smallest change that would fit.
    `files` are those of the wished quantization, `candidates` all that there are."""
    wish = search.wish
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
        f"{model} does not fit: {smallest.quant} with a context of {n_ctx:,} tokens needs {gib(needed)} "
        f"{where}, and {gib(available)} can be used{fits_badly}.",
        needed_bytes=needed,
        available_bytes=available,
        hint=_smallest_change(files, candidates, search),
    )


def _needed_on_gpus(job: Job, wish: Wish) -> int:
    """What the layers that were asked for would take on one GPU."""
    shape = job.shape
    if wish.split != "tensor" and 0 <= wish.n_gpu_layers <= shape.n_layer:
        shape = replace(shape, layers=shape.layers[shape.n_layer_all + 1 - wish.n_gpu_layers :])
    return placement.needed_bytes(replace(job, shape=shape))


def _smallest_change(files: Sequence[Candidate], candidates: Sequence[Candidate], search: Search) -> str:
    """The first change with which the model would fit, the least painful first."""
    for sentence, changed in _changes(files[0].shape, search):
        if changed.any(files):
            return sentence
    everything = wishes.files(candidates, replace(search.wish, quant=""))
    found = search.again(quant="").any(everything) if len(everything) > len(files) else None
    if found:
        return f"{found[0].quant} would fit."
    largest = largest_holder(search)
    if largest and search.without(largest).any(files):
        return (
            f"It would fit if {naming(largest)} ended, which holds {gib(largest.used_bytes)} of GPU memory."
        )
    if search.wish.margin_bytes > MARGIN_OFFERED and search.again(margin_bytes=MARGIN_OFFERED).any(files):
        return f"--margin-mib {MARGIN_OFFERED >> 20} would fit, with less left to other programs."
    held = f" ({naming(largest)} holds {gib(largest.used_bytes)} of GPU memory)" if largest else ""
    return f"Close other programs{held}, or choose a smaller model."


def _changes(shape: ModelShape, search: Search) -> Iterator[tuple[str, Search]]:
    """What of the wishes could be given up, each alone."""
    wish, again = search.wish, search.again
    for n_ctx in _contexts_below(wish.n_ctx, shape.n_ctx_train):
        why = ", all that it was trained for" if n_ctx == shape.n_ctx_train else ""
        yield f"--ctx {n_ctx} would fit{why}.", again(n_ctx=n_ctx)
    if wish.n_slots > 1:
        yield "Fewer --slots would fit.", again(n_slots=1)
    if wish.kv_layout == "split":
        yield "It would fit without --kv-layout split.", again(kv_layout="shared")
    if wish.kv_type == "f16" and wishes.can_hold(shape, "q8_0"):
        yield "--kv q8_0 would fit.", again(kv_type="q8_0")
    if wish.n_ubatch:
        yield "It would fit without --ubatch.", again(n_ubatch=0)
    if wish.n_gpu_layers >= 0:
        yield "It would fit without --gpu-layers.", again(n_gpu_layers=-1)
    if wish.split == "tensor":
        yield "--split layer would fit.", again(split="layer")
    if wish.gpus:
        yield from (("It would fit without --gpu.", other) for other in search.with_all_gpus())
    if wish.n_ctx:
        yield "It would fit without --ctx, --slots and --kv.", again(n_ctx=0, n_slots=0, kv_type="")


def _contexts_below(n_ctx: int, n_trained: int) -> list[int]:
    """Shorter contexts that may be offered, the longest first: the trained one, and powers of two."""
    powers = (1 << exponent for exponent in range(n_trained.bit_length()))
    offered = {n_trained, *(power for power in powers if power >= CTX_OFFERED_LEAST)}
    return sorted((each for each in offered if each < n_ctx), reverse=True)


def largest_holder(search: Search) -> Holder | None:
    """The program that holds most of the GPUs' memory, over all of them, where it is worth telling."""
    held: Counter[int] = Counter()
    by_pid = {}
    for holder in (h for gpu in search.gpus for h in gpu.holders):
        held[holder.pid] += holder.used_bytes
        by_pid[holder.pid] = holder
    pid = min(held, key=lambda pid: (-held[pid], pid), default=None)
    if pid is None or held[pid] < HELD_WORTH_TELLING:
        return None
    return replace(by_pid[pid], used_bytes=held[pid])


def naming(holder: Holder) -> str:
    return f"{holder.name} (process {holder.pid})"
