"""Where each layer goes: whole layers on GPUs in order, the rest in RAM, by bytes and not by count.

Pure. The rule is llama.cpp's (src/llama-model.cpp, load_tensors): the first layers stay in RAM, the last go
to the GPUs, each GPU holds a run of neighbours, and the output layer counts as one more layer at the end.
With `tensor_split` set to the number of layers of each GPU, llama.cpp makes just these runs. Of a mixture of
experts, the experts of some blocks may stay in RAM while the blocks are on GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from nemolocal.hardware import Gpu
from nemolocal.models import forecast, memory
from nemolocal.models.memory import Load
from nemolocal.models.shape import ModelShape

SplitMode = Literal["none", "layer", "tensor"]

RAM_MARGIN_BYTES: Final = 512 * memory.MIB
"""What is left of the RAM for this program itself and for the system to breathe."""

_N_SEARCH_STEPS: Final = 24
_N_PERMUTED: Final = 4  # cards
_ROOM_STEP_BYTES: Final = 512 * memory.MIB  # what the desktop takes and gives back from start to start


@dataclass(frozen=True, slots=True)
class Share:
    """What one device holds, in bytes by kind, which add up to `total_bytes`. `n_layers` counts blocks."""

    n_layers: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    state_bytes: int = 0
    compute_bytes: int = 0
    overhead_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes + self.kv_bytes + self.state_bytes + self.compute_bytes + self.overhead_bytes
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs in the order that llama.cpp is to see them, their shares, and what stays in RAM.

    `n_gpu_layers` and `tensor_split` are what llama.cpp is told to get just this; both count the output
    layer as one. The experts of the blocks in `host_experts` stay in RAM.
    """

    gpus: tuple[Gpu, ...]
    shares: tuple[Share, ...]
    host: Share
    n_gpu_layers: int
    tensor_split: tuple[float, ...]
    split_mode: SplitMode
    host_experts: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every layer is on a GPU, with all that belongs to it."""
        return bool(self.gpus) and self.host.n_layers == 0 and not self.host_experts

    @property
    def gpu_bytes(self) -> int:
        """What is taken from all GPUs together."""
        return sum(share.total_bytes for share in self.shares)

    @property
    def ram_bytes(self) -> int:
        """What is taken from the RAM, also by GPUs that have no memory of their own."""
        shared = sum(s.total_bytes for gpu, s in zip(self.gpus, self.shares, strict=True) if gpu.shares_ram)
        return self.host.total_bytes + shared


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be placed. `kept_bytes` of each GPU's free memory stay free. What earlier loads have shown:
    `overheads` is by a GPU's UUID what it holds beyond llama.cpp's figures, and `compute_ratio` what the
    buffers take over what is planned for them. The experts of the blocks in `host_experts` stay in RAM."""

    shape: ModelShape
    load: Load
    kept_bytes: int = 0
    overheads: Mapping[str, int] = field(default_factory=dict)
    compute_ratio: float = 1.0
    host_experts: tuple[int, ...] = ()

    @property
    def n_all(self) -> int:
        """Layers by llama.cpp's count, the output layer included."""
        return self.shape.n_layer_all + 1

    def overhead_bytes(self, gpu: Gpu) -> int:
        return self.overheads.get(gpu.uuid, memory.CUDA_CONTEXT_BYTES)

    def costs(self) -> list[int]:
        """Bytes of each layer on a GPU, by llama.cpp's numbers: blocks, extra blocks (not loaded), output."""
        blocks = [
            layer.weights_bytes + memory.kv_bytes(layer, self.load) + memory.state_bytes(layer, self.load)
            for layer in self.shape.layers
        ]
        for il in self.host_experts:
            blocks[il] -= self.shape.layers[il].expert_bytes
        return [*blocks, *([0] * self.shape.n_extra_layers), self.shape.output_bytes]

    def compute_bytes(self, n_host: int, *, n_gpus: int) -> int:
        """The buffer of each GPU in use when the first `n_host` layers stay in RAM."""
        shape, load = self.shape, self.load
        n_bytes = memory.compute_bytes(shape, load, is_gpu=True)
        if n_host or self.host_experts:
            n_bytes += memory.offload_bytes(shape, n_host, self.host_experts)
        elif n_gpus > 1:
            n_bytes += memory.pipeline_bytes(shape, load)
        return round(n_bytes * self.compute_ratio)


def in_ram(job: Job) -> Placement:
    """All of it in RAM."""
    return Placement((), (), _host(job, job.shape.n_layer, is_all=True), 0, (), "none")


def on_gpus(
    job: Job, gpus: Sequence[Gpu], *, n_gpu_layers: int = -1, n_gpus_most: int = memory.N_GPUS_MOST
) -> Placement | None:
    """A placement with `n_gpu_layers` layers on at most `n_gpus_most` of these GPUs (-1: all layers); None
    when they do not fit.

    One card where one holds it all, the fastest of those; otherwise as many cards as are needed, the one
    with most room first, each filled to the same share of its room.
    """
    n_wanted = job.n_all if n_gpu_layers < 0 else min(n_gpu_layers, job.n_all)
    return _try(job, job.costs(), gpus, n_wanted, n_gpus_most) if n_wanted else in_ram(job)


