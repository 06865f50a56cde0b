"""Where each layer goes: whole layers on GPUs in order, the rest in RAM, by bytes and not by count.

Pure. The rule is llama.cpp's (src/llama-model.cpp, load_tensors): the first layers stay in RAM, the last go
to the GPUs, each GPU holds a run of neighbours, and the output layer counts as one more layer at the end.
With `tensor_split` set to the number of layers of each GPU, llama.cpp makes just these runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from nemolocal.hardware import Gpu
from nemolocal.models import forecast, memory
from nemolocal.models.memory import Load
from nemolocal.models.shape import ModelShape

SplitMode = Literal["none", "layer", "tensor"]

RAM_MARGIN_BYTES: Final = 512 * memory.MIB
"""What is left of the RAM for this program itself and for the system to breathe."""

_N_SEARCH_STEPS: Final = 24


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
    layer as one.
    """

    gpus: tuple[Gpu, ...]
    shares: tuple[Share, ...]
    host: Share
    n_gpu_layers: int
    tensor_split: tuple[float, ...]
    split_mode: SplitMode

    @property
    def is_whole(self) -> bool:
        """Whether every layer is on a GPU."""
        return bool(self.gpus) and self.host.n_layers == 0

    @property
    def gpu_bytes(self) -> int:
        """What is taken from all GPUs together."""
        return sum(share.total_bytes for share in self.shares)

    @property
    def ram_bytes(self) -> int:
        """What is taken from the RAM, also by GPUs that have no memory of their own."""
        shared = sum(s.total_bytes for gpu, s in zip(self.gpus, self.shares, strict=True) if gpu.shares_ram)
        return self.host.total_bytes + shared


def in_ram(shape: ModelShape, load: Load) -> Placement:
    """All of it in RAM."""
    return Placement((), (), _host(shape, load, shape.n_layer, is_all=True), 0, (), "none")


def on_gpus(
    shape: ModelShape,
    load: Load,
    gpus: Sequence[Gpu],
    *,
    margin_bytes: int,
    n_gpu_layers: int = -1,
    n_gpus_most: int = memory.N_GPUS_MOST,
) -> Placement | None:
    """A placement with `n_gpu_layers` layers on at most `n_gpus_most` of these GPUs (-1: all layers); None
    when they do not fit.

    One card where one holds it all, the fastest of those; otherwise as many cards as are needed, the one
    with most room first, each filled to the same share of its room.
    """
    n_all = shape.n_layer_all + 1
    n_wanted = n_all if n_gpu_layers < 0 else min(n_gpu_layers, n_all)
    job = _Job(shape, load, margin_bytes, _costs(shape, load))
    return _try(job, gpus, n_wanted, n_gpus_most) if n_wanted else in_ram(shape, load)


def most_on_gpus(shape: ModelShape, load: Load, gpus: Sequence[Gpu], *, margin_bytes: int) -> Placement:
    """The placement with the most layers on these GPUs; all in RAM where not even the output layer fits."""
    job = _Job(shape, load, margin_bytes, _costs(shape, load))
    for n_wanted in range(shape.n_layer_all + 1, 0, -1):
        found = _try(job, gpus, n_wanted, memory.N_GPUS_MOST)
        if found:
            return found
    return in_ram(shape, load)


def across(shape: ModelShape, load: Load, gpus: Sequence[Gpu], *, margin_bytes: int) -> Placement | None:
    """Every matrix cut over all these GPUs (LLAMA_SPLIT_MODE_TENSOR), by the room that each has; None when
    it does not fit. Norms, which each holds whole, are too small to count."""
    fixed = memory.CUDA_CONTEXT_BYTES + memory.compute_bytes(shape, load, is_gpu=True)
    rooms = [gpu.free_bytes - margin_bytes - fixed for gpu in gpus]
    if len(gpus) < 2 or min(rooms) <= 0:
        return None
    ordered = sorted(zip(rooms, gpus, strict=True), key=lambda pair: (-pair[0], pair[1].uuid))
    whole = _share(shape, load, 0, shape.n_layer_all + 1, n_gpus=1)
    shares = []
    for room, _ in ordered:
        part = room / sum(rooms)
        shares.append(
            Share(
                n_layers=shape.n_layer,
                weights_bytes=round(whole.weights_bytes * part),
                kv_bytes=round(whole.kv_bytes * part),
                compute_bytes=whole.compute_bytes,
                overhead_bytes=whole.overhead_bytes,
            )
        )
        if shares[-1].total_bytes > room + fixed:
            return None
    return Placement(
        gpus=tuple(gpu for _, gpu in ordered),
        shares=tuple(shares),
        host=_host(shape, load, 0),
        n_gpu_layers=shape.n_layer_all + 1,
        tensor_split=tuple(round(room / sum(rooms), 4) for room, _ in ordered),
        split_mode="tensor",
    )


def needed_bytes(shape: ModelShape, load: Load) -> int:
    """What a single GPU would have to hold."""
    return _share(shape, load, 0, shape.n_layer_all + 1, n_gpus=1).total_bytes


def _speed_order(gpu: Gpu) -> tuple[float, float, str]:
    return -(forecast.bandwidth(gpu.name) or 0), -gpu.free_bytes, gpu.uuid


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be placed; `costs` are the bytes of each layer by llama.cpp's numbers."""

    shape: ModelShape
    load: Load
    margin_bytes: int
    costs: Sequence[int]


