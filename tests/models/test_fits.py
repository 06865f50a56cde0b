"""Grades as an expert gives them: green where a model simply runs, amber where something suffers."""

from __future__ import annotations

import pytest

from nemolocal import config
from nemolocal.models import fits, overview
from tests.profiles import machine

CARD_12 = machine(("NVIDIA GeForce RTX 3060", 12), ram_gib=26)
LAPTOP = machine(ram_gib=11)


@pytest.mark.parametrize(
    ("model", "hardware", "grade", "words"),
    [
        ("llama-3.1-nemotron-nano-8b", CARD_12, "green", "Q6_K, 32k"),
        ("nemotron-3-nano-30b-a3b", CARD_12, "amber", "experts in RAM"),
        ("llama-3.3-nemotron-super-49b", CARD_12, "amber", "of 80 layers"),
        ("nemotron-3-super-120b-a12b", CARD_12, "red", "does not fit"),
        ("llama-3.1-nemotron-51b", CARD_12, "amber", "CPU helps"),
        ("nemotron-3-nano-4b", LAPTOP, "amber", "Q4_K_M, 8k, CPU"),
        ("nemotron-mini-4b", CARD_12, "green", "Q6_K, 4k"),  # all that it was trained for
    ],
)
def test_grades(model: str, hardware: object, grade: str, words: str) -> None:
    found = fits.fit(model, config.load(), hardware)  # type: ignore[arg-type]
    assert found.grade == grade
    assert words in found.words
    assert found.why.count("\n") == 0
    assert (found.plan is None) == (grade == "red")


def test_poor_quantizations_and_short_contexts_are_not_green() -> None:
    for settings in ({"ctx": 2048}, {"gpu_layers": 20}):
        assert fits.fit("llama-3.1-nemotron-nano-8b", config.load(settings), CARD_12).grade == "amber"
    assert fits.fit("llama-3.1-nemotron-nano-8b:Q2_K", config.load(), CARD_12).grade == "amber"


def test_every_model_of_the_catalogue_gets_a_fit() -> None:
    models = overview.build(config.load())
    found = fits.all_of(models, config.load(), CARD_12)
    assert set(found) == {model.id for model in models}
    assert {fit.grade for fit in found.values()} == {"green", "amber", "red"}
