"""Machines and models that plans are tried on, and what must hold of every plan."""

from __future__ import annotations

import json
from dataclasses import replace

from nemolocal.hardware import Cpu, Gpu, Hardware, Ram
from nemolocal.models import catalog, memory
from nemolocal.models.memory import CUDA_CONTEXT_BYTES, Load
from nemolocal.models.shape import LayerKind, LayerShape, ModelShape
from nemolocal.models.sizing import GIB, Candidate, Plan, Wish


def gpu(index: int, name: str, total_gib: float, free_gib: float, **rest: object) -> Gpu:
    uuid = f"GPU-{'abcdef'[index] * 4}0000-0000-0000-0000-000000000000"
    fields = {"total_bytes": round(total_gib * GIB), "free_bytes": round(free_gib * GIB), **rest}
    return Gpu(index, uuid, name, "8.9", **fields)  # type: ignore[arg-type]


def machine(*gpus: Gpu, ram_gib: float = 32) -> Hardware:
    return Hardware(
        mode="gpu" if gpus else "cpu",
        reason="" if gpus else "No NVIDIA driver was found.",
        gpus=gpus,
        cpu=Cpu("a processor", 8),
        ram=Ram(round(ram_gib * GIB), round(ram_gib * GIB)),
    )


RTX_3060 = gpu(0, "NVIDIA GeForce RTX 3060", 12, 11.6)
RTX_4090 = gpu(0, "NVIDIA GeForce RTX 4090", 24, 23.4)
SECOND_4090 = gpu(1, "NVIDIA GeForce RTX 4090", 24, 23.4)
OLD_3090 = gpu(0, "NVIDIA GeForce RTX 3090", 24, 23)
BUSY_4090 = gpu(1, "NVIDIA GeForce RTX 4090", 24, 4)


def even(
    quant: str,
    size_gib: float,
    *,
    n_layer: int = 32,
    n_row: int = 1024,
    n_ctx_train: int = 131_072,
    **rest: object,
) -> Candidate:
    """A model of equal layers; with 32 layers and rows of 1,024, 8,192 tokens take 1 GiB in f16."""
    weights_bytes = round(size_gib * GIB / n_layer)
    layer = LayerShape(LayerKind.ATTENTION | LayerKind.MLP, weights_bytes, n_row, n_row)
    shape = ModelShape(
        architecture="llama",
        n_ctx_train=n_ctx_train,
        n_embd=4096,
        n_vocab=128,
        layers=(layer,) * n_layer,
        input_bytes=0,
        output_bytes=0,
        n_activations_max=4096,
        head_length=128,
        n_params=8_000_000_000,
    )
    return Candidate(quant, f"{quant}.gguf", round(size_gib * GIB), replace(shape, **rest))  # type: ignore[arg-type]


def of_catalog(model_id: str) -> list[Candidate]:
    model = catalog.load().get(model_id)
    assert model is not None
    return [Candidate(row.quant, row.quant, row.bytes, model.shape(row), False) for row in model.files]


def check(made: Plan, hardware: Hardware, margin_bytes: int = GIB) -> None:
    """What must hold of every plan."""
    place, shape = made.placement, made.candidate.shape
    for card, share in zip(place.gpus, place.shares, strict=True):
        assert share.total_bytes + margin_bytes <= card.free_bytes
        assert card in hardware.gpus
    assert place.ram_bytes <= hardware.ram.available_bytes
    if made.split_mode != "tensor":
        shares = (*place.shares, place.host)
        assert sum(share.n_layers for share in shares) == shape.n_layer
        kv_bytes = sum(memory.kv_bytes(layer, made.load) for layer in shape.layers)
        assert sum(share.kv_bytes for share in shares) == kv_bytes
        assert sum(share.state_bytes for share in shares) == shape.state_bytes * made.load.n_slots
        weights_bytes = sum(share.weights_bytes for share in shares)
        tied_bytes = shape.output_bytes if shape.is_tied and not place.gpus else 0
        assert weights_bytes + tied_bytes == shape.input_bytes + shape.repeating_bytes + shape.output_bytes
    if made.split_mode == "layer":
        assert sum(place.tensor_split) == place.n_gpu_layers
    assert made.reasons
    assert all(reason.endswith(".") and "\n" not in reason for reason in made.reasons)
    json.dumps(made.to_dict())


LADDER = [
    even("Q8_0", 7.95),
    even("Q6_K", 6.14),
    even("Q5_K_M", 5.33),
    even("Q4_K_M", 4.58),
    even("Q3_K_M", 3.74),
]
CARD_7_3 = machine(gpu(0, "NVIDIA GeForce RTX 4060", 8, 7.3), ram_gib=24)
OVERHEAD = round(0.6 * GIB)


def asked(n_ctx: int, **rest: object) -> Wish:
    """A wish that leaves, with CUDA's own bytes and the buffers, 0.6 GiB beside weights and cache."""
    buffers = memory.compute_bytes(LADDER[0].shape, Load(n_ctx, 4), is_gpu=True) + CUDA_CONTEXT_BYTES
    return Wish(n_ctx=n_ctx, kv_type="f16", margin_bytes=max(OVERHEAD - buffers, 0), **rest)  # type: ignore[arg-type]