def _try(job: _Job, gpus: Sequence[Gpu], n_wanted: int, n_gpus_most: int) -> Placement | None:
    """The last `n_wanted` layers on these GPUs."""
    for gpu in sorted(gpus, key=_speed_order):
        if _pack(job, _rooms(job, [gpu], n_wanted), n_wanted, share=1.0):
            return _placement(job.shape, job.load, [gpu], [n_wanted])
    ordered = sorted(gpus, key=lambda gpu: (-gpu.free_bytes, gpu.uuid))
    for n in range(2, min(len(ordered), n_gpus_most) + 1):
        counts = _balance(job, _rooms(job, ordered[:n], n_wanted), n_wanted)
        if counts:
            used = [(gpu, count) for gpu, count in zip(ordered, counts, strict=False) if count]
            return _placement(job.shape, job.load, [gpu for gpu, _ in used], [count for _, count in used])
    return None


def _rooms(job: _Job, gpus: Sequence[Gpu], n_wanted: int) -> list[int]:
    """Bytes that each GPU has for layers, after what it costs however few layers it holds."""
    n_host = job.shape.n_layer_all + 1 - n_wanted
    compute_bytes = _compute_bytes(job.shape, job.load, n_host, n_gpus=len(gpus))
    fixed = memory.CUDA_CONTEXT_BYTES + compute_bytes + job.margin_bytes
    return [gpu.free_bytes - fixed for gpu in gpus]


def _balance(job: _Job, rooms: Sequence[int], n_wanted: int) -> list[int] | None:
    """Layers for each GPU, or None: the smallest common share of their room into which all go."""
    best = _pack(job, rooms, n_wanted, share=1.0)
    low, high = 0.0, 1.0
    for _ in range(_N_SEARCH_STEPS if best else 0):
        middle = (low + high) / 2
        counts = _pack(job, rooms, n_wanted, share=middle)
        if counts:
            best, high = counts, middle
        else:
            low = middle
    return best


def _pack(job: _Job, rooms: Sequence[int], n_wanted: int, *, share: float) -> list[int] | None:
    """Fill the rooms in order with the last `n_wanted` layers, each to this share of it."""
    counts, at = [], len(job.costs) - n_wanted
    for room in rooms:
        left, begin = room * share, at
        while at < len(job.costs) and job.costs[at] <= left:
            left -= job.costs[at]
            at += 1
        counts.append(at - begin)
    return counts if at == len(job.costs) else None


def _costs(shape: ModelShape, load: Load) -> list[int]:
    """Bytes of each layer by llama.cpp's numbers: blocks, extra blocks (not loaded), the output layer."""
    blocks = [
        layer.weights_bytes + memory.kv_bytes(layer, load) + memory.state_bytes(layer, load)
        for layer in shape.layers
    ]
    return [*blocks, *([0] * shape.n_extra_layers), shape.output_bytes]


def _compute_bytes(shape: ModelShape, load: Load, n_host: int, *, n_gpus: int) -> int:
    """The buffer of each GPU in use when the first `n_host` layers stay in RAM."""
    n_bytes = memory.compute_bytes(shape, load, is_gpu=True)
    if n_host:
        return n_bytes + memory.offload_bytes(shape, n_host)
    return n_bytes + (memory.pipeline_bytes(shape, load) if n_gpus > 1 else 0)


def _placement(shape: ModelShape, load: Load, gpus: Sequence[Gpu], counts: Sequence[int]) -> Placement:
    start = first = shape.n_layer_all + 1 - sum(counts)
    shares = []
    for count in counts:
        shares.append(_share(shape, load, first, count, n_gpus=len(gpus), n_host=start))
        first += count
    return Placement(
        gpus=tuple(gpus),
        shares=tuple(shares),
        host=_host(shape, load, min(start, shape.n_layer)),
        n_gpu_layers=sum(counts),
        tensor_split=tuple(float(count) for count in counts) if len(gpus) > 1 else (),
        split_mode="layer" if len(gpus) > 1 else "none",
    )


def _share(shape: ModelShape, load: Load, first: int, count: int, *, n_gpus: int, n_host: int = 0) -> Share:
    """What a GPU holds with `count` layers from `first` on, when the first `n_host` of all stay in RAM."""
    blocks = shape.layers[first : first + count]
    has_output = first + count == shape.n_layer_all + 1
    return Share(
        n_layers=len(blocks),
        weights_bytes=sum(b.weights_bytes for b in blocks) + (shape.output_bytes if has_output else 0),
        kv_bytes=sum(memory.kv_bytes(b, load) for b in blocks),
        state_bytes=sum(memory.state_bytes(b, load) for b in blocks),
        compute_bytes=_compute_bytes(shape, load, n_host, n_gpus=n_gpus),
        overhead_bytes=memory.CUDA_CONTEXT_BYTES,
    )


def _host(shape: ModelShape, load: Load, n_layers: int, *, is_all: bool = False) -> Share:
    """What stays in RAM: the token embeddings always, and the first `n_layers` blocks. A tied output matrix
    in RAM is the embeddings themselves (src/llama-model-loader.cpp)."""
    blocks = shape.layers[:n_layers]
    output_bytes = shape.output_bytes if is_all and not shape.is_tied else 0
    is_computing = is_all or bool(blocks)
    return Share(
        n_layers=n_layers,
        weights_bytes=shape.input_bytes + output_bytes + sum(b.weights_bytes for b in blocks),
        kv_bytes=sum(memory.kv_bytes(b, load) for b in blocks),
        state_bytes=sum(memory.state_bytes(b, load) for b in blocks),
        compute_bytes=memory.compute_bytes(shape, load, is_gpu=False) if is_computing else 0,
        overhead_bytes=memory.host_bytes(shape, load),
    )