def most_on_gpus(job: Job, gpus: Sequence[Gpu]) -> Placement:
    """The placement with the most layers on these GPUs; all in RAM where not even the output layer fits. Of
    a mixture of experts, as many blocks as can keep their experts there; the others' stay in RAM."""
    sparse = [il for il, layer in enumerate(job.shape.layers) if layer.expert_bytes]
    found = _fewest_host_experts(job, gpus, sparse) if sparse else None
    if found:
        return found
    best, low, high = in_ram(job), 0, job.n_all + 1
    while high - low > 1:  # fewer layers fit where more do
        middle = (low + high) // 2
        first = job.n_all - middle
        part = replace(job, host_experts=tuple(il for il in sparse if il >= first))
        found = _try(part, part.costs(), gpus, middle, memory.N_GPUS_MOST)
        if found:
            best, low = found, middle
        else:
            high = middle
    return best


def _fewest_host_experts(job: Job, gpus: Sequence[Gpu], sparse: Sequence[int]) -> Placement | None:
    """All layers on GPUs, with the experts of as few blocks in RAM as will do, the first of them; None when
    that is not enough. The more are in RAM, the more fits, so the number is found by halving."""

    def with_first(n: int) -> Placement | None:
        part = replace(job, host_experts=tuple(sparse[:n]))
        return _try(part, part.costs(), gpus, job.n_all, memory.N_GPUS_MOST)

    found = with_first(len(sparse))
    low, high = 0, len(sparse)
    while found and high - low > 1:
        middle = (low + high) // 2
        fewer = with_first(middle)
        if fewer:
            found, high = fewer, middle
        else:
            low = middle
    return found


def across(job: Job, gpus: Sequence[Gpu]) -> Placement | None:
    """Every matrix cut over all these GPUs (LLAMA_SPLIT_MODE_TENSOR): evenly between cards of one kind, else
    by the room that each has; None when it does not fit. Norms, which each holds whole, are too small to
    count."""
    shape, load = job.shape, job.load
    compute_bytes = round(memory.compute_bytes(shape, load, is_gpu=True) * job.compute_ratio)
    rooms = {gpu.uuid: _room(job, gpu, compute_bytes) for gpu in gpus}
    if len(gpus) < 2 or min(rooms.values()) <= 0:
        return None
    ordered = sorted(gpus, key=_room_order)
    parts = [rooms[gpu.uuid] / sum(rooms.values()) for gpu in ordered]
    if len({(gpu.name, gpu.total_bytes) for gpu in gpus}) == 1:
        parts = [1 / len(gpus)] * len(gpus)
    kv_bytes = sum(memory.kv_bytes(layer, load) for layer in shape.layers)
    shares = [
        Share(
            n_layers=shape.n_layer,
            weights_bytes=round((shape.repeating_bytes + shape.output_bytes) * part),
            kv_bytes=round(kv_bytes * part),
            compute_bytes=compute_bytes,
            overhead_bytes=job.overhead_bytes(gpu),
        )
        for gpu, part in zip(ordered, parts, strict=True)
    ]
    if any(s.total_bytes > g.free_bytes - job.kept_bytes for g, s in zip(ordered, shares, strict=True)):
        return None
    return Placement(
        gpus=tuple(ordered),
        shares=tuple(shares),
        host=_host(job, 0),
        n_gpu_layers=job.n_all,
        tensor_split=tuple(round(part, 4) for part in parts),
        split_mode="tensor",
    )


def needed_bytes(job: Job) -> int:
    """What a single GPU would have to hold."""
    return _share(job, 0, job.n_all, n_gpus=1).total_bytes


def _speed_order(gpu: Gpu) -> tuple[float, float, str]:
    return -(forecast.bandwidth(gpu.name) or 0), -gpu.free_bytes, gpu.uuid


