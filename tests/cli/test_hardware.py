"""`nemolocal hardware`, over the fake driver in a real process, and over a profile."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nemolocal.hardware import engine_build
from tests.cli.conftest import Cli, is_one_error

GIB = 1 << 30
PROFILE = """
[[gpu]]
name = "RTX [4090]"
uuid = "GPU-1"
compute_capability = "8.9"
total_bytes = 25769803776
free_bytes = 24696061952
[ram]
total_bytes = 68719476736
[cpu]
name = "Ryzen"
physical_cores = 16
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "nvml.json"
    monkeypatch.setenv("FAKE_NVML", str(file))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "fake_nvml"))
    return file


def test_json_has_the_promised_shape(shell: Cli, nvml: Path) -> None:
    card = {"name": "RTX 3090", "uuid": "GPU-a", "bus": "00000000:01:00.0", "capability": [8, 6]}
    nvml.write_text(
        json.dumps({"gpus": [{**card, "memory": [[24 * GIB, 23 * GIB]]}, {**card, "memory": [15]}]})
    )
    result = shell("hardware", "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["mode"] == "gpu"
    good, lost = found["gpus"]
    assert good == {
        "index": 0,
        "uuid": "GPU-a",
        "name": "RTX 3090",
        "compute_capability": "8.6",
        "pci_bus_id": "00000000:01:00.0",
        "total_bytes": 24 * GIB,
        "free_bytes": 23 * GIB,
        "driver": "580.95.05",
        "state": "ok",
        "problem": "",
        "shares_ram": False,
        "is_slice": False,
        "n_links": 0,
        "holders": [],
        "load": None,
        "temperature_c": None,
        "power_w": None,
    }
    assert (lost["state"], lost["free_bytes"]) == ("lost", 0)
    assert set(found["cpu"]) == {"name", "physical_cores", "features", "n_numa_nodes"}
    assert set(found["ram"]) == {"total_bytes", "available_bytes"}
    assert found["reason"]


def test_what_keeps_a_gpu_idle_and_who_holds_it_is_said(shell: Cli, nvml: Path) -> None:
    card = {"name": "RTX 3090", "uuid": "GPU-a", "bus": "00000000:01:00.0", "capability": [8, 6]}
    us = os.getpid()
    nvml.write_text(
        json.dumps({"gpus": [{**card, "memory": [[24 * GIB, 20 * GIB]], "processes": [[us, GIB]]}]})
    )
    result = shell("hardware")
    assert f"process {us} (1.0 GiB)" in result.out
    is_cuda_build = any(engine_build.library_folder().glob("*ggml-cuda*"))
    assert ("warning: The installed llama-cpp-python was built without CUDA" in result.err) != is_cuda_build


@pytest.mark.parametrize("code", [9, 12, 18, 999])
def test_failing_driver_is_a_good_answer(shell: Cli, nvml: Path, code: int) -> None:
    nvml.write_text(json.dumps({"init": code}))
    shown, data = shell("hardware"), shell("hardware", "--json")
    assert (shown.code, shown.err) == (data.code, data.err) == (0, "")
    found = json.loads(data.out)
    assert (found["mode"], found["gpus"]) == ("cpu", [])
    assert shown.out.startswith(f"Mode  CPU: {found['reason']}\n")


def test_table(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "desk.toml").write_text(PROFILE)
    result = cli("hardware", "--hardware", tmp_path / "desk.toml")
    assert (result.code, result.err) == (0, "")
    for words in (
        "Mode  GPU: Described by desk.toml",
        "RTX [4090]",
        "23.0 GiB",
        "24.0 GiB",
        "Ryzen, 16 cores",
    ):
        assert words in result.out


def test_lost_gpu_shows_no_figures(cli: Cli, nvml: Path) -> None:
    card = {"name": "RTX 3090", "uuid": "GPU-a", "bus": "b", "capability": [8, 6], "memory": [15]}
    nvml.write_text(json.dumps({"gpus": [card]}))
    result = cli("hardware")
    (row,) = [line for line in result.out.splitlines() if "RTX 3090" in line]
    assert "lost" in row
    assert "GiB" not in row


def test_profile_from_the_environment_and_a_bad_one(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "desk.toml"
    file.write_text(PROFILE)
    monkeypatch.setenv("NEMOLOCAL_HARDWARE", str(file))
    assert json.loads(cli("hardware", "--json").out)["gpus"][0]["name"] == "RTX [4090]"
    file.write_text(PROFILE + "speed = 3\n")
    result = cli("hardware", "--json")
    assert is_one_error(result, 2)
    assert "unknown key 'speed'" in result.err
