"""From a plan and the settings to what an engine is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemolocal import config, load_spec
from nemolocal.engine.messages import LoadSpec
from nemolocal.errors import UsageError
from nemolocal.models import planning
from tests import synthetic
from tests.profiles import machine

LAPTOP = machine(ram_gib=12)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return synthetic.write_tiny(tmp_path / "tiny.gguf")


def build(model: Path, **flags: str) -> LoadSpec:
    settings = config.load(flags)
    return load_spec.build(planning.plan(str(model), settings, LAPTOP), LAPTOP, settings)


def test_adapters_with_and_without_a_scale(tiny: Path, tmp_path: Path) -> None:
    """A colon may be part of the file's name."""
    plain, colon = tmp_path / "a.gguf", tmp_path / "b:1"
    plain.touch()
    colon.touch()
    spec = build(tiny, lora=f"{plain},{plain}:-0.5,{colon},{colon}:2")
    assert spec.adapters == ((str(plain), 1.0), (str(plain), -0.5), (str(colon), 1.0), (str(colon), 2.0))


@pytest.mark.parametrize("scale", ["nan", "inf", "-inf", "1e400", "101", "-100.5"])
def test_a_scale_that_would_make_the_model_compute_nonsense_is_refused(
    tiny: Path, tmp_path: Path, scale: str
) -> None:
    adapter = tmp_path / "a.gguf"
    adapter.touch()
    with pytest.raises(UsageError, match="which is not from -100 to 100"):
        build(tiny, lora=f"{adapter}:{scale}")


@pytest.mark.parametrize("name", ["missing.gguf", "missing.gguf:0.5", "tiny.gguf:x"])
def test_an_adapter_that_is_not_there_is_named(tiny: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"There is no LoRA adapter .*gguf"):
        build(tiny, lora=str(tmp_path / name))
