"""Which file of a model, on which devices, with how much context: one pure decision with its reasons.

Nothing is guessed from parameter counts: weights, KV cache, recurrent state and buffers are added up layer
by layer (memory.py) and laid on the devices as llama.cpp would (placement.py), into what is free now. The
words for a decision and for a refusal are in reasons.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from nemolocal.errors import ModelNotFoundError, UsageError
from nemolocal.hardware import Gpu, Hardware
from nemolocal.models import architectures, choice, forecast, memory, placement, reasons
from nemolocal.models.choice import Candidate, prefer
from nemolocal.models.memory import KV_BLOCK, N_GPUS_MOST, KvLayout, KvType, Load
from nemolocal.models.placement import RAM_MARGIN_BYTES, Placement, SplitMode
from nemolocal.models.shape import ModelShape

__all__ = ["Candidate", "Plan", "Wish", "plan"]

GIB: Final = 1 << 30
N_BATCH: Final = 2048
N_UBATCH_FAST: Final = (2048, 4096)
"""Tokens that a GPU reads at a time where there is plenty of room: up to a quarter faster than 512 where
several prompts wait."""
SHARE_SPENT: Final = 0.125
"""Of what is left over, the most that goes into speed alone: another model may want the rest."""
CTX_LADDER: Final = (131_072, 65_536, 32_768, 16_384, 8_192)
N_CTX_LONG: Final = 16_384
"""Down to this, a smaller context is a lesser loss than a lower quantization."""
N_CTX_LEAST: Final = 8_192
"""Below this only when nothing else fits."""
CTX_LAST_RESORT: Final = (4_096, 2_048)
INPUT_LADDER: Final = (8_192, 4_096, 2_048, 1_024, 512)
"""Longest inputs of models that embed or rank, where nothing is wished."""
N_OUTPUT_BYTES_MOST: Final = 2 * GIB
"""What the rows that llama.cpp hands out for each token of such an input may take, wishes apart."""
N_SLOTS_MOST: Final = 32
N_SLOTS_CPU: Final = 8
N_SLOTS_FIRST: Final = 4
"""Slots that a model on a GPU gets before anything gives way; more are added from what is left over."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for; 0, "", () and -1 leave it to the plan. What is asked for is kept or refused,
    never changed. `gpus` are UUIDs (or their beginnings) or indices; `n_gpu_layers` counts the output layer
    as one; `margin_bytes` stay free on each GPU."""

    n_ctx: int = 0
    n_slots: int = 0
    kv_type: KvType | Literal[""] = ""
    gpus: tuple[str, ...] = ()
    split: Literal["auto", "layer", "tensor"] = "auto"
    n_gpu_layers: int = -1
    n_ubatch: int = 0
    kv_layout: KvLayout | Literal["auto"] = "auto"
    margin_bytes: int = 1 * GIB
    quant: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision: what is loaded, where each byte goes, and why. `tokens_per_s` is a forecast for one
    stream, None where it is not known."""

    model: str
    candidate: Candidate
    load: Load
    placement: Placement
    reasons: tuple[str, ...]
    tokens_per_s: float | None

    @property
    def n_batch(self) -> int:
        """The most tokens that one step computes."""
        return max(N_BATCH, self.load.n_ubatch)

    @property
    def split_mode(self) -> SplitMode:
        return self.placement.split_mode

    @property
    def visible_devices(self) -> tuple[str, ...]:
        """UUIDs of the GPUs in use, in the order of `placement.tensor_split`: the engine's process is to
        see these and no others, so that no other numbering can come between."""
        return tuple(gpu.uuid for gpu in self.placement.gpus)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON; sizes in bytes. `host` is what stays in RAM."""
        devices = [
            {"id": gpu.uuid, "name": gpu.name, **_figures(share), "free_bytes": gpu.free_bytes}
            for gpu, share in zip(self.placement.gpus, self.placement.shares, strict=True)
        ]
        return {
            "model": self.model,
            "file": self.candidate.file,
            "quant": self.candidate.quant,
            "fits": True,
            "context": self.load.n_ctx,
            "slots": self.load.n_slots,
            "kv_type": self.load.kv_type,
            "kv_layout": self.load.kv_layout,
            "split_mode": self.split_mode,
            "n_ubatch": self.load.n_ubatch,
            "devices": devices,
            "host": _figures(self.placement.host),
            "reasons": list(self.reasons),
            "forecast": {"prompt_tokens_per_s": None, "tokens_per_s": self.tokens_per_s},
        }


Found = tuple[Candidate, Load, Placement]


def plan(model: str, candidates: Sequence[Candidate], hardware: Hardware, wish: Wish | None = None) -> Plan:
    """Choose among the files of one model, given in any order, for this hardware.

    On GPUs the best quantization up to the Q6_K class that fits whole is taken, of the files that are here
    if one of them does. What gives way, in this order: the context down to 16k, the next lower
    quantization, the type of the cache where that saves more than it costs, the context down to 8k, the
    number of slots, layers to the CPU. On a CPU the Q4 class is preferred.

    Raises DoesNotFitError when nothing fits, UsageError for a wish that cannot be met on this hardware or
    with this model, ModelNotFoundError when no file has the wished quantization.
    """
    wish = wish or Wish()
    files = _wished_files(candidates, wish)
    gpus = _wished_gpus(hardware, wish)
    _check(wish, files, gpus, hardware)
    search = Search(hardware, _within(files[0].shape, wish), gpus)
    here = [c for c in files if c.is_local]
    found = (search.whole(here) if here and len(here) < len(files) else None) or search.any(files)
    if found is None:
        raise reasons.refusal(model, files, search.wish, search)
    candidate, load, place = found = search.faster(found)
    return Plan(
        model=model,
        candidate=candidate,
        load=load,
        placement=place,
        reasons=tuple(reasons.explain(found, files, wish, search)),
        tokens_per_s=_speed(candidate, place),
    )


class Search:
    """Tries files and loads on one hardware, the best first, until one fits."""

    def __init__(self, hardware: Hardware, wish: Wish, gpus: Sequence[Gpu]) -> None:
        self.hardware = hardware
        self.wish = wish
        self._chosen = tuple(gpus)
        self.gpus = [] if wish.n_gpu_layers == 0 else list(gpus)
        self.ram_bytes = max(hardware.ram.available_bytes - RAM_MARGIN_BYTES, 0)

    @property
    def available_bytes(self) -> int:
        """All that a model may take, on the GPUs and in RAM."""
        rooms = [max(g.free_bytes - self.wish.margin_bytes, 0) for g in self.gpus if not g.shares_ram]
        return self.ram_bytes + sum(rooms)

    def again(self, **changes: Any) -> Search:
        """The same search with another wish."""
        return Search(self.hardware, replace(self.wish, **changes), self._chosen)

    def with_all_gpus(self) -> Search:
        wish = replace(self.wish, gpus=())
        return Search(self.hardware, wish, _wished_gpus(self.hardware, wish))

    def any(self, files: Sequence[Candidate]) -> Found | None:
        """The best of all ways that there are."""
        if not self.gpus:
            return self._on_cpu(files)
        classes = prefer(files, aim=choice.Q6_CLASS)
        return (
            self.whole(files)
            or self._partly(classes.good[::-1])
            or self._whole_of(classes.poor)
            or self._partly((*classes.fair, *classes.poor))
            or self._as_small_as_can_be(files)
        )

    def whole(self, files: Sequence[Candidate]) -> Found | None:
        """The best way with every layer where it was wished: on the GPUs, or as many there as asked for."""
        if not self.gpus:
            return None
        classes = prefer(files, aim=choice.Q6_CLASS)
        return self._whole_of(classes.good) or self._whole_of(classes.fair)

    def place(self, candidate: Candidate, load: Load, *, n_gpus_most: int = N_GPUS_MOST) -> Placement | None:
        """The placement of a file, None when the GPUs or the RAM are too small for it."""
        margin, shape = self.wish.margin_bytes, candidate.shape
        if not self.gpus:
            found: Placement | None = placement.in_ram(shape, load)
        elif self.wish.split == "tensor":
            found = placement.across(shape, load, self.gpus, margin_bytes=margin)
        else:
            n = self.wish.n_gpu_layers
            found = placement.on_gpus(
                shape, load, self.gpus, margin_bytes=margin, n_gpu_layers=n, n_gpus_most=n_gpus_most
            )
        return found if found and found.ram_bytes <= self.ram_bytes else None

    def load(self, shape: ModelShape, *, n_ctx: int, n_slots: int, kv_type: KvType) -> Load:
        """A load with what was wished of its layout and its batches."""
        load = memory.load_of(shape, n_ctx=n_ctx, n_slots=n_slots, kv_type=kv_type)
        if shape.pooling:
            return load
        layout: KvLayout = "split" if self.wish.kv_layout == "split" else "shared"
        return replace(load, kv_layout=layout, n_ubatch=self.wish.n_ubatch or load.n_ubatch)

    def faster(self, found: Found) -> Found:
        """Spend what is left over on the GPUs in use: prompts read in larger batches, then, for who asked for
        slots and so serves many at a time, cells of its own for each, so that none has to look past those of
        the others."""
        candidate, load, place = found
        if candidate.shape.pooling or place.split_mode == "tensor" or not place.is_whole:
            return found
        if not self.wish.n_ubatch:
            for n_ubatch in N_UBATCH_FAST:
                found = self._if_there_is_plenty(found, replace(load, n_ubatch=n_ubatch))
        if self.wish.n_slots > 1 and self.wish.kv_layout == "auto":
            found = self._if_there_is_plenty(found, replace(found[1], kv_layout="split"))
        return found

    def _if_there_is_plenty(self, found: Found, load: Load) -> Found:
        """The same file with another load, where that takes no other GPUs and little of what is left over."""
        candidate, _, place = found
        other = self.place(candidate, load)
        if not other or len(other.gpus) != len(place.gpus) or not other.is_whole:
            return found
        n_left = sum(gpu.free_bytes for gpu in place.gpus) - place.gpu_bytes
        return (
            (candidate, load, other) if other.gpu_bytes - place.gpu_bytes <= SHARE_SPENT * n_left else found
        )

    def contexts(self, candidate: Candidate) -> list[int]:
        """Contexts that are worth a try, the largest first: as wished, else those of the ladder up to the
        length that the model was trained for."""
        if self.wish.n_ctx:
            return [self.wish.n_ctx]
        if candidate.shape.pooling:
            return _input_sizes(candidate.shape)
        n_train = candidate.shape.n_ctx_train
        sizes = {n for n in CTX_LADDER if n <= n_train}
        if n_train <= CTX_LADDER[0]:
            sizes.add(n_train)
        return sorted(sizes, reverse=True)

    def _whole_of(self, files: Sequence[Candidate]) -> Found | None:
        for load_of, is_long in self._ways():
            for candidate in files:
                if not _can_hold(candidate, load_of.kv_type):
                    continue
                for n_gpus_most in (1, N_GPUS_MOST):  # a longer context is not worth a second card
                    for n_ctx in self._sizes(candidate, is_long=is_long):
                        load = load_of(candidate.shape, n_ctx)
                        place = self.place(candidate, load, n_gpus_most=n_gpus_most)
                        if place:
                            return self._with_more_slots(candidate, load, place)
        return None

    def _sizes(self, candidate: Candidate, *, is_long: bool) -> list[int]:
        sizes = self.contexts(candidate)
        if is_long:
            return [n for n in sizes if n >= N_CTX_LONG] or sizes
        return [n for n in sizes if n >= N_CTX_LEAST][-1:] or sizes

    def _ways(self) -> Iterator[tuple[_LoadOf, bool]]:
        """What gives way, one after another, before a layer goes to the CPU."""
        n_slots = self.wish.n_slots or N_SLOTS_FIRST
        kv_types: tuple[KvType, ...] = (self.wish.kv_type,) if self.wish.kv_type else ("f16", "q8_0")
        for is_long in (True, False):
            for kv_type in kv_types:
                yield _LoadOf(self, n_slots, kv_type), is_long
        if not self.wish.n_slots:
            yield _LoadOf(self, 1, kv_types[0]), False

    def _with_more_slots(self, candidate: Candidate, load: Load, place: Placement) -> Found:
        """Slots from what is left over: they share one cache, so most models have them almost for free."""
        n = N_SLOTS_MOST
        while not self.wish.n_slots and n > load.n_slots:
            more = replace(load, n_slots=n)
            found = self.place(candidate, more)
            if found and len(found.gpus) == len(place.gpus):
                return candidate, more, found
            n //= 2
        return candidate, load, place

    def _partly(self, files: Sequence[Candidate], *, n_ctx: int = 0) -> Found | None:
        """As many layers on the GPUs as fit, the rest in RAM. The smallest good file comes first, since it
        leaves the fewest in RAM."""
        if self.wish.n_gpu_layers >= 0 or self.wish.split == "tensor":
            return None
        for candidate in files:
            for n_slots in (self.wish.n_slots,) if self.wish.n_slots else (N_SLOTS_CPU, 1):
                size = self.wish.n_ctx or n_ctx or N_CTX_LEAST
                load = self._load(candidate, size, n_slots)
                place = placement.most_on_gpus(
                    candidate.shape, load, self.gpus, margin_bytes=self.wish.margin_bytes
                )
                if place.ram_bytes <= self.ram_bytes:
                    return candidate, load, place
        return None

    def _as_small_as_can_be(self, files: Sequence[Candidate]) -> Found | None:
        classes = prefer(files, aim=choice.Q6_CLASS)
        for n_ctx in () if self.wish.n_ctx else CTX_LAST_RESORT:
            found = self._partly((*classes.good, *classes.fair, *classes.poor), n_ctx=n_ctx)
            if found:
                return found
        return None

    def _on_cpu(self, files: Sequence[Candidate]) -> Found | None:
        classes = prefer(files, aim=choice.Q4_CLASS)
        sizes = (self.wish.n_ctx,) if self.wish.n_ctx else (N_CTX_LEAST, *CTX_LAST_RESORT)
        slots = (self.wish.n_slots,) if self.wish.n_slots else (N_SLOTS_CPU, 4, 2, 1)
        if files[0].shape.pooling and not self.wish.n_slots:
            slots = (N_SLOTS_MOST, *slots)
        for n_ctx in sizes:
            for candidate in (*classes.good, *classes.fair, *classes.poor):
                for n_slots in slots:
                    load = self._load(candidate, n_ctx, n_slots)
                    place = self.place(candidate, load)
                    if place:
                        return candidate, load, place
        return None

    def _load(self, candidate: Candidate, n_ctx: int, n_slots: int) -> Load:
        """A load with the wished context, else with `n_ctx` or the most that is of use."""
        size = self.wish.n_ctx or min(n_ctx, self.contexts(candidate)[0], candidate.shape.n_ctx_train)
        kv_type: KvType = self.wish.kv_type or "f16"
        return self.load(candidate.shape, n_ctx=size, n_slots=n_slots, kv_type=kv_type)


@dataclass(frozen=True, slots=True)
class _LoadOf:
    """A load for any context."""

    search: Search
    n_slots: int
    kv_type: KvType

    def __call__(self, shape: ModelShape, n_ctx: int) -> Load:
        return self.search.load(shape, n_ctx=n_ctx, n_slots=self.n_slots, kv_type=self.kv_type)


def _input_sizes(shape: ModelShape) -> list[int]:
    """Longest inputs worth a try, the largest first. Where an input is read whole, llama.cpp hands out a row
    of the vocabulary's size for each of its tokens, which nobody reads."""
    sizes = {min(n, shape.n_ctx_train) for n in INPUT_LADDER}
    row_bytes = 4 * shape.n_vocab if shape.reads_whole else 0
    few = [n for n in sizes if n * row_bytes <= N_OUTPUT_BYTES_MOST]
    return sorted(few or [min(sizes)], reverse=True)


