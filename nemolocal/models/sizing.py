"""Which file of a model, on which devices, with how much context: one pure decision with its reasons.

Nothing is guessed from parameter counts: weights, KV cache, recurrent state and buffers are added up layer
by layer (memory.py) and laid on the devices as llama.cpp would (placement.py), into what is free now. The
words for a decision and for a refusal are in reasons.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from nemolocal.hardware import Gpu, Hardware
from nemolocal.models import architectures, choice, memory, placement, reasons
from nemolocal.models import wish as wishes
from nemolocal.models.choice import Candidate, prefer
from nemolocal.models.learned import Learned
from nemolocal.models.memory import N_GPUS_MOST, KvLayout, KvType, Load
from nemolocal.models.placement import RAM_MARGIN_BYTES, Job, Placement
from nemolocal.models.plans import Bar, Plan, token_s
from nemolocal.models.shape import ModelShape
from nemolocal.models.wish import N_SLOTS_MOST, Wish

__all__ = ["GIB", "N_SLOTS_MOST", "Bar", "Candidate", "Plan", "Wish", "plan"]

GIB: Final = 1 << 30
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
N_SLOTS_CPU: Final = 8
N_SLOTS_FIRST: Final = 4
"""Slots that a model on a GPU gets before anything gives way; more are added from what is left over."""
GAIN_OF_TENSOR_SPLIT: Final = 1.2
"""How much faster an answer must be forecast to become for every matrix to be cut over cards: reading
prompts becomes slower."""
UNTRIED_IN_TENSOR_SPLIT: Final = frozenset({"deci"})
"""Layers without attention, with which nobody has run it; it has to be asked for."""

Found = tuple[Candidate, Load, Placement]


def plan(
    model: str,
    candidates: Sequence[Candidate],
    hardware: Hardware,
    wish: Wish | None = None,
    learned: Learned | None = None,
) -> Plan:
    """Choose among the files of one model, given in any order, for this hardware.

    On GPUs the best quantization that the aim goes up to and that fits whole is taken, of the files that are
    here if one of them does. What gives way, one on top of the other: the context down to 16k, the next
    lower quantization, the cache to q8_0 where that saves more than it costs, the context down to 8k (again
    with the best quantization that fits), the number of slots, experts to the RAM, layers to the CPU. On a
    CPU the Q4 class is preferred.

    More memory never takes a layer off the GPUs that a fair quantization had there, and on as many cards it
    never gives a lower quantization without a longer context, nor a shorter context without a higher
    quantization. What `learned` tells of earlier loads is used in place of the arithmetic.

    Raises DoesNotFitError when nothing fits, UsageError for a wish that cannot be met on this hardware or
    with this model, ModelNotFoundError when no file has the wished quantization.
    """
    wish, learned = wish or Wish(), learned or Learned()
    files = wishes.files(candidates, wish)
    gpus = wishes.gpus(hardware, wish)
    wishes.check(wish, files, gpus, hardware)
    search = Search(hardware, wishes.within(files[0].shape, wish), gpus, learned)
    here = [c for c in files if c.is_local]
    found = (search.whole(here) if here and len(here) < len(files) else None) or search.any(files)
    if found is None:
        raise reasons.refusal(model, files, search.wish, search)
    candidate, load, place = found = search.faster(search.cut_over_cards(search.longer(found)))
    seconds = token_s(candidate, place)
    return Plan(
        model=model,
        candidate=candidate,
        load=load,
        placement=place,
        reasons=tuple(reasons.explain(found, files, wish, search)),
        tokens_per_s=None if seconds is None else round(1 / seconds, 1),
        measured_tokens_per_s=learned.tokens_per_s.get(candidate.file),
        kept_bytes=wish.kept_bytes,
    )


class Search:
    """Tries files and loads on one hardware, the best first, until one fits."""

    def __init__(self, hardware: Hardware, wish: Wish, gpus: Sequence[Gpu], learned: Learned) -> None:
        self.hardware = hardware
        self.wish = wish
        self.learned = learned
        self._chosen = tuple(gpus)
        self.gpus = [] if wish.n_gpu_layers == 0 else list(gpus)
        self.ram_bytes = max(hardware.ram.available_bytes - RAM_MARGIN_BYTES, 0)
        self.aim_rank = (choice.AIMS if self.gpus else choice.CPU_AIMS)[wish.aim]

    @property
    def available_bytes(self) -> int:
        """All that a model may take, on the GPUs and in RAM."""
        rooms = [max(g.free_bytes - self.wish.kept_bytes, 0) for g in self.gpus if not g.shares_ram]
        return self.ram_bytes + sum(rooms)

    def again(self, **changes: Any) -> Search:
        """The same search with another wish."""
        return Search(self.hardware, replace(self.wish, **changes), self._chosen, self.learned)

    def with_all_gpus(self) -> Search:
        wish = replace(self.wish, gpus=())
        return Search(self.hardware, wish, wishes.gpus(self.hardware, wish), self.learned)

    def any(self, files: Sequence[Candidate]) -> Found | None:
        """The best of all ways that there are."""
        if not self.gpus:
            return self._on_cpu(files)
        classes = prefer(files, aim=self.aim_rank)
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
        classes = prefer(files, aim=self.aim_rank)
        return self._whole_of(classes.good) or self._whole_of(classes.fair)

    def job(self, candidate: Candidate, load: Load) -> Job:
        """What is to be placed, with what earlier loads have shown of this file."""
        return Job(
            candidate.shape,
            load,
            kept_bytes=self.wish.kept_bytes,
            overheads=self.learned.overhead_bytes,
            compute_ratio=self.learned.compute_ratios.get(candidate.file, 1.0),
        )

    def place(self, candidate: Candidate, load: Load, *, n_gpus_most: int = N_GPUS_MOST) -> Placement | None:
        """The placement of a file, None when the GPUs or the RAM are too small for it."""
        job = self.job(candidate, load)
        if not self.gpus:
            found: Placement | None = placement.in_ram(job)
        elif self.wish.split == "tensor":
            found = placement.across(job, self.gpus)
        else:
            n = self.wish.n_gpu_layers
            found = placement.on_gpus(job, self.gpus, n_gpu_layers=n, n_gpus_most=n_gpus_most)
        return found if found and found.ram_bytes <= self.ram_bytes else None

    def load(self, shape: ModelShape, *, n_ctx: int, n_slots: int, kv_type: KvType) -> Load:
        """A load with what was wished of its layout and its batches."""
        load = memory.load_of(shape, n_ctx=n_ctx, n_slots=n_slots, kv_type=kv_type)
        if shape.pooling:
            return load
        layout: KvLayout = "split" if self.wish.kv_layout == "split" else "shared"
        return replace(load, kv_layout=layout, n_ubatch=self.wish.n_ubatch or load.n_ubatch)

    # What is left over ---------------------------------------------------------------------------

    def longer(self, found: Found) -> Found:
        """Where not all is on GPUs: the longest context that sends nothing more to the RAM."""
        candidate, load, place = found
        if not place.gpus or place.is_whole or self.wish.n_gpu_layers >= 0:
            return found
        for n_ctx in self.contexts(candidate):
            if n_ctx <= load.n_ctx:
                break
            more = replace(load, n_ctx=n_ctx)
            other = placement.most_on_gpus(self.job(candidate, more), self.gpus)
            is_as_good = other.n_gpu_layers == place.n_gpu_layers
            is_as_good = is_as_good and len(other.host_experts) == len(place.host_experts)
            if is_as_good and other.ram_bytes <= self.ram_bytes:
                return candidate, more, other
        return found

    def cut_over_cards(self, found: Found) -> Found:
        """Every matrix cut over several cards, where they are of one kind and linked, and answers are
        forecast to come a good deal sooner for it."""
        candidate, load, place = found
        shape = candidate.shape
        refused = architectures.WITHOUT_TENSOR_SPLIT | UNTRIED_IN_TENSOR_SPLIT
        if self.wish.split != "auto" or shape.pooling or shape.architecture in refused:
            return found
        if not place.is_whole or load.kv_type != "f16" or shape.state_bytes:
            return found
        now = token_s(candidate, place)
        first = place.gpus[0]
        linked = [
            g for g in self.gpus if g.n_links and (g.name, g.total_bytes) == (first.name, first.total_bytes)
        ]
        n = 1 << (len(linked).bit_length() - 1) if linked else 0
        while n > 1 and any(layer.n_embd_k_gqa // max(shape.head_length, 1) % n for layer in shape.layers):
            n //= 2
        if now is None or n < 2:
            return found
        other = placement.across(self.job(candidate, load), sorted(linked, key=lambda g: g.uuid)[:n])
        then = token_s(candidate, other) if other and other.ram_bytes <= self.ram_bytes else None
        if other is None or then is None or now / then < GAIN_OF_TENSOR_SPLIT:
            return found
        return candidate, load, other

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

    # Every layer where it was wished -------------------------------------------------------------

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
        """The first that fits of what gives way one after another, before anything goes to the RAM. `files`
        are of one class, the best first. A card more is only taken where one alone does not hold the file
        with a context that is long enough."""
        for candidate, load, sizes in self._ways(files):
            for n_gpus_most in (1, N_GPUS_MOST) if len(self.gpus) > 1 else (1,):
                found = self._with_longest(candidate, load, sizes, n_gpus_most)
                if found:
                    return self._with_more_slots(*found)
        return None

    def _with_longest(
        self, candidate: Candidate, load: Load, sizes: Sequence[int], n_gpus_most: int
    ) -> Found | None:
        """The longest of these contexts that fits; they are the longest first."""

        def fit(n_ctx: int) -> Found | None:
            # A model that reads its inputs whole takes the longest in one batch.
            n_ubatch = n_ctx if candidate.shape.reads_whole else load.n_ubatch
            tried = replace(load, n_ctx=n_ctx, n_ubatch=n_ubatch)
            place = self.place(candidate, tried, n_gpus_most=n_gpus_most)
            return (candidate, tried, place) if place else None

        shortest = fit(sizes[-1])
        if shortest is None:
            return None
        return next((found for n_ctx in sizes[:-1] if (found := fit(n_ctx))), shortest)

    def _ways(self, files: Sequence[Candidate]) -> Iterator[tuple[Candidate, Load, list[int]]]:
        """(file, load, contexts worth a try with it). No way comes before one that is better both in its
        quantization and its context, so that more memory never gives less."""
        kv_type, n_slots = self.wish.kv_type or "f16", self.wish.n_slots or N_SLOTS_FIRST

        def way(
            file: Candidate, kv: KvType, sizes: list[int], n: int = n_slots
        ) -> tuple[Candidate, Load, list[int]]:
            return file, self.load(file.shape, n_ctx=sizes[0], n_slots=n, kv_type=kv), sizes

        for file in files:
            yield way(file, kv_type, self._long(file))
        smallest = files[-1:] if not self.wish.kv_type else ()
        for file in smallest:
            if wishes.can_hold(file.shape, "q8_0"):
                yield way(file, "q8_0", self._long(file)[-1:])
        for file in files:
            yield way(file, kv_type, self._short(file))
        for file in smallest:
            if wishes.can_hold(file.shape, "q8_0"):
                yield way(file, "q8_0", self._short(file))
        for file in files[-1:] if not self.wish.n_slots else ():
            yield way(file, kv_type, self._short(file), 1)

    def _long(self, candidate: Candidate) -> list[int]:
        sizes = self.contexts(candidate)
        return [n for n in sizes if n >= N_CTX_LONG] or sizes

    def _short(self, candidate: Candidate) -> list[int]:
        sizes = self.contexts(candidate)
        return [n for n in sizes if n >= N_CTX_LEAST][-1:] or sizes

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

    # With the CPU's help -------------------------------------------------------------------------

    def _partly(self, files: Sequence[Candidate], *, n_ctx: int = 0) -> Found | None:
        """As much on the GPUs as fits, the rest in RAM. The smallest good file comes first, since it leaves
        the least in RAM."""
        if self.wish.n_gpu_layers >= 0 or self.wish.split == "tensor":
            return None
        for candidate in files:
            for n_slots in (self.wish.n_slots,) if self.wish.n_slots else (N_SLOTS_CPU, 1):
                size = self.wish.n_ctx or n_ctx or N_CTX_LEAST
                load = self._load(candidate, size, n_slots)
                place = placement.most_on_gpus(self.job(candidate, load), self.gpus)
                if place.ram_bytes <= self.ram_bytes:
                    return candidate, load, place
        return None

    def _as_small_as_can_be(self, files: Sequence[Candidate]) -> Found | None:
        classes = prefer(files, aim=self.aim_rank)
        for n_ctx in () if self.wish.n_ctx else CTX_LAST_RESORT:
            found = self._partly((*classes.good, *classes.fair, *classes.poor), n_ctx=n_ctx)
            if found:
                return found
        return None

    def _on_cpu(self, files: Sequence[Candidate]) -> Found | None:
        classes = prefer(files, aim=self.aim_rank)
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


def _input_sizes(shape: ModelShape) -> list[int]:
    """Longest inputs worth a try, the largest first. Where an input is read whole, llama.cpp hands out a row
    of the vocabulary's size for each of its tokens, which nobody reads."""
    sizes = {min(n, shape.n_ctx_train) for n in INPUT_LADDER}
    row_bytes = 4 * shape.n_vocab if shape.reads_whole else 0
    few = [n for n in sizes if n * row_bytes <= N_OUTPUT_BYTES_MOST]
    return sorted(few or [min(sizes)], reverse=True)
