"""What holds of every plan, on random machines and models: nothing is overfilled, more memory never gives
less, the order of files and cards has no say, and the search stays small."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import pytest

from nemolocal.errors import DoesNotFitError, UsageError
from nemolocal.hardware import Cpu, Gpu, Hardware, Ram
from nemolocal.models import catalog, packing, placement
from nemolocal.models.choice import CPU_AIMS, GOOD, Candidate, prefer
from nemolocal.models.choice import FAIR as POOR_BELOW
from nemolocal.models.search import N_CTX_LONG, N_CTX_WORTH_A_CARD, N_SLOTS_FIRST
from nemolocal.models.shape import LayerKind, LayerShape, ModelShape
from nemolocal.models.sizing import GIB, Plan, Wish, plan

N_MACHINES = 2000
CARDS = ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090", "NVIDIA H200", "X")
QUANTS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.85, "IQ4_XS": 4.3, "Q3_K_M": 3.8, "Q2_K": 2.9}


@dataclass
class Case:
    rng: random.Random
    files: list[Candidate]
    hardware: Hardware

    @cached_property
    def plan(self) -> Plan | None:
        return try_plan(self.files, self.hardware)


@cache
def cases() -> list[Case]:
    rngs = [random.Random(seed) for seed in range(N_MACHINES)]
    return [
        Case(rng, of_catalog(rng.choice(catalog_ids())) if rng.random() < 0.4 else made_up(rng), machine(rng))
        for rng in rngs
    ]


@cache
def catalog_ids() -> tuple[str, ...]:
    return tuple(model.id for model in catalog.load().models)


def of_catalog(model_id: str) -> list[Candidate]:
    model = catalog.load().get(model_id)
    assert model is not None
    return [Candidate(row.quant, row.quant, row.bytes, model.shape(row), False) for row in model.files]


def made_up(rng: random.Random) -> list[Candidate]:
    """A dense, sparse or recurrent model with layers of very unlike sizes, as some files of it."""
    n_layer = rng.choice([8, 24, 48, 80])
    n_params = rng.choice([1e9, 4e9, 12e9, 30e9, 70e9, 250e9]) * rng.uniform(0.7, 1.3)
    weights = [rng.choice([1, 1, 1, 0.1, 4]) for _ in range(n_layer)]
    kinds = [rng.choice([LayerKind.ATTENTION, LayerKind.RECURRENT, LayerKind.MOE]) for _ in range(n_layer)]
    n_row, n_ctx_train = rng.choice([256, 1024, 4096]), rng.choice([4096, 32_768, 131_072])
    files = []
    for quant in rng.sample(sorted(QUANTS), rng.randint(1, len(QUANTS))):
        n_bytes = n_params * QUANTS[quant] / 8
        layers = []
        for weight, kind in zip(weights, kinds, strict=True):
            own = round(n_bytes * weight / sum(weights))
            rows = n_row if kind is LayerKind.ATTENTION else 0
            state = 2_000_000 if kind is LayerKind.RECURRENT else 0
            expert = own * 9 // 10 if kind is LayerKind.MOE else 0
            layers.append(LayerShape(kind, own, rows, rows, state, expert))
        shape = ModelShape(
            architecture="llama",
            n_ctx_train=n_ctx_train,
            n_embd=4096,
            n_vocab=128_000,
            layers=tuple(layers),
            input_bytes=200_000_000,
            output_bytes=200_000_000,
            n_head_max=32,
            n_activations_max=30_000,
            head_length=128,
            n_params=round(n_params),
            n_expert=64,
            n_expert_used=6,
        )
        files.append(Candidate(quant, f"{quant}.gguf", round(n_bytes), shape, rng.random() < 0.2))
    return files


def machine(rng: random.Random) -> Hardware:
    """With none to nine cards, now and then slices that MIG has cut beside or in place of them, or one GPU
    without memory of its own."""
    total = round(rng.choice([8, 16, 32, 64, 128, 512]) * GIB)
    ram = Ram(total, round(total * 0.8))
    cards = [card(rng, index) for index in range(rng.choice([0, 1, 1, 1, 2, 2, 3, 4, 9]))]
    if rng.random() < 0.1:
        cards += [card(rng, 0, is_slice=True) for _ in range(rng.choice([1, 2, 7]))]
    if rng.random() < 0.05:
        fields = {"total_bytes": ram.total_bytes, "free_bytes": ram.available_bytes, "shares_ram": True}
        cards = [replace(card(rng, 0), **fields)]
    reason = "" if cards else "There is no GPU."
    return Hardware("gpu" if cards else "cpu", reason, tuple(cards), Cpu("a CPU", 8), ram)


def card(rng: random.Random, index: int, *, is_slice: bool = False) -> Gpu:
    total = round(rng.choice([6, 8, 12, 16, 24, 48, 96, 140]) * GIB)
    free = round(total * rng.uniform(0.1, 1))
    uuid = f"{'MIG' if is_slice else 'GPU'}-{rng.randrange(1 << 32):08x}"
    name, n_links = rng.choice(CARDS), rng.choice([0, 0, 18])
    return Gpu(index, uuid, name, "8.9", total, free, is_slice=is_slice, n_links=n_links)


def try_plan(files: list[Candidate], hardware: Hardware, wish: Wish | None = None) -> Plan | None:
    try:
        return plan("m", files, hardware, wish)
    except DoesNotFitError:
        return None


def check(made: Plan, hardware: Hardware) -> None:
    place, shape = made.placement, made.candidate.shape
    for gpu, share in zip(place.gpus, place.shares, strict=True):
        assert share.total_bytes + made.kept_bytes <= gpu.free_bytes
    assert place.ram_bytes <= hardware.ram.available_bytes
    if place.split_mode != "tensor":
        held = sum(s.weights_bytes for s in (*place.shares, place.host))
        tied = shape.output_bytes if shape.is_tied and not place.gpus else 0
        assert held + tied == shape.input_bytes + shape.repeating_bytes + shape.output_bytes
    for bar in made.bars(hardware):
        assert all(n > 0 for _, n in bar.parts)
        assert sum(n for _, n in bar.parts) == bar.total_bytes
    assert sum(bar.total_bytes for bar in made.bars(hardware)[:-1]) == sum(
        gpu.total_bytes for gpu in hardware.gpus if not gpu.shares_ram
    )


def with_more(rng: random.Random, hardware: Hardware) -> Hardware:
    """The same machine with more free on some of its devices."""
    ram = hardware.ram
    left = ram.total_bytes - ram.available_bytes
    ram = Ram(ram.total_bytes, ram.available_bytes + round(left * rng.random()))

    def more(gpu: Gpu) -> Gpu:
        if gpu.shares_ram:
            return replace(gpu, free_bytes=ram.available_bytes)
        return replace(
            gpu, free_bytes=gpu.free_bytes + round((gpu.total_bytes - gpu.free_bytes) * rng.random())
        )

    return replace(hardware, gpus=tuple(map(more, hardware.gpus)), ram=ram)


def standing(made: Plan, hardware: Hardware) -> tuple[float, ...]:
    """What `sizing.plan` promises never to fall where there is more memory."""
    candidate, load, place = made.candidate, made.load, made.placement
    n_ctx = min(load.n_ctx, N_CTX_WORTH_A_CARD)
    if not hardware.gpus:
        order = prefer([candidate], aim=CPU_AIMS["balanced"])
        return load.n_ctx, bool(order.good), bool(order.fair), candidate.size_bytes, load.n_slots
    if place.is_whole and candidate.rank >= POOR_BELOW:
        is_long = load.n_ctx >= min(N_CTX_LONG, candidate.shape.n_ctx_train)
        way = (is_long, load.kv_type == "f16") if load.n_slots >= N_SLOTS_FIRST else (-1, 0)
        return 4, candidate.is_local, candidate.rank >= GOOD, *way, candidate.size_bytes, n_ctx
    if place.is_whole:
        return 1, candidate.is_local, 2, candidate.size_bytes, n_ctx
    if candidate.rank >= GOOD and load.n_ctx >= min(8192, candidate.shape.n_ctx_train):
        return 1, candidate.is_local, 3
    return 1, candidate.is_local, 1, min(n_ctx, 8192), candidate.rank >= POOR_BELOW


def is_left_with_less(after: Plan, before: Plan) -> bool:
    """Whether of two plans that keep a part of the model in RAM one has less of it on GPUs, a shorter context
    or reads in smaller batches, and has more of nothing."""
    (place, *rest), (earlier, *others) = (
        (
            (made.placement.n_gpu_layers, -len(made.placement.host_experts)),
            made.load.n_ctx,
            made.load.n_ubatch,
        )
        for made in (after, before)
    )
    is_no_better = place <= earlier and all(a <= b for a, b in zip(rest, others, strict=True))
    return is_no_better and (place, rest) != (earlier, others)


def is_less(after: Plan, before: Plan) -> bool:
    """Whether a plan gives less than another in its quantization or its context, and more in neither."""
    pairs = (
        (after.candidate.size_bytes, before.candidate.size_bytes),
        (min(after.load.n_ctx, N_CTX_WORTH_A_CARD), min(before.load.n_ctx, N_CTX_WORTH_A_CARD)),
    )
    return any(a < b for a, b in pairs) and not any(a > b for a, b in pairs)


def test_no_plan_overfills_and_the_same_input_gives_the_same() -> None:
    n_made = 0
    for case in cases():
        made, files, gpus = case.plan, case.files, case.hardware.gpus
        if made is None:
            continue
        n_made += 1
        check(made, case.hardware)
        swapped = replace(case.hardware, gpus=tuple(case.rng.sample(gpus, len(gpus))))
        assert plan("m", case.rng.sample(files, len(files)), swapped).to_dict() == made.to_dict()
    assert n_made > N_MACHINES // 3


def wished(rng: random.Random) -> Wish:
    return Wish(
        n_ctx=rng.choice([0, 0, 1000, 8192, 50_000, 200_000]),
        n_slots=rng.choice([0, 0, 1, 7, 32]),
        kv_type=rng.choice(["", "", "f16", "q8_0", "q4_0"]),
        split=rng.choice(["auto", "auto", "layer", "tensor"]),
        n_gpu_layers=rng.choice([-1, -1, -1, 0, 1, 10, 200]),
        n_ubatch=rng.choice([0, 0, 64, 2048]),
        kv_layout=rng.choice(["auto", "shared", "split"]),
        margin_bytes=rng.choice([0, GIB, 3 * GIB]),
        beside_bytes=rng.choice([0, 0, GIB]),
        aim=rng.choice(["balanced", "quality", "speed"]),
    )


def test_what_is_wished_is_kept_or_refused_and_overfills_nothing() -> None:
    n_made = 0
    for case in cases()[: N_MACHINES // 2]:
        wish = wished(case.rng)
        try:
            made = plan("m", case.files, case.hardware, wish)
        except (DoesNotFitError, UsageError) as error:
            if not all(text.endswith(".") and "\n" not in text for text in (error.message, error.hint)):
                raise
            continue
        n_made += 1
        check(made, case.hardware)
        load, place = made.load, made.placement
        if made.candidate.shape.pooling:
            continue  # what was wished for models that chat
        assert load.n_ctx == wish.n_ctx or not wish.n_ctx
        assert load.n_slots == wish.n_slots or not wish.n_slots
        assert load.kv_type == wish.kv_type or not wish.kv_type
        assert load.n_ubatch == wish.n_ubatch or not wish.n_ubatch
        assert wish.kv_layout in ("auto", load.kv_layout)
        assert place.split_mode == "tensor" or wish.split != "tensor"
        if wish.n_gpu_layers >= 0 and case.hardware.gpus:
            assert place.n_gpu_layers == min(wish.n_gpu_layers, made.candidate.shape.n_layer_all + 1)
    assert n_made > N_MACHINES // 8


def test_more_memory_never_gives_less() -> None:
    n_whole = n_better = 0
    for case in cases():
        before = case.plan
        if before is None:
            continue
        hardware = with_more(case.rng, case.hardware)
        after = try_plan(case.files, hardware)
        assert after is not None, before.to_dict()
        then, now = standing(before, case.hardware), standing(after, hardware)
        assert now >= then, (then, now, before.to_dict(), after.to_dict())
        n_better += now > then
        if now == then and now[2:] == (3,):
            assert not is_left_with_less(after, before), (before.to_dict(), after.to_dict())
        if before.placement.is_whole and after.placement.is_whole and not before.candidate.is_local:
            n_whole += 1
            assert after.candidate.is_local or not is_less(after, before), (before.to_dict(), after.to_dict())
    assert n_whole > N_MACHINES // 5
    assert n_better > N_MACHINES // 20


@pytest.mark.parametrize("aim", ["quality", "balanced", "speed"])
def test_aims_rise_from_speed_to_quality(aim: str) -> None:
    most = {"speed": 4.9, "balanced": 6.7, "quality": 16.0}[aim]
    for case in cases()[:200]:
        made = try_plan(case.files, case.hardware, Wish(aim=aim))  # type: ignore[arg-type]
        if made is None or made.candidate.is_local:
            continue
        # A file above the aim is only taken where it costs no more than one within it, or alone is there.
        within = [c for c in case.files if c.rank <= most]
        if made.candidate.rank > most and within:
            assert made.candidate.size_bytes <= 1.02 * max(c.size_bytes for c in within)


def test_the_search_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placements tried for one plan; each takes a fraction of a millisecond."""
    n_tried = 0

    class Counted(packing.Runs):
        def __init__(self, costs: Sequence[int]) -> None:
            nonlocal n_tried
            n_tried += 1
            super().__init__(costs)

    monkeypatch.setattr(placement, "Runs", Counted)
    most = 0
    for case in cases()[:300]:
        n_tried = 0
        try_plan(case.files, case.hardware)
        most = max(most, n_tried)
    assert 10 < most < 300
