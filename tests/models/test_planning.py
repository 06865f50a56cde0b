"""From a reference to a plan."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from nemolocal import config
from nemolocal.errors import DoesNotFitError, ModelFileError, ModelNotFoundError, OfflineError, UsageError
from nemolocal.models import catalog, gguf, memory, placement, planning, reference
from tests import synthetic, synthetic_embedders
from tests.profiles import machine

LAPTOP = machine(ram_gib=12)
DESKTOP = machine(("NVIDIA GeForce RTX 4090", 24))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return synthetic.write_tiny(tmp_path / "tiny.gguf")


def test_model_of_the_catalogue_is_planned_before_it_is_here() -> None:
    plan = planning.plan("nemotron-3-nano-4b", config.load(), DESKTOP)
    assert plan.placement.is_whole
    assert not plan.candidate.is_local
    assert planning.plan("nemotron-3-nano-4b:q8_0", config.load(), DESKTOP).candidate.quant == "Q8_0"


def test_file_by_its_path(tiny: Path) -> None:
    plan = planning.plan(str(tiny), config.load(), LAPTOP)
    assert plan.candidate.file == str(tiny)
    assert not plan.visible_devices


def test_file_that_is_here_stands_in_for_the_catalogues_row(tiny: Path) -> None:
    settings = config.load()
    folder = settings.models_dir / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    shutil.copy(tiny, folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    [found] = planning.candidates(reference.parse("starter"), settings)
    assert found.is_local
    assert found.size_bytes == tiny.stat().st_size


def test_wishes_come_from_the_settings(tiny: Path) -> None:
    flags = {"ctx": 512, "slots": 3, "kv": "q8_0", "margin_mib": 2048}
    wish = planning.wish(config.load(flags))
    assert (wish.n_ctx, wish.n_slots, wish.kv_type, wish.margin_bytes) == (512, 3, "q8_0", 2 << 30)
    assert planning.wish(config.load()).kv_type == ""
    plan = planning.plan(str(tiny), config.load({"ctx": 512, "slots": 3}), LAPTOP)
    assert (plan.load.n_ctx, plan.load.n_slots) == (512, 3)


def test_what_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        planning.plan("no-such-model", config.load(), LAPTOP)
    with pytest.raises(OfflineError):  # its header would have to be read on the hub
        planning.plan("hf:nobody/nothing", config.load({"offline": True}), LAPTOP)
    (tmp_path / "text.gguf").write_text("hello")
    for name in ("text.gguf", "missing.gguf"):
        with pytest.raises(ModelFileError):
            planning.plan(str(tmp_path / name), config.load(), LAPTOP)


def test_a_draft_model_has_its_room_beside_the_model(tiny: Path, tmp_path: Path) -> None:
    """On a GPU; the plan says how much, and a draft model that is not here is said."""
    small = synthetic.write_tiny(tmp_path / "small.gguf")
    both = planning.plan(str(tiny), config.load({"draft": str(small)}), DESKTOP)
    assert "kept there for the draft model and adapters" in both.reasons[-1]
    assert both.load.n_ctx == planning.plan(str(tiny), config.load(), DESKTOP).load.n_ctx
    hybrid = synthetic.write_tiny(tmp_path / "hybrid.gguf", "nemotron_h")
    plan = planning.plan(str(hybrid), config.load({"draft": str(small)}), DESKTOP)
    assert plan.kept_bytes == 1 << 30
    assert plan.reasons[-1] == "small does not guess for this model, which cannot take a guess back."
    with pytest.raises(ModelFileError):
        planning.plan(str(tiny), config.load({"draft": str(tmp_path / "none.gguf")}), DESKTOP)


def test_the_room_for_a_draft_model_is_what_it_takes_with_the_planned_context(
    tiny: Path, tmp_path: Path
) -> None:
    """In the model's own process, so that what CUDA takes there is not counted twice."""
    small = synthetic.write_tiny(tmp_path / "small.gguf")
    both = planning.plan(str(tiny), config.load({"draft": str(small)}), DESKTOP)
    needed = placement.needed_bytes(placement.Job(gguf.read(small).shape, both.load))
    assert both.kept_bytes == (1 << 30) + needed - memory.CUDA_CONTEXT_BYTES


def test_what_does_not_fit_beside_a_draft_model_is_told_so(tiny: Path, tmp_path: Path) -> None:
    small = synthetic.write_tiny(tmp_path / "small.gguf")
    flags = {"ctx": 512, "slots": 1, "gpu_layers": 99}

    def try_plan(free_bytes: int, **more: str) -> DoesNotFitError | None:
        hardware = machine(("NVIDIA GeForce RTX 4090", 24))
        card = replace(hardware.gpus[0], free_bytes=free_bytes)
        try:
            planning.plan(str(tiny), config.load({**flags, **more}), replace(hardware, gpus=(card,)))
        except DoesNotFitError as error:
            return error
        return None

    enough = next(free for free in range(1 << 30, 2 << 30, 1 << 20) if not try_plan(free))
    error = try_plan(enough, draft=str(small))
    assert error is not None
    assert error.hint == "It would fit without --draft and --lora."
    assert try_plan(enough + (1 << 30), draft=str(small)) is None


def test_a_model_that_writes_no_text_cannot_guess(tiny: Path, tmp_path: Path) -> None:
    """llama.cpp would abort at the first guess."""
    embedder = synthetic_embedders.write(tmp_path / "embedder.gguf", "bert")
    with pytest.raises(UsageError, match="embedder embeds or ranks texts, and guesses none"):
        planning.plan(str(tiny), config.load({"draft": str(embedder)}), DESKTOP)


def test_a_model_too_large_names_a_smaller_one_of_its_family_that_fits() -> None:
    with pytest.raises(DoesNotFitError, match=r"nemotron-3-nano-4b is smaller, of the same family, and fits"):
        planning.plan("nemotron-3-super-120b-a12b", config.load(), machine(ram_gib=12))
    with pytest.raises(DoesNotFitError) as caught:  # nothing smaller is known
        planning.plan("starter", config.load(), machine(ram_gib=0.6))
    assert "family" not in str(caught.value)


def test_adapters_have_their_room_beside_the_model(tmp_path: Path) -> None:
    adapter = tmp_path / "style.gguf"
    adapter.write_bytes(bytes(3 << 20))
    ref = "nemotron-3-nano-4b"
    plain = planning.plan(ref, config.load(), DESKTOP)
    made = planning.plan(ref, config.load({"lora": (f"{adapter}:0.5",)}), DESKTOP)
    assert made.kept_bytes == plain.kept_bytes + (3 << 20)


def test_what_does_not_fit_names_the_largest_smaller_model_of_its_family_that_does() -> None:
    small = machine(("NVIDIA GeForce RTX 3060", 12), ram_gib=8)
    with pytest.raises(DoesNotFitError) as caught:
        planning.plan("nemotron-3-super-120b-a12b", config.load(), small)
    ref = reference.parse("nemotron-3-super-120b-a12b")
    smaller = planning.smaller_that_fits(ref, config.load(), small)
    assert smaller is not None
    assert f"{smaller.model} is smaller, of the same family, and fits." in caught.value.hint
    known = catalog.load()
    large, found = known.get("nemotron-3-super-120b-a12b"), known.get(smaller.model)
    assert large is not None
    assert found is not None
    for model in known.smaller_ones(large):
        if model.n_params > found.n_params:
            with pytest.raises(DoesNotFitError):
                planning.plan(model.id, config.load(), small)
    assert planning.smaller_that_fits(reference.parse("starter"), config.load(), small) is None