def _figures(share: placement.Share) -> dict[str, int]:
    return {**asdict(share), "total_bytes": share.total_bytes}


def _wished_files(candidates: Sequence[Candidate], wish: Wish) -> list[Candidate]:
    """In an order of their own, so that the order they came in has no say."""
    ordered = sorted(candidates, key=lambda c: (c.size_bytes, c.quant, not c.is_local, c.file))
    if not wish.quant:
        return ordered
    named = [c for c in ordered if c.quant.casefold() == wish.quant.casefold()]
    if not named:
        known = ", ".join(dict.fromkeys(c.quant for c in ordered))
        raise ModelNotFoundError(f"No file of the model is {wish.quant}.", hint=f"There are {known}.")
    return named


def _wished_gpus(hardware: Hardware, wish: Wish) -> list[Gpu]:
    """The usable GPUs that the wish names, all without one."""
    usable = [gpu for gpu in hardware.gpus if gpu.state == "ok"]
    if not wish.gpus:
        return usable
    chosen: list[Gpu] = []
    for name in wish.gpus:
        found = [g for g in hardware.gpus if name == str(g.index) or g.uuid.lower().startswith(name.lower())]
        if len(found) != 1:
            known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in usable) or "no GPU"
            raise UsageError(f"'{name}' does not name one GPU of this machine.", hint=f"It has {known}.")
        if found[0].state != "ok":
            raise UsageError(f"GPU {name} cannot be used: {found[0].problem or found[0].state}.")
        chosen += [gpu for gpu in found if gpu not in chosen]
    return chosen


