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


CARD = {"name": "RTX 3090", "uuid": "GPU-a", "bus": "00000000:01:00.0", "capability": [8, 6]}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """The folder of an engine's libraries, of a build for the CPU alone."""
    folder = tmp_path / "packages" / "llama_cpp" / "lib"
    folder.mkdir(parents=True)
    folder.with_name("__init__.py").write_text("raise SystemExit('it is not to be imported here')")
    (folder / "libggml-base.so").touch()
    return folder


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Path) -> Path:
    """A fake driver, and an engine that can use it."""
    (engine / "libggml-cuda.so").write_bytes(b"libcudart.so.12")
    file = tmp_path / "nvml.json"
    monkeypatch.setenv("FAKE_NVML", str(file))
    folders = [str(Path(__file__).parents[1] / "fake_nvml"), str(engine.parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    return file


def test_json_has_the_promised_shape(shell: Cli, nvml: Path) -> None:
    nvml.write_text(
        json.dumps({"gpus": [{**CARD, "memory": [[24 * GIB, 23 * GIB]]}, {**CARD, "memory": [15]}]})
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
        "driver_cuda": "13.0",
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
    assert found["engine"].endswith("with CUDA 12")
    assert found["warnings"] == []


def test_who_holds_the_memory_and_what_the_card_does(shell: Cli, nvml: Path) -> None:
    us = os.getpid()
    more = {"load": 40, "temperature": 61, "power": 210, "links": 4, "processes": [[us, GIB]]}
    nvml.write_text(json.dumps({"gpus": [{**CARD, "memory": [[24 * GIB, 20 * GIB]], **more}]}))
    result = shell("hardware")
    assert (result.code, result.err) == (0, "")
    for words in (
        "GPU 0   RTX 3090: 20.0 GiB of 24.0 GiB free\n",
        "compute capability 8.6, 4 NVLinks, 40% busy, 61 °C, 210 W, GPU-a\n",
        f" 1.0 GiB (process {us})\n",
        "Driver  580.95.05, for CUDA up to 13.0\n",
    ):
        assert words in result.out


def test_of_many_holders_the_largest_are_named(cli: Cli, tmp_path: Path) -> None:
    windows = "".join(f'[[gpu.holders]]\nname = "w{i}.exe"\npid = {i}\n' for i in range(20))
    (tmp_path / "desk.toml").write_text(PROFILE.replace("[ram]", f"{windows}[ram]"))
    result = cli("hardware", "--hardware", tmp_path / "desk.toml")
    assert "w0.exe (process 0), w1.exe (process 1)" in result.out
    assert "w5.exe (process 5) and 14 more\n" in result.out


def test_an_engine_without_cuda_is_said(shell: Cli, nvml: Path, engine: Path) -> None:
    (engine / "libggml-cuda.so").unlink()
    nvml.write_text(json.dumps({"gpus": [{**CARD, "memory": [[24 * GIB, 20 * GIB]]}]}))
    shown, data = shell("hardware"), shell("hardware", "--json")
    assert (shown.code, shown.err) == (data.code, data.err) == (0, "")
    assert shown.out.startswith("Mode    CPU: The installed llama-cpp-python was built without CUDA")
    assert "RTX 3090 (unused): 20.0 GiB of 24.0 GiB free" in shown.out
    found = json.loads(data.out)
    assert (found["mode"], found["gpus"][0]["state"]) == ("cpu", "unused")
    assert found["warnings"] == [found["reason"]]


@pytest.mark.model
def test_an_engine_without_cuda_answers_on_the_cpu_and_says_so(
    shell: Cli, nvml: Path, starter_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.write_text(json.dumps({"gpus": [{**CARD, "memory": [[24 * GIB, 20 * GIB]]}]}))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "fake_nvml"))  # the real engine
    if engine_build.find().has_cuda:
        pytest.skip("the engine that is installed here can use GPUs")
    result = shell("chat", starter_path, "-p", "Repeat the word: yes", "--ctx", "512", "--temperature", "0")
    assert (result.code, bool(result.out.strip())) == (0, True)
    assert result.err.startswith("warning: The installed llama-cpp-python was built without CUDA")


@pytest.mark.parametrize("code", [9, 12, 18, 999])
def test_failing_driver_is_a_good_answer(shell: Cli, nvml: Path, code: int) -> None:
    nvml.write_text(json.dumps({"init": code}))
    shown, data = shell("hardware"), shell("hardware", "--json")
    assert (shown.code, shown.err) == (data.code, data.err) == (0, "")
    found = json.loads(data.out)
    assert (found["mode"], found["gpus"]) == ("cpu", [])
    assert shown.out.startswith(f"Mode    CPU: {found['reason']}\n")


def test_table(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "desk.toml").write_text(PROFILE)
    result = cli("hardware", "--hardware", tmp_path / "desk.toml")
    assert (result.code, result.err) == (0, "")
    for words in (
        "Mode    GPU: Described by desk.toml",
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
