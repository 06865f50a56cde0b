"""Where each layer goes: whole layers on GPUs in order, the rest in RAM, by bytes and not by count.

Pure. The rule is llama.cpp's (src/llama-model.cpp, load_tensors): the first layers stay in RAM, the last go
to the GPUs, each GPU holds a run of neighbours, and the output layer counts as one more layer at the end.
With `tensor_split` set to the number of layers of each GPU, llama.cpp makes just these runs. Of a mixture of
experts, the experts of some blocks may stay in RAM while the blocks are on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Final, Literal

from nemolocal.hardware import Gpu
from nemolocal.models import forecast, memory
from nemolocal.models.memory import Load
from nemolocal.models.packing import Runs
from nemolocal.models.shape import ModelShape

SplitMode = Literal["none", "layer", "tensor"]

RAM_MARGIN_BYTES: Final = 512 * memory.MIB
"""What is left of the RAM for this program itself and for the system to breathe."""

_ALIKE: Final = 0.8
"""Cards whose memory is at least this much as fast as another's count as equally fast."""


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


@dataclass(frozen=True)
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

    def with_host_experts(self, host_experts: tuple[int, ...]) -> Job:
        """The same with these experts in RAM. What does not hang on them is not added up again."""
        other = replace(self, host_experts=host_experts)
        other.__dict__.update(
            _whole_blocks=self._whole_blocks, _least_compute_bytes=self._least_compute_bytes
        )
        return other

    @cached_property
    def runs(self) -> Runs:
        """The layers by their bytes on a GPU, by llama.cpp's numbers: blocks, extra blocks (not loaded),
        output."""
        blocks = list(self._whole_blocks)
        for il in self.host_experts:
            blocks[il] -= self.shape.layers[il].expert_bytes
        return Runs([*blocks, *([0] * self.shape.n_extra_layers), self.shape.output_bytes])

    @cached_property
    def _whole_blocks(self) -> list[int]:
        return [
            layer.weights_bytes + memory.kv_bytes(layer, self.load) + memory.state_bytes(layer, self.load)
            for layer in self.shape.layers
        ]

    @cached_property
    def _least_compute_bytes(self) -> int:
        return memory.compute_bytes(self.shape, self.load, is_gpu=True)

    def compute_bytes(self, n_host: int = 0, *, n_gpus: int = 1) -> int:
        """The buffer of each GPU in use when the first `n_host` layers stay in RAM."""
        n_bytes = self._least_compute_bytes
        if n_host or self.host_experts:
            n_bytes += memory.offload_bytes(self.shape, n_host, self.host_experts)
        elif n_gpus > 1:
            n_bytes += memory.pipeline_bytes(self.shape, self.load)
        return round(n_bytes * self.compute_ratio)

    def room(self, gpu: Gpu, compute_bytes: int) -> int:
        """Bytes that a GPU has for layers, after what it costs however few layers it holds."""
        return gpu.free_bytes - self.overhead_bytes(gpu) - compute_bytes - self.kept_bytes


def in_ram(job: Job) -> Placement:
    """All of it in RAM."""
    return Placement((), (), host_share(job, job.shape.n_layer, is_all=True), 0, (), "none")


def on_gpus(job: Job, gpus: Sequence[Gpu], *, n_gpu_layers: int = -1) -> Placement | None:
    """A placement with `n_gpu_layers` layers on these GPUs (-1: all layers); None when they do not fit.

    One card where one holds it all, the fastest of those; otherwise as many cards as are needed, those with
    most room, in the order of their UUIDs wherever the layers fit so, and the faster ones filled first.
    """
    n_wanted = job.n_all if n_gpu_layers < 0 else min(n_gpu_layers, job.n_all)
    return _try(job, gpus, job.n_all - n_wanted) if n_wanted else in_ram(job)