def _within(shape: ModelShape, wish: Wish) -> Wish:
    """A context that is more than a model that embeds or ranks can read was wished for others, which chat."""
    return replace(wish, n_ctx=0) if shape.pooling and wish.n_ctx > shape.n_ctx_train else wish


def _check(wish: Wish, files: Sequence[Candidate], gpus: Sequence[Gpu], hardware: Hardware) -> None:
    """Refuse what no memory could make possible."""
    if not files:
        raise ModelNotFoundError("There is no file of this model to plan for.")
    if not gpus and wish.n_gpu_layers > 0:
        raise UsageError(f"No layer can go to a GPU. {hardware.reason}", hint="Leave --gpu-layers out.")
    if not 0 <= wish.n_slots <= N_SLOTS_MOST:
        raise UsageError(f"{wish.n_slots} slots are not between 1 and {N_SLOTS_MOST}.")
    if wish.n_ctx < 0:
        raise UsageError(f"A context of {wish.n_ctx} tokens is not possible.")
    shape = files[0].shape
    if wish.kv_type and not _can_hold(files[0], wish.kv_type):
        raise UsageError(
            f"A cache of the type {wish.kv_type} needs attention heads of a multiple of {KV_BLOCK} elements; "
            f"this model's have {shape.head_length}.",
            hint="Use --kv f16.",
        )
    if wish.split != "tensor":
        return
    if len(gpus) < 2:
        raise UsageError("A tensor split needs at least two GPUs.", hint="Use --split layer.")
    if shape.architecture in architectures.WITHOUT_TENSOR_SPLIT:
        raise UsageError(
            f"llama.cpp cannot split the tensors of the architecture '{shape.architecture}'.",
            hint="Use --split layer.",
        )
    if wish.kv_type not in ("", "f16"):
        raise UsageError("A tensor split needs the cache in f16.", hint="Use --kv f16 or --split layer.")
    if 0 <= wish.n_gpu_layers < shape.n_layer_all + 1:
        raise UsageError("A tensor split has all layers on the GPUs.", hint="Leave --gpu-layers out.")


def _can_hold(candidate: Candidate, kv_type: KvType) -> bool:
    """A quantized cache needs heads of whole blocks (llama.cpp src/llama-context.cpp)."""
    return kv_type == "f16" or candidate.shape.head_length % KV_BLOCK == 0


def _speed(candidate: Candidate, place: Placement) -> float | None:
    """Tokens per second of one stream, where all is read from GPUs that are known. Of a mixture of experts
    only the chosen ones are read for each token."""
    if not place.is_whole:
        return None
    shape = candidate.shape
    share = shape.active_bytes / max(shape.repeating_bytes + shape.output_bytes, 1)
    reads = [
        (gpu.name, round(part.weights_bytes * share))
        for gpu, part in zip(place.gpus, place.shares, strict=True)
    ]
    return forecast.tokens_per_s(reads, shape.n_layer, is_parallel=place.split_mode == "tensor")
