"""`nemolocal plan`, and what `models pull` asks of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemolocal import config, load_settings
from tests.cli.conftest import Cli, is_one_error

PROFILE = """
[[gpu]]
name = "NVIDIA GeForce RTX 4090"
uuid = "GPU-11111111-0000-0000-0000-000000000000"
compute_capability = "8.9"
total_bytes = 25757220864
free_bytes = 24696061952
[ram]
total_bytes = 68719476736
available_bytes = 55834574848
[cpu]
name = "Test CPU"
physical_cores = 16
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "4090.toml"
    path.write_text(PROFILE)
    return path


def plan(cli: Cli, *arguments: str | Path) -> Any:
    result = cli("plan", *arguments, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_json_has_the_promised_shape(cli: Cli, profile: Path) -> None:
    made = plan(cli, "nemotron-3-nano-4b", "--hardware", profile)
    assert made["fits"] is True
    assert made["context"] >= 8192
    [device] = made["devices"]
    parts = ("weights_bytes", "kv_bytes", "state_bytes", "compute_bytes", "overhead_bytes")
    assert sum(device[part] for part in parts) == device["total_bytes"] <= device["free_bytes"]
    assert {"n_layers", "weights_bytes"} <= set(made["host"])
    assert made["reasons"]
    assert set(made["forecast"]) == {"prompt_tokens_per_s", "tokens_per_s"}


def test_flags_are_kept(cli: Cli, profile: Path) -> None:
    flags = ("--ctx", "4096", "--slots", "2", "--kv", "q8_0", "--hardware", profile)
    made = plan(cli, "llama-3.1-nemotron-nano-8b:Q4_K_M", *flags)
    assert (made["context"], made["slots"], made["kv_type"], made["quant"]) == (4096, 2, "q8_0", "Q4_K_M")
    assert plan(cli, "starter", "--gpu-layers", "0", "--hardware", profile)["devices"] == []


def test_table(cli: Cli, profile: Path) -> None:
    result = cli("plan", "llama-3.1-nemotron-nano-8b", "--hardware", profile)
    assert result.code == 0
    assert "NVIDIA GeForce RTX 4090" in result.out
    assert "█" in result.out
    assert "- " in result.out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("nope",), 1),
        (("missing.gguf",), 1),
        (("starter", "--kv", "q9"), 2),
        (("nemotron-3-super-120b-a12b",), 1),
        (("starter", "--gpu", "7"), 2),
        (("starter", "--ctx", "-5"), 2),
    ],
)
def test_refusals_are_one_line(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    small = tmp_path / "small.toml"
    small.write_text(PROFILE.replace("24696061952", "4000000000").replace("55834574848", "9000000000"))
    assert is_one_error(cli("plan", *arguments, "--hardware", small), code)


def test_load_settings_that_are_kept_for_a_model_are_planned_with(cli: Cli, profile: Path) -> None:
    settings = config.load()
    load_settings.put("nemotron-nano-9b-v2", {"ctx": 12288, "slots": 2}, settings)
    kept = plan(cli, "nemotron-nano-9b-v2", "--hardware", profile)
    assert (kept["context"], kept["slots"]) == (12288, 2)
    given = plan(cli, "nemotron-nano-9b-v2", "--hardware", profile, "--ctx", "4096")
    assert (given["context"], given["slots"]) == (4096, 2)
