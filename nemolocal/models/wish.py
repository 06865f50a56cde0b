"""What a person asks of a plan, and what of it no memory could make possible.

Pure. What is asked for is kept or refused, never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from nemolocal.errors import ModelNotFoundError, UsageError
from nemolocal.hardware import Gpu, Hardware
from nemolocal.models import architectures, tensor_split
from nemolocal.models.choice import Aim, Candidate
from nemolocal.models.memory import KV_BLOCK, KvLayout, KvType
from nemolocal.models.shape import ModelShape

N_SLOTS_MOST: Final = 32


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for; 0, "", () and -1 leave it to the plan. `gpus` are UUIDs (or their beginnings)
    or indices; `n_gpu_layers` counts the output layer as one; `margin_bytes` stay free on each GPU, and
    `beside_bytes` are kept there for what is loaded beside the model (draft model, adapters)."""

    n_ctx: int = 0
    n_slots: int = 0
    kv_type: KvType | Literal[""] = ""
    gpus: tuple[str, ...] = ()
    split: Literal["auto", "layer", "tensor"] = "auto"
    n_gpu_layers: int = -1
    n_ubatch: int = 0
    kv_layout: KvLayout | Literal["auto"] = "auto"
    margin_bytes: int = 1 << 30
    beside_bytes: int = 0
    quant: str = ""
    aim: Aim = "balanced"

    @property
    def kept_bytes(self) -> int:
        """What of each GPU's free memory the model itself may not have."""
        return self.margin_bytes + self.beside_bytes


def files(candidates: Sequence[Candidate], wish: Wish) -> list[Candidate]:
    """Those of the wished quantization, in an order of their own, so that the order they came in has no say.

    Raises ModelNotFoundError when there is none.
    """
    ordered = sorted(candidates, key=lambda c: (c.size_bytes, c.quant, not c.is_local, c.file))
    if not wish.quant:
        return ordered
    named = [c for c in ordered if c.quant.casefold() == wish.quant.casefold()]
    if not named:
        known = ", ".join(dict.fromkeys(c.quant for c in ordered))
        raise ModelNotFoundError(f"No file of the model is {wish.quant}.", hint=f"There are {known}.")
    return named


def groups(hardware: Hardware, wish: Wish) -> list[list[Gpu]]:
    """The usable GPUs that the wish names, all without one, by what one process of CUDA can use: whole cards
    together, and a slice that MIG has cut with nothing beside it. Of slices alike there is only the one with
    most room. One empty group where no GPU can be used. Raises UsageError for a name that fits none, and for
    a slice that is named with anything else."""
    chosen = _named(hardware, wish)
    cards = [gpu for gpu in chosen if not gpu.is_slice]
    slices = sorted((gpu for gpu in chosen if gpu.is_slice), key=lambda gpu: (-gpu.free_bytes, gpu.uuid))
    if wish.gpus and slices and len(chosen) > 1:
        raise UsageError(
            "A process can use one slice that MIG has cut, and no other GPU beside it.",
            hint=f"Name one of them with --gpu, as {slices[0].uuid}, or whole cards alone.",
        )
    unlike: dict[tuple[str, int], Gpu] = {}
    for each in slices:
        unlike.setdefault((each.name, each.total_bytes), each)
    return [group for group in (cards, *([each] for each in unlike.values())) if group] or [[]]


def _named(hardware: Hardware, wish: Wish) -> list[Gpu]:
    usable = [gpu for gpu in hardware.gpus if gpu.state == "ok"]
    if not wish.gpus:
        return usable
    chosen: list[Gpu] = []
    for name in wish.gpus:
        found = [
            gpu
            for gpu in hardware.gpus
            if (name == str(gpu.index) and not gpu.is_slice) or gpu.uuid.lower().startswith(name.lower())
        ]
        if len(found) != 1:
            known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in usable) or "no GPU"
            raise UsageError(f"'{name}' does not name one GPU of this machine.", hint=f"It has {known}.")
        if found[0].state != "ok":
            why = (found[0].problem or found[0].state).rstrip(".")
            raise UsageError(f"GPU {name} cannot be used: {why}.")
        chosen += [gpu for gpu in found if gpu not in chosen]
    return chosen


def within(shape: ModelShape, wish: Wish) -> Wish:
    """A context that is more than a model that embeds or ranks can read was wished for others, which chat."""
    return replace(wish, n_ctx=0) if shape.pooling and wish.n_ctx > shape.n_ctx_train else wish


def check(wish: Wish, files: Sequence[Candidate], gpus: Sequence[Gpu], hardware: Hardware) -> None:
    """Refuse what no memory could make possible. Raises ModelNotFoundError and UsageError."""
    if not files:
        raise ModelNotFoundError("There is no file of this model to plan for.")
    if not gpus and wish.n_gpu_layers > 0:
        raise UsageError(f"No layer can go to a GPU. {hardware.reason}", hint="Leave --gpu-layers out.")
    if not 0 <= wish.n_slots <= N_SLOTS_MOST:
        raise UsageError(f"{wish.n_slots} slots are not between 1 and {N_SLOTS_MOST}.")
    if wish.n_ctx < 0:
        raise UsageError(f"A context of {wish.n_ctx} tokens is not possible.")
    shape = files[0].shape
    if wish.kv_type and not can_hold(shape, wish.kv_type):
        raise UsageError(
            f"A cache of the type {wish.kv_type} needs attention heads of a multiple of {KV_BLOCK} elements; "
            f"this model's have {shape.head_length}.",
            hint="Use --kv f16.",
        )
    if wish.split == "tensor":
        _check_tensor_split(wish, shape, gpus)


def can_hold(shape: ModelShape, kv_type: KvType) -> bool:
    """A quantized cache needs heads of whole blocks (llama.cpp src/llama-context.cpp)."""
    return kv_type == "f16" or shape.head_length % KV_BLOCK == 0


def _check_tensor_split(wish: Wish, shape: ModelShape, gpus: Sequence[Gpu]) -> None:
    if len(gpus) < 2:
        raise UsageError("A tensor split needs at least two GPUs.", hint="Use --split layer.")
    if shape.architecture in architectures.WITHOUT_TENSOR_SPLIT:
        raise UsageError(
            f"llama.cpp cannot split the tensors of the architecture '{shape.architecture}'.",
            hint="Use --split layer.",
        )
    if not tensor_split.is_possible(shape, len(gpus)):
        raise UsageError(
            f"The heads of this model's cache cannot be cut over {len(gpus)} GPUs.",
            hint="Use --split layer, or name fewer GPUs with --gpu.",
        )
    if wish.kv_type not in ("", "f16"):
        raise UsageError("A tensor split needs the cache in f16.", hint="Use --kv f16 or --split layer.")
    if 0 <= wish.n_gpu_layers < shape.n_layer_all + 1:
        raise UsageError("A tensor split has all layers on the GPUs.", hint="Leave --gpu-layers out.")
