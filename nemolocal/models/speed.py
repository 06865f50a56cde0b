"""How fast a plan will read and write, from what each of its devices reads and computes for a token.

A forecast: what the figures of forecast.py make of it. Knows nothing of choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nemolocal.models import forecast
from nemolocal.models.memory import Load
from nemolocal.models.placement import Placement
from nemolocal.models.shape import ModelShape

N_FILLED = 4_096
"""Tokens in the cache of one answer, as it is on the way."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a device does for one token: bytes of weights that it reads, how many of these are of experts,
    what reading the cache costs as bytes of weights would, and bytes of weights that it holds, all of which a
    long prompt reads."""

    read_bytes: float
    expert_bytes: float
    cache_bytes: float
    held_bytes: float

    def part(self, share: float) -> Work:
        """What a card does that has so much of it."""
        values = (self.read_bytes, self.expert_bytes, self.cache_bytes, self.held_bytes)
        return Work(*(share * value for value in values))

    def prompt_s(self, name: str, n_operations: float, n_ubatch: int) -> float | None:
        """Seconds of a GPU for each token of a long prompt, with so many operations for each byte that a
        token reads; None for an unknown card."""
        whole = self.read_bytes + self.expert_bytes * (1 / forecast.EXPERT_EFFICIENCY - 1)
        computing = forecast.compute_s(name, n_operations * whole)
        reading = forecast.read_s(name, self.held_bytes)
        return None if computing is None or reading is None else computing + reading / n_ubatch


def token_s(shape: ModelShape, load: Load, place: Placement) -> float | None:
    """Seconds for one token of one stream with N_FILLED tokens before it; None where a card is unknown."""
    works = list(_gpu_works(shape, load, place))
    times = [
        forecast.read_s(gpu.name, work.read_bytes + work.cache_bytes)
        for gpu, work in zip(place.gpus, works, strict=True)
    ]
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        return None
    ram, n_host = _ram_work(shape, load, place), place.host.n_layers
    seconds = (ram.read_bytes + ram.cache_bytes) / forecast.CPU_BANDWIDTH
    seconds += (n_host + len(place.host_experts)) * forecast.CPU_LAYER_S
    if place.split_mode == "tensor":
        return seconds + max(known) + shape.n_layer * forecast.TENSOR_LAYER_S
    return seconds + sum(known) + (shape.n_layer - n_host) * forecast.LAYER_S


def prompt_token_s(shape: ModelShape, load: Load, place: Placement, *, n_cores: int) -> float | None:
    """Seconds for each token of a long prompt; None where a card or the number of parameters is unknown."""
    stored = shape.input_bytes + shape.repeating_bytes + shape.extra_bytes
    stored += 0 if shape.is_tied else shape.output_bytes
    if not shape.n_params or not stored:
        return None
    n_operations = 2 * shape.n_params / stored  # for each byte that is read: a product and a sum
    ram = _ram_work(shape, load, place)
    if not place.gpus:
        return ram.read_bytes * n_operations / (n_cores * forecast.CORE_COMPUTE)
    times = [
        work.prompt_s(gpu.name, n_operations, load.n_ubatch)
        for gpu, work in zip(place.gpus, _gpu_works(shape, load, place), strict=True)
    ]
    of_ram = ram.prompt_s(place.gpus[0].name, n_operations, load.n_ubatch)
    known = [time for time in times if time is not None]
    if of_ram is None or len(known) < len(times):
        return None
    launching = (shape.n_layer - place.host.n_layers) * forecast.LAYER_S / load.n_ubatch
    if place.split_mode == "tensor":
        return launching + max(known) / forecast.TENSOR_GAIN
    if len(known) > 1 and place.is_whole:
        return launching + max(known) / forecast.PIPELINE_GAIN
    copying = ram.held_bytes / forecast.BUS_BANDWIDTH / load.n_ubatch  # what lies in RAM is brought to a GPU
    return launching + sum(known) + of_ram + copying


def _gpu_works(shape: ModelShape, load: Load, place: Placement) -> Iterator[Work]:
    """What each GPU does, in the placement's order."""
    if place.split_mode == "tensor":
        all_of_it = _work(shape, load, range(shape.n_layer), shape.output_bytes)
        for share in place.shares:
            part = share.kv_bytes / max(sum(s.kv_bytes for s in place.shares), 1) or 1 / len(place.shares)
            yield all_of_it.part(part)
        return
    first = place.host.n_layers
    for i, share in enumerate(place.shares):
        output_bytes = shape.output_bytes if i == len(place.shares) - 1 else 0
        layers = range(first, first + share.n_layers)
        yield _work(shape, load, layers, output_bytes, without=frozenset(place.host_experts))
        first += share.n_layers


def _ram_work(shape: ModelShape, load: Load, place: Placement) -> Work:
    """What is read of the RAM; of the token embeddings one row, unless they are the output matrix too."""
    output_bytes = 0 if place.gpus else shape.output_bytes
    work = _work(shape, load, range(place.host.n_layers), output_bytes)
    experts = sum(shape.layers[il].expert_bytes for il in place.host_experts)
    chosen = experts * _chosen(shape)
    read_bytes, expert_bytes = work.read_bytes + chosen, work.expert_bytes + chosen
    return Work(read_bytes, expert_bytes, work.cache_bytes, work.held_bytes + experts)


def _work(
    shape: ModelShape,
    load: Load,
    layers: Iterable[int],
    output_bytes: int,
    without: frozenset[int] = frozenset(),
) -> Work:
    """What reading these blocks and an output matrix comes to, the experts of some blocks left out."""
    read = held = float(output_bytes)
    chosen = cache = 0.0
    cost = 1.0 if load.kv_type == "f16" else forecast.QUANTIZED_KV_COST
    n_filled = min(load.n_ctx, N_FILLED)
    for il in layers:
        layer = shape.layers[il]
        experts = 0 if il in without else layer.expert_bytes
        rest = layer.weights_bytes - layer.expert_bytes
        chosen += experts * _chosen(shape)
        read += rest + experts * _chosen(shape)
        held += rest + experts
        n = min(n_filled, layer.n_swa or n_filled)
        cache += 2 * (layer.n_embd_k_gqa + layer.n_embd_v_gqa) * n * cost
        cache += 2 * layer.state_bytes  # read and written
    return Work(read, chosen, cache, held)


def _chosen(shape: ModelShape) -> float:
    """The share of the experts that one token reads."""
    return shape.n_expert_used / shape.n_expert if shape.n_expert else 1.0
