"""Every matrix cut over several cards, so that all of them work on each layer at once.

Pure. The rule is llama.cpp's (LLAMA_SPLIT_MODE_TENSOR; src/llama-model.cpp, get_tensor_config and
get_split_granularity): the matrices of attention and feed-forward blocks, the output matrix and the cache are
cut, the cache by whole heads; everything else is on each card as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from nemolocal.hardware import Gpu
from nemolocal.models import memory
from nemolocal.models.placement import Job, Placement, Share, host_share
from nemolocal.models.shape import LayerShape, ModelShape

_QUANT_BLOCK: Final = 256  # elements of the largest block of a quantization
_N_NORMS: Final = 2  # of a block's, each of the stream's width in f32


def n_heads_together(shape: ModelShape, layer: LayerShape) -> int:
    """Heads of the cache that stay on one card together, since the rows of the matrix that belong to them are
    whole blocks of the quantization only so."""
    n_head_kv = _n_heads(shape, layer)
    if not n_head_kv:
        return 1
    n_rows = max(shape.n_head_max // n_head_kv, 1) * shape.head_length
    return math.lcm(n_rows, _QUANT_BLOCK) // n_rows


def is_possible(shape: ModelShape, n_gpus: int) -> bool:
    """Whether each of so many cards gets some heads of every block that has any."""
    return all(
        _n_heads(shape, layer) >= n_gpus * n_heads_together(shape, layer)
        for layer in shape.layers
        if layer.n_embd_k_gqa
    )


def is_even(shape: ModelShape, n_gpus: int) -> bool:
    """Whether the heads of every block can be cut evenly over so many cards."""
    return all(
        _n_heads(shape, layer) % (n_gpus * n_heads_together(shape, layer)) == 0 for layer in shape.layers
    )


def _n_heads(shape: ModelShape, layer: LayerShape) -> int:
    """Heads of a block's cache."""
    return layer.n_embd_k_gqa // max(shape.head_length, 1)


def across(job: Job, gpus: Sequence[Gpu]) -> Placement | None:
    """The placement over all these cards: even between cards of one kind, else by the room that each has;
    None when it does not fit."""
    shape, load = job.shape, job.load
    compute_bytes = job.compute_bytes()
    ordered = sorted(gpus, key=lambda gpu: gpu.uuid)
    rooms = [job.room(gpu, compute_bytes) for gpu in ordered]
    if len(ordered) < 2 or min(rooms) <= 0:
        return None
    parts = [room / sum(rooms) for room in rooms]
    if len({(gpu.name, gpu.total_bytes) for gpu in gpus}) == 1:
        parts = [1 / len(gpus)] * len(gpus)
    whole_bytes = _whole_bytes(shape)
    cut_bytes = shape.repeating_bytes + shape.output_bytes - whole_bytes
    kv_parts = _kv_parts(job, parts)
    kv_bytes = sum(memory.kv_bytes(layer, load) for layer in shape.layers)
    shares = tuple(
        Share(
            n_layers=shape.n_layer,
            weights_bytes=whole_bytes + round(cut_bytes * max(part, kv_part)),
            kv_bytes=round(kv_bytes * kv_part),
            state_bytes=shape.state_bytes * load.n_slots,
            compute_bytes=compute_bytes,
            overhead_bytes=job.overhead_bytes(gpu),
        )
        for gpu, part, kv_part in zip(ordered, parts, kv_parts, strict=True)
    )
    if any(s.total_bytes > g.free_bytes - job.kept_bytes for g, s in zip(ordered, shares, strict=True)):
        return None
    return Placement(
        gpus=tuple(ordered),
        shares=shares,
        host=host_share(job, 0),
        n_gpu_layers=job.n_all,
        tensor_split=tuple(round(part, 4) for part in parts),
        split_mode="tensor",
    )


def _whole_bytes(shape: ModelShape) -> int:
    """What each card holds whole: the norms, and of a mixture of experts at most all but the experts, since
    those that every token passes through are not cut."""
    norms = 4 * shape.n_embd * _N_NORMS
    blocks = [x.weights_bytes - x.expert_bytes if x.expert_bytes else norms for x in shape.layers]
    return sum(min(n, x.weights_bytes) for n, x in zip(blocks, shape.layers, strict=True))


def _kv_parts(job: Job, parts: Sequence[float]) -> list[float]:
    """The part of the cache that each card gets. A cut that falls inside of a head is moved down to the head
    before it, and from block to block the card where cutting begins is another."""
    shape, n = job.shape, len(parts)
    totals, n_all = [0] * n, 0
    layers = [layer for layer in shape.layers if layer.n_embd_k_gqa]
    for il, layer in enumerate(layers):
        turned = [(j + il) % n for j in range(n)]
        n_heads, step = _n_heads(shape, layer), n_heads_together(shape, layer)
        ends = [int(n_heads * end + 1e-6) for end in accumulate(parts[j] for j in turned)]
        ends = [end - end % step for end in ends[:-1]] + [n_heads]
        for j, begin, end in zip(turned, [0, *ends], ends, strict=False):
            totals[j] += end - begin
        n_all += n_heads
    return [total / n_all for total in totals] if n_all else list(parts)
