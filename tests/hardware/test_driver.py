"""Detection of GPUs over a fake driver."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemolocal import config, hardware
from nemolocal.errors import UsageError
from nemolocal.hardware import gpus as driver
from nemolocal.models import wish
from tests.hardware.conftest import GIB, Install, gpu


def test_gpu_as_the_driver_describes_it(nvml: Install, tmp_path: Path) -> None:
    nvml(gpus=[gpu()], behaviour="chatter")
    found = hardware.detect(models_dir=tmp_path / "not" / "there")
    assert found.mode == "gpu"
    assert found.reason == "1 NVIDIA GPU can be used."
    assert found.gpus == (
        hardware.Gpu(
            index=0,
            uuid="GPU-bbbb0000-1",
            name="RTX 4090",
            compute_capability="8.9",
            total_bytes=24 * GIB,
            free_bytes=20 * GIB,
            pci_bus_id="00000000:41:00.0",
            driver="580.95.05",
            driver_cuda="13.0",
        ),
    )
    assert found.cpu.physical_cores >= 1
    assert 0 < found.ram.available_bytes <= found.ram.total_bytes
    assert found.disk_free_bytes > 0


NO_DRIVER = {
    "absent library": ({"init": 12}, "driver is installed"),
    "driver not loaded": ({"init": 9}, "not loaded"),
    "version mismatch": ({"init": 18}, "differ in version"),
    "unknown error": ({"init": 999}, "999"),
    "other error": ({"init": 4}, "NVML 4"),
    "no GPU": ({"gpus": []}, "reports no GPU"),
    "crash": ({"behaviour": "crash"}, "crashed"),
    "hang": ({"behaviour": "hang"}, "no answer within 0.3 s"),
}


def test_every_failing_driver_has_its_own_reason(nvml: Install, capfd: pytest.CaptureFixture[str]) -> None:
    reasons = {}
    for name, (machine, _) in NO_DRIVER.items():
        nvml(**machine)
        found = hardware.detect(timeout_s=0.3 if name == "hang" else 15)
        assert (found.mode, found.gpus) == ("cpu", ())
        reasons[name] = found.reason
    assert len(set(reasons.values())) == len(NO_DRIVER)
    for name, (_, words) in NO_DRIVER.items():
        assert words in reasons[name]
        assert "\n" not in reasons[name]
    assert "reload the driver or reboot" in reasons["version mismatch"]
    assert capfd.readouterr() == ("", "")


def test_probe_that_cannot_be_killed_is_left_behind(nvml: Install) -> None:
    nvml(behaviour="hang for ever")
    began = time.monotonic()
    found = hardware.detect(timeout_s=0.5)
    assert "no answer" in found.reason
    assert time.monotonic() - began < 3
    child = driver._unkillable.pop()
    child.communicate()


def test_no_probe_follows_one_that_hangs(nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(behaviour="hang")
    with monkeypatch.context() as deaf:  # as a process is that waits inside a driver
        deaf.setattr(subprocess.Popen, "kill", lambda process: None)
        assert "no answer" in hardware.detect(timeout_s=0.3).reason
    nvml(gpus=[gpu()])
    monkeypatch.setattr(driver, "start_probe", None)
    assert "no answer" in hardware.detect().reason
    monkeypatch.undo()
    (child,) = driver._unkillable
    child.kill()
    child.wait()
    assert not driver._still_hangs()
    assert driver._unkillable == []


def test_missing_module_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('not for this machine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "nvidia-ml-py" in hardware.detect().reason


def test_module_in_the_current_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("open('was_here', 'w').close()")
    monkeypatch.chdir(tmp_path)
    hardware.detect()
    assert not (tmp_path / "was_here").exists()


def test_windows_library_is_tried_on_wsl(
    nvml: Install, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wsl").mkdir()
    (tmp_path / "wsl" / "libnvidia-ml.so.1").touch()
    nvml(init=9, library=str(tmp_path / "wsl"), gpus=[gpu(memory=[[8 * GIB, 7 * GIB]])])
    found = hardware.detect()
    assert [g.free_bytes for g in found.gpus] == [7 * GIB]
    assert found.reason == "1 NVIDIA GPU can be used."
    assert capfd.readouterr() == ("", "")


def test_the_wrong_library_may_work_and_find_nothing(nvml: Install, tmp_path: Path) -> None:
    (tmp_path / "wsl").mkdir()
    (tmp_path / "wsl" / "libnvidia-ml.so.1").touch()
    nvml(gpus=[], gpus_of_library=[gpu()], library=str(tmp_path / "wsl"))
    assert hardware.detect().mode == "gpu"


def test_both_libraries_fail_on_wsl(nvml: Install, tmp_path: Path) -> None:
    (tmp_path / "wsl").mkdir()
    (tmp_path / "wsl" / "libnvidia-ml.so.1").touch()
    nvml(init=9)
    assert "not loaded" in hardware.detect().reason


def test_lost_gpu_comes_back(nvml: Install) -> None:
    good = [8 * GIB, 6 * GIB]
    nvml(gpus=[gpu(memory=[good, good, 15, 15, 15, [8 * GIB, 5 * GIB]])])
    states = [hardware.detect() for _ in range(6)]
    assert [s.gpus[0].state for s in states] == ["ok", "ok", "lost", "lost", "lost", "ok"]
    assert [s.gpus[0].free_bytes for s in states] == [6 * GIB, 6 * GIB, 0, 0, 0, 5 * GIB]
    assert [s.mode for s in states] == ["gpu", "gpu", "cpu", "cpu", "cpu", "gpu"]
    assert states[2].gpus[0].total_bytes == 0
    assert states[2].gpus[0].name == "RTX 4090"
    assert "NVML 15" in states[2].gpus[0].problem
    assert "NVML 15" in states[2].reason


def test_lost_gpu_leaves_the_others(nvml: Install) -> None:
    nvml(gpus=[gpu(handle=15), gpu("RTX 3090", "GPU-aaaa"), gpu(uuid="GPU-cccc", memory=[999])])
    found = hardware.detect()
    assert [(g.index, g.state) for g in found.gpus] == [(0, "lost"), (1, "ok"), (2, "error")]
    assert found.mode == "gpu"
    assert found.reason.startswith("1 NVIDIA GPU can be used. GPU 0: ")


def test_gpu_that_shares_the_ram(nvml: Install) -> None:
    nvml(gpus=[gpu("NVIDIA GB10", memory=[3])])
    found = hardware.detect()
    assert found.mode == "gpu"
    assert found.gpus[0].shares_ram
    assert (found.gpus[0].total_bytes, found.gpus[0].free_bytes) == (
        found.ram.total_bytes,
        found.ram.available_bytes,
    )


def test_gpu_cut_by_mig_is_not_taken_for_a_whole_one(nvml: Install) -> None:
    nvml(gpus=[gpu(mig=1), gpu(uuid="GPU-2", mig=0)])
    found = hardware.detect()
    assert [(g.state, g.total_bytes) for g in found.gpus] == [("mig", 0), ("ok", 24 * GIB)]
    assert "-mig 0" in found.gpus[0].problem


def test_slices_of_a_gpu_are_devices_of_their_own(nvml: Install) -> None:
    parts = [
        {"name": "H100 MIG 3g.40gb", "uuid": f"MIG-{i}abc", "memory": [[40 * GIB, free * GIB]]}
        for i, free in enumerate((30, 39))
    ]
    nvml(gpus=[gpu("H100", "GPU-whole", mig=1, capability=[9, 0], slices=parts)])
    found = hardware.detect()
    assert [(g.uuid, g.state, g.is_slice) for g in found.gpus] == [
        ("GPU-whole", "mig", False),
        ("MIG-0abc", "ok", True),
        ("MIG-1abc", "ok", True),
    ]
    assert {g.compute_capability for g in found.gpus} == {"9.0"}
    left, _ = driver.visible(found.gpus, "MIG-0abc")
    assert [g.uuid for g in left] == ["MIG-0abc"]
    assert found.reason.startswith("2 MIG slices can be used. GPU 0: MIG has cut")
    by_number, _ = driver.visible(found.gpus, "0")
    assert by_number == found.gpus
    # A process can use one of them alone: that with most room, or the one that is named.
    assert [[g.uuid for g in group] for group in wish.groups(found, wish.Wish())] == [["MIG-1abc"]]
    ((named,),) = wish.groups(found, wish.Wish(gpus=("MIG-0",)))
    assert named.uuid == "MIG-0abc"
    with pytest.raises(UsageError, match="cannot be used"):
        wish.groups(found, wish.Wish(gpus=("0",)))
    with pytest.raises(UsageError, match="no other GPU beside"):
        wish.groups(found, wish.Wish(gpus=("MIG-0", "MIG-1")))


@pytest.mark.parametrize(("code", "state"), [(4, "mig"), (999, "mig"), (15, "lost")])
def test_who_may_use_a_slice_alone_may_not_read_the_whole(nvml: Install, code: int, state: str) -> None:
    part = {"name": "H100 MIG 1g.10gb", "uuid": "MIG-0", "memory": [[10 * GIB, 9 * GIB]]}
    nvml(gpus=[gpu("H100", mig=1, memory=[code], slices=[part])])
    whole, found = hardware.detect().gpus
    assert (whole.state, found.state, found.free_bytes) == (state, "ok", 9 * GIB)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"memory": [16]}, "--gpu-reset"),
        ({"memory": [4]}, "Insufficient Permissions (NVML 4)"),
        ({"mode": 2}, "-c DEFAULT"),
    ],
)
def test_a_gpu_that_must_not_or_cannot_be_used(nvml: Install, fields: dict[str, Any], words: str) -> None:
    nvml(gpus=[gpu(**fields), gpu(uuid="GPU-2", mode=0)])
    bad, good = hardware.detect().gpus
    assert (bad.state, bad.free_bytes, good.state) == ("error", 0, "ok")
    assert words in bad.problem


def test_an_older_driver_has_fewer_functions(nvml: Install) -> None:
    nvml(gpus=[gpu(processes=[[os.getpid(), GIB]])], is_old=True, cuda=12020)
    (found,) = hardware.detect().gpus
    assert (found.driver_cuda, found.state, len(found.holders)) == ("12.2", "ok", 1)


def test_who_holds_the_memory_and_what_the_card_does(nvml: Install) -> None:
    us, gone = os.getpid(), 2**22 + 5
    more = {"load": 87, "temperature": 71, "power": 320, "links": 4}
    windows = [[os.getppid(), None]]
    nvml(gpus=[gpu(processes=[[gone, 9 * GIB], [us, 3 * GIB]], windows=windows, **more)])
    (found,) = hardware.detect().gpus
    assert [(h.pid, h.used_bytes) for h in found.holders] == [(us, 3 * GIB), (os.getppid(), 0)]
    assert found.holders[0].name.startswith(psutil.Process(us).name())
    assert (found.load, found.temperature_c, found.power_w, found.n_links) == (0.87, 71, 320.0, 4)


# CUDA_VISIBLE_DEVICES

TWO = (
    hardware.Gpu(0, "GPU-aaaa0000-1", "RTX 3090", "8.6", 24 * GIB, 23 * GIB),
    hardware.Gpu(1, "GPU-bbbb0000-1", "RTX 4090", "8.9", 24 * GIB, 4 * GIB),
)


@pytest.mark.parametrize(
    ("value", "indices", "remark"),
    [
        (None, [0, 1], ""),
        ("0", [0], ""),
        ("1,0", [1, 0], ""),
        (" 1 , 0", [1, 0], ""),
        ("1,1,0", [1], "'1' twice"),
        ("1,GPU-bbbb,0", [1], "'GPU-bbbb' twice"),
        ("GPU-bbbb0000-1", [1], ""),
        ("gpu-aaaa", [0], ""),
        ("GPU-bbbb,0", [1, 0], ""),
        ("", [], "hides every GPU"),
        ("-1", [], "hides every GPU"),
        ("0,-1,1", [0], ""),
        ("7", [], "'7'"),
        ("1,7,0", [1], "'7'"),
        ("GPU-", [], "'GPU-'"),  # fits both
        ("GPU-cccc", [], "'GPU-cccc'"),
        ("RTX", [], "'RTX'"),
    ],
)
def test_visible_devices(value: str | None, indices: list[int], remark: str) -> None:
    left, said = driver.visible(TWO, value)
    assert [g.index for g in left] == indices
    assert remark in said
    assert bool(remark) == bool(said)


def test_hidden_gpus_are_said(nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(gpus=[gpu()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = hardware.survey(config.load())
    assert (found.mode, found.gpus) == ("cpu", ())
    assert "CUDA_VISIBLE_DEVICES" in found.reason


def test_numbers_in_another_order_than_ours_are_said(nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(gpus=[gpu("RTX 3060", "GPU-1"), gpu("RTX 4090", "GPU-2")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "PCI order" not in hardware.survey(config.load()).reason
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert "counted in PCI order" in hardware.survey(config.load()).reason
    alike = tuple(replace(each, name="RTX 4090") for each in TWO)
    assert driver.visible(alike, "1", order="FASTEST_FIRST") == (alike[1:], "")
    assert driver.visible(TWO, "GPU-aaaa", order="FASTEST_FIRST") == (TWO[:1], "")
    assert driver.visible(TWO, "1", order="PCI_BUS_ID") == (TWO[1:], "")