def _room_order(gpu: Gpu) -> tuple[int, str]:
    """The one with most room first; between cards with nearly as much, always the same."""
    return -(gpu.free_bytes // _ROOM_STEP_BYTES), gpu.uuid


def _room(job: Job, gpu: Gpu, compute_bytes: int) -> int:
    """Bytes that a GPU has for layers, after what it costs however few layers it holds."""
    return gpu.free_bytes - job.overhead_bytes(gpu) - compute_bytes - job.kept_bytes


def _try(
    job: Job, costs: Sequence[int], gpus: Sequence[Gpu], n_wanted: int, n_gpus_most: int
) -> Placement | None:
    """The last `n_wanted` layers on these GPUs."""
    n_host = job.n_all - n_wanted
    compute_bytes = job.compute_bytes(n_host, n_gpus=1)
    needed = sum(costs[n_host:])
    for gpu in sorted(gpus, key=_speed_order):
        if needed <= _room(job, gpu, compute_bytes):
            return _placement(job, [gpu], [n_wanted])
    ordered = sorted(gpus, key=_room_order)
    compute_bytes = job.compute_bytes(n_host, n_gpus=2)
    rooms = [_room(job, gpu, compute_bytes) for gpu in ordered]
    for n in range(2, min(len(ordered), n_gpus_most) + 1):
        if sum(rooms[:n]) < needed:
            continue
        for order in _orders(n):
            counts = _balance(costs, [rooms[i] for i in order], n_wanted)
            if counts:
                used = [(ordered[i], count) for i, count in zip(order, counts, strict=True) if count]
                return _placement(job, [gpu for gpu, _ in used], [count for _, count in used])
    return None


def _orders(n: int) -> Iterator[tuple[int, ...]]:
    """Orders of the cards that are worth a try, that by room first: where layers are of very unlike sizes,
    another may fit."""
    if n <= _N_PERMUTED:
        yield from itertools.permutations(range(n))
    else:
        yield tuple(range(n))
        yield tuple(reversed(range(n)))


def _balance(costs: Sequence[int], rooms: Sequence[int], n_wanted: int) -> list[int] | None:
    """Layers for each GPU, or None: the smallest common share of their room into which all go."""
    best = _pack(costs, rooms, n_wanted, share=1.0)
    low, high = 0.0, 1.0
    for _ in range(_N_SEARCH_STEPS if best else 0):
        middle = (low + high) / 2
        counts = _pack(costs, rooms, n_wanted, share=middle)
        if counts:
            best, high = counts, middle
        else:
            low = middle
    return best


def _pack(costs: Sequence[int], rooms: Sequence[int], n_wanted: int, *, share: float) -> list[int] | None:
    """Fill the rooms in order with the last `n_wanted` layers, each to this share of it."""
    counts, at = [], len(costs) - n_wanted
    for room in rooms:
        left, begin = room * share, at
        while at < len(costs) and costs[at] <= left:
            left -= costs[at]
            at += 1
        counts.append(at - begin)
    return counts if at == len(costs) else None


def _placement(job: Job, gpus: Sequence[Gpu], counts: Sequence[int]) -> Placement:
    start = first = job.n_all - sum(counts)
    shares = []
    for gpu, count in zip(gpus, counts, strict=True):
        share = _share(job, first, count, n_gpus=len(gpus), n_host=start)
        shares.append(replace(share, overhead_bytes=job.overhead_bytes(gpu)))
        first += count
    return Placement(
        gpus=tuple(gpus),
        shares=tuple(shares),
        host=_host(job, min(start, job.shape.n_layer)),
        n_gpu_layers=sum(counts),
        tensor_split=tuple(float(count) for count in counts) if len(gpus) > 1 else (),
        split_mode="layer" if len(gpus) > 1 else "none",
        host_experts=job.host_experts,
    )


def _share(job: Job, first: int, count: int, *, n_gpus: int, n_host: int = 0) -> Share:
    """What a GPU holds with `count` layers from `first` on, when the first `n_host` of all stay in RAM."""
    shape, load = job.shape, job.load
    blocks = shape.layers[first : first + count]
    weights_bytes = sum(block.weights_bytes for block in blocks)
    weights_bytes -= sum(
        shape.layers[il].expert_bytes for il in job.host_experts if first <= il < first + count
    )
    has_output = first + count == job.n_all
    return Share(
        n_layers=len(blocks),
        weights_bytes=weights_bytes + (shape.output_bytes if has_output else 0),
        kv_bytes=sum(memory.kv_bytes(block, load) for block in blocks),
        state_bytes=sum(memory.state_bytes(block, load) for block in blocks),
        compute_bytes=job.compute_bytes(n_host, n_gpus=n_gpus),
        overhead_bytes=memory.CUDA_CONTEXT_BYTES,
    )


def _host(job: Job, n_layers: int, *, is_all: bool = False) -> Share:
    """What stays in RAM: the token embeddings always, the first `n_layers` blocks, and experts of others. A
    tied output matrix in RAM is the embeddings themselves (src/llama-model-loader.cpp)."""
    shape, load = job.shape, job.load
    blocks = shape.layers[:n_layers]
    output_bytes = shape.output_bytes if is_all and not shape.is_tied else 0
    expert_bytes = sum(shape.layers[il].expert_bytes for il in job.host_experts if il >= n_layers)
    is_computing = is_all or bool(blocks) or bool(expert_bytes)
    compute_bytes = memory.compute_bytes(shape, load, is_gpu=False) if is_computing else 0
    return Share(
        n_layers=n_layers,
        weights_bytes=shape.input_bytes + output_bytes + expert_bytes + sum(b.weights_bytes for b in blocks),
        kv_bytes=sum(memory.kv_bytes(b, load) for b in blocks),
        state_bytes=sum(memory.state_bytes(b, load) for b in blocks),
        compute_bytes=round(compute_bytes * job.compute_ratio),
        overhead_bytes=memory.host_bytes(shape, load),
    )
