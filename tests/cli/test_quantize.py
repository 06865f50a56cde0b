"""`nemolocal models quantize`: what is printed, and what is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nemolocal.models import gguf
from tests import synthetic
from tests.cli.conftest import Cli, is_one_error

pytestmark = pytest.mark.model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    wide = replace(synthetic.TINY["llama"], n_embd=256, n_ff=320)
    return synthetic.write(tmp_path / "tiny-F16.gguf", wide, type_name="F16")


def test_dry_run_shows_the_size_and_the_plans(cli: Cli, source: Path) -> None:
    shown = cli("models", "quantize", source, "Q4_K_M", "--dry-run")
    assert shown.code == 0, shown.err
    assert "tiny-Q4_K_M.gguf would take" in shown.out
    assert "F16" in shown.out
    assert "no multiple of 256" in shown.err
    facts = json.loads(cli("models", "quantize", source, "q4_k_m", "--dry-run", "--json").out)
    assert facts["quant"] == "Q4_K_M"
    assert facts["bytes"] < facts["from_bytes"]
    before, after = (facts[plan]["host"]["weights_bytes"] for plan in ("plan_before", "plan_after"))
    assert before - after == pytest.approx(facts["from_bytes"] - facts["bytes"], rel=0.2)
    assert list(source.parent.glob("*.gguf")) == [source]


def test_the_file_is_written_and_can_be_used(cli: Cli, source: Path, tmp_path: Path) -> None:
    shown = cli("models", "quantize", source, "Q8_0")
    target = source.with_name("tiny-Q8_0.gguf")
    assert shown.code == 0, shown.err
    assert f"{target} is ready" in shown.out
    assert f"nemolocal models import {target}" in shown.out
    assert gguf.read(target).quant == "Q8_0"
    again = cli("models", "quantize", source, "Q8_0")
    assert is_one_error(again, again.code)
    assert "--force" in again.err
    other = tmp_path / "other.gguf"
    facts = json.loads(cli("models", "quantize", source, "Q8_0", "-o", other, "--json").out)
    assert facts["path"] == str(other)
    assert facts["bytes"] == other.stat().st_size


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("IQ2_XXS",), "importance matrix"),
        (("Q9",), "no quantization"),
        (("Q8_0", "-o", "/nowhere/at/all/x.gguf"), "/nowhere/at/all"),
    ],
)
def test_what_is_refused_is_one_line(cli: Cli, source: Path, arguments: tuple[str, ...], says: str) -> None:
    shown = cli("models", "quantize", source, *arguments)
    assert says in shown.err
    assert shown.code > 0
    assert "Traceback" not in shown.err
