"""`nemolocal plan`, and what `models pull` asks of it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemolocal import config, load_settings
from nemolocal.cli import bars
from nemolocal.cli.plan import speeds
from nemolocal.hardware import survey
from nemolocal.models import planning
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


# The picture of it --------------------------------------------------------------------------------

PROFILES = Path(__file__).parent.parent / "hardware_profiles"


@pytest.mark.parametrize("name", [path.stem for path in sorted(PROFILES.glob("*.toml"))])
@pytest.mark.parametrize("width", [60, 80])
def test_every_device_has_a_bar_within_the_window(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = cli("plan", "nemotron-3-nano-4b", "--hardware", PROFILES / f"{name}.toml")
    assert (result.code, result.err) == (0, "")
    drawn = result.out[: result.out.index("\n- ")]
    assert max(map(len, drawn.splitlines())) <= width
    gpus = survey(config.load({"hardware": str(PROFILES / f"{name}.toml")})).gpus
    own = [gpu for gpu in gpus if gpu.state == "ok" and not gpu.shares_ram]
    bars = [line for line in drawn.splitlines() if " of " in line and line.endswith(" GiB for it")]
    assert len(bars) == len(own) + 1
    assert all(gpu.name in drawn for gpu in gpus if gpu.state == "ok")
    assert "RAM" in drawn


def test_the_table_has_what_the_json_has(cli: Cli, profile: Path) -> None:
    made = plan(cli, "nemotron-3-nano-30b-a3b", "--hardware", profile)
    shown = cli("plan", "nemotron-3-nano-30b-a3b", "--hardware", profile).out
    table = shown[shown.index("GiB   ") :]
    rows = {line.split()[1]: line.split()[2:] for line in table.splitlines() if len(line.split()) > 2}
    [device] = made["devices"]
    for word, part in (
        ("weights", "weights_bytes"),
        ("state", "state_bytes"),
        ("overhead", "overhead_bytes"),
    ):
        assert rows[word][0] == f"{device[part] / (1 << 30):.1f}"
    assert f"{made['context']:,} tokens" in shown
    assert all(reason in shown for reason in made["reasons"])
    assert "not on this machine yet" in shown
    assert f"layers {device['n_layers']}" in " ".join(shown.split())


def test_parts_are_told_without_colours_and_without_blocks(
    shell: Cli, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    shown = shell("plan", "nemotron-3-nano-30b-a3b", "--hardware", profile)
    assert shown.code == 0
    bar = next(line for line in shown.out.splitlines() if line.endswith("24.0 GiB for it"))
    assert {"#", "K", "S", "B", "o", "-", "/", "."} <= set(bar)
    assert "?" not in bar
    assert "\x1b" not in shown.out


def test_cells_of_a_bar() -> None:
    """Each part has one at least, none more than its share and one, and the bar is always whole."""
    rng = random.Random(4)
    for _ in range(2000):
        width = rng.randint(10, 60)
        parts = [round(10 ** rng.uniform(0, 12)) for _ in range(rng.randint(1, 8))]
        found = bars.cells(parts, width)
        assert (sum(found), min(found) >= 1) == (width, True)
        shares = [width * part / sum(parts) for part in parts]
        assert all(n <= max(share + 1, 1) for n, share in zip(found, shares, strict=True))
        assert all(n >= share - len(parts) for n, share in zip(found, shares, strict=True))


def test_speeds_say_whether_they_are_measured(profile: Path) -> None:
    made = planning.plan(
        "llama-3.1-nemotron-nano-8b", config.load(), survey(config.load({"hardware": str(profile)}))
    )
    plain = speeds(made)
    assert [line.partition(":")[0] for line in plain] == ["Forecast", "Forecast"]
    both = speeds(replace(made, measured_tokens_per_s=81.37))
    assert both[1] == "Measured here: 81 tokens a second for one answer."
    assert speeds(replace(made, tokens_per_s=None, prompt_tokens_per_s=None)) == []


def test_what_does_not_fit_is_told_to_programs_too(cli: Cli, tmp_path: Path) -> None:
    small = tmp_path / "small.toml"
    small.write_text(PROFILE.replace("24696061952", "4000000000").replace("55834574848", "9000000000"))
    result = cli("plan", "nemotron-3-super-120b-a12b", "--hardware", small, "--json")
    assert (result.code, result.err) == (1, "")
    told = json.loads(result.out)
    assert told["fits"] is False
    assert told["needed_bytes"] > told["available_bytes"] > 0
    words = cli("plan", "nemotron-3-super-120b-a12b", "--hardware", small)
    assert is_one_error(words, 1)
    assert words.err == f"error: {told['error']}\n"