def most_on_gpus(job: Job, gpus: Sequence[Gpu]) -> Placement:
    """The placement with the most on these GPUs; all in RAM where not even the output layer fits. Of a
    mixture of experts, all blocks with as many of their experts as can be, the first of them without; where
    that is not enough, as many of the last blocks as can be, without their experts.

    Gone through one by one, since the largest part that is in RAM needs a buffer on the GPUs too, so that
    less on them may not fit where more does.
    """
    most = sum(max(job.room(gpu, job.compute_bytes()), 0) for gpu in gpus)
    for n_host, host_experts, needed in _retreats(job):
        if needed <= most:
            part = job.with_host_experts(host_experts)
            found = _try(part, gpus, n_host)
            if found:
                return found
    return in_ram(job)


def _retreats(job: Job) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """(layers in RAM, blocks whose experts are in RAM, bytes of what is left for GPUs): what gives way step
    by step, until only the output layer is left."""
    layers = job.shape.layers
    sparse = [il for il, layer in enumerate(layers) if layer.expert_bytes]
    before = [0, *accumulate(layer.expert_bytes for layer in layers)]  # bytes of experts before each block
    for n in range(len(sparse) + 1):
        in_ram = before[sparse[n - 1] + 1] if n else 0
        yield 0, tuple(sparse[:n]), job.runs.needed_bytes(0) - in_ram
    for n_host in range(1, job.n_all):
        in_ram = before[-1] - before[min(n_host, len(layers))]
        rest = tuple(il for il in sparse if il >= n_host)
        yield n_host, rest, job.runs.needed_bytes(n_host) - in_ram


def needed_bytes(job: Job) -> int:
    """What a single GPU would have to hold."""
    return _share(job, 0, job.n_all, n_gpus=1).total_bytes


def _try(job: Job, gpus: Sequence[Gpu], n_host: int) -> Placement | None:
    """All layers but the first `n_host` on these GPUs."""
    needed = job.runs.needed_bytes(n_host)
    compute_bytes = job.compute_bytes(n_host)
    for gpu in sorted(gpus, key=_speed_order):
        if needed <= job.room(gpu, compute_bytes):
            return _placement(job, [gpu], [job.n_all - n_host])
    compute_bytes = job.compute_bytes(n_host, n_gpus=2)
    by_room = sorted(gpus, key=lambda gpu: (-job.room(gpu, compute_bytes), gpu.uuid))
    for n in range(2, min(len(by_room), memory.N_GPUS_MOST) + 1):
        if sum(job.room(gpu, compute_bytes) for gpu in by_room[:n]) < needed:
            continue
        used = sorted(by_room[:n], key=lambda gpu: gpu.uuid)
        rooms = [job.room(gpu, compute_bytes) for gpu in used]
        packed = job.runs.pack(n_host, rooms, _tiers(used))
        if packed:
            return _placement(job, [used[i] for i, _ in packed], [count for _, count in packed])
    return None


def _speed_order(gpu: Gpu) -> tuple[float, float, str]:
    return -(forecast.bandwidth(gpu.name) or 0), -gpu.free_bytes, gpu.uuid


def _tiers(gpus: Sequence[Gpu]) -> list[int]:
    """0 for the fastest cards and those nearly as fast, 1 for the next, and so on; where any card is unknown,
    all are alike."""
    speeds = [forecast.bandwidth(gpu.name) or 0 for gpu in gpus]
    if not all(speeds):
        return [0] * len(gpus)
    tiers: dict[int, int] = {}
    fastest, tier = max(speeds), 0
    for speed in sorted(set(speeds), reverse=True):
        if speed < _ALIKE * fastest:
            fastest, tier = speed, tier + 1
        tiers[speed] = tier
    return [tiers[speed] for speed in speeds]


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
        host=host_share(job, min(start, job.shape.n_layer)),
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


def host_share(job: Job, n_layers: int, *, is_all: bool = False) -> Share:
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
        overhead_bytes=memory.host_bytes(shape, load, is_computing=is_computing),
    )
