"""What gives way where a model does not fit: files, contexts, caches, slots, experts and layers, tried one
after the other until a way is found.

Pure. Which file is better is for choice.py to say, what a load takes for memory.py, and where it goes for
placement.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from nemolocal.hardware import Gpu, Hardware, Holder
from nemolocal.models import choice, memory, placement, tensor_split
from nemolocal.models import wish as wishes
from nemolocal.models.choice import Candidate, prefer
from nemolocal.models.learned import Learned
from nemolocal.models.memory import KvLayout, KvType, Load
from nemolocal.models.placement import RAM_MARGIN_BYTES, Job, Placement
from nemolocal.models.shape import ModelShape
from nemolocal.models.wish import N_SLOTS_MOST, Wish

CTX_LADDER: Final = (131_072, 65_536, 32_768, 16_384, 8_192)
N_CTX_LONG: Final = 16_384
"""Down to this, a smaller context is a lesser loss than a lower quantization."""
N_CTX_LEAST: Final = 8_192
"""Below this only when nothing else fits."""
N_CTX_WORTH_A_CARD: Final = 65_536
"""Up to this, a longer context is worth one more card."""
CTX_LAST_RESORT: Final = (4_096, 2_048)
INPUT_LADDER: Final = (8_192, 4_096, 2_048, 1_024, 512)
"""Longest inputs of models that embed or rank, where nothing is wished."""
N_OUTPUT_BYTES_MOST: Final = 2 << 30
"""What the rows that llama.cpp hands out for each token of such an input may take, wishes apart."""
N_SLOTS_CPU: Final = 8
N_SLOTS_FIRST: Final = 4
"""Slots that a model on a GPU gets before anything gives way; more are added from what is left over."""

Found = tuple[Candidate, Load, Placement]


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

    def with_all_gpus(self) -> list[Search]:
        """The same without the wish for certain GPUs, on each group of those that there are."""
        wish = replace(self.wish, gpus=())
        groups = wishes.groups(self.hardware, wish)
        return [Search(self.hardware, wish, group, self.learned) for group in groups]

    def without(self, holder: Holder) -> Search:
        """The same search as if a program had ended and given its memory back."""
        freed = [
            replace(
                gpu,
                free_bytes=min(
                    gpu.free_bytes + sum(h.used_bytes for h in gpu.holders if h.pid == holder.pid),
                    gpu.total_bytes,
                ),
            )
            for gpu in self._chosen
        ]
        return Search(self.hardware, self.wish, freed, self.learned)

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
            compute_ratio=self.learned.compute_ratio(candidate.file, load),
        )

    def place(self, candidate: Candidate, load: Load, among: Sequence[Gpu] | None = None) -> Placement | None:
        """The placement of a file on these GPUs (None: all), None when they or the RAM are too small."""
        job, gpus = self.job(candidate, load), self.gpus if among is None else among
        if not self.gpus:
            found: Placement | None = placement.in_ram(job)
        elif self.wish.split == "tensor":
            found = tensor_split.across(job, gpus)
        else:
            found = placement.on_gpus(job, gpus, n_gpu_layers=self.wish.n_gpu_layers)
        return found if found and found.ram_bytes <= self.ram_bytes else None

    def load(self, shape: ModelShape, *, n_ctx: int, n_slots: int, kv_type: KvType) -> Load:
        """A load with what was wished of its layout and its batches."""
        load = memory.load_of(shape, n_ctx=n_ctx, n_slots=n_slots, kv_type=kv_type)
        if shape.pooling:
            return load
        layout: KvLayout = "split" if self.wish.kv_layout == "split" else "shared"
        return replace(load, kv_layout=layout, n_ubatch=self.wish.n_ubatch or load.n_ubatch)

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
        are of one class, the best first."""
        for candidate, load, sizes in self._ways(files):
            found = self._with_longest(candidate, load, sizes)
            if found:
                return self._on_fewest_cards(found, sizes)
        return None

    def _with_longest(
        self, candidate: Candidate, load: Load, sizes: Sequence[int], among: Sequence[Gpu] | None = None
    ) -> Found | None:
        """The longest of these contexts that fits; they are the longest first."""

        def fit(n_ctx: int) -> Found | None:
            # A model that reads its inputs whole takes the longest in one batch.
            n_ubatch = n_ctx if candidate.shape.reads_whole else load.n_ubatch
            tried = replace(load, n_ctx=n_ctx, n_ubatch=n_ubatch)
            place = self.place(candidate, tried, among)
            return (candidate, tried, place) if place else None

        shortest = fit(sizes[-1])
        if shortest is None:
            return None
        return next((found for n_ctx in sizes[:-1] if (found := fit(n_ctx))), shortest)

    def _on_fewest_cards(self, found: Found, sizes: Sequence[int]) -> Found:
        """The same on as few cards as hold a context that is worth having more of them, and then the longest
        that goes there: the fastest card that does, where one does."""
        candidate, load, _ = found
        if len(self.gpus) < 2 or self.wish.split == "tensor":
            return found
        worth = [n for n in sizes if min(load.n_ctx, N_CTX_WORTH_A_CARD) <= n <= load.n_ctx]
        fewest = self._with_longest(candidate, load, worth[-1:])
        return self._with_longest(candidate, load, worth, fewest[2].gpus) or found if fewest else found

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

    # With the CPU's help -------------------------------------------------------------------------

    def _partly(self, files: Sequence[Candidate], *, n_ctx: int = 0) -> Found | None:
        """As much on the GPUs as fits, the rest in RAM. The smallest good file comes first, since it leaves
        the least in RAM."""
        if self.wish.n_gpu_layers >= 0 or self.wish.split == "tensor":
            return None
        for candidate in files:
            shape = candidate.shape
            if shape.input_bytes + shape.repeating_bytes > self.available_bytes:
                continue
            load = self._load(candidate, n_ctx or N_CTX_LEAST, self.wish.n_slots or 1)
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
