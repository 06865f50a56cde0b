"""Detection over a fake driver, container limits over a fake file tree, and profiles."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nemolocal import config, hardware
from nemolocal.errors import ConfigError, UsageError
from nemolocal.hardware import engine_build, host
from nemolocal.hardware import gpus as driver
from nemolocal.models import catalog, sizing, wish

GIB = 1 << 30
Install = Callable[..., Path]


def gpu(name: str = "RTX 4090", uuid: str = "GPU-bbbb0000-1", **more: Any) -> dict[str, Any]:
    fields = {"bus": "00000000:41:00.0", "capability": [8, 9], "memory": [[24 * GIB, 20 * GIB]]}
    return {"name": name, "uuid": uuid, **fields, **more}


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a fake driver in place of the machine's own."""

    def install(**machine: Any) -> Path:
        file = tmp_path / "nvml.json"
        file.write_text(json.dumps(machine))
        monkeypatch.setenv("FAKE_NVML", str(file))
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "fake_nvml"))
        return file

    monkeypatch.setattr(driver, "WSL_FOLDER", tmp_path / "wsl")
    return install


# The driver ---------------------------------------------------------------------------------------


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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere mapped files do not count as available")
def test_files_that_a_process_has_in_ram(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(32 << 20))
    before = host.mapped_bytes(os.getpid())
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert not any(mapped[:: mmap.PAGESIZE])
        assert host.mapped_bytes(os.getpid()) - before > 30 << 20
    assert host.mapped_bytes(None) == 0
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert host.mapped_bytes(gone.pid) == 0


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
    # A process can use one of them alone: that with most room, or the one that is named.
    assert [g.uuid for g in wish.gpus(found, wish.Wish())] == ["MIG-1abc"]
    assert [g.uuid for g in wish.gpus(found, wish.Wish(gpus=("MIG-0",)))] == ["MIG-0abc"]
    with pytest.raises(UsageError, match="cannot be used"):
        wish.gpus(found, wish.Wish(gpus=("0",)))


def test_who_holds_the_memory_and_what_the_card_does(nvml: Install) -> None:
    us, gone = os.getpid(), 2**22 + 5
    more = {"load": 87, "temperature": 71, "power": 320, "links": 4}
    nvml(gpus=[gpu(processes=[[gone, 9 * GIB], [us, 3 * GIB], [os.getppid(), None]], **more)])
    (found,) = hardware.detect().gpus
    assert [(h.pid, h.used_bytes) for h in found.holders] == [(us, 3 * GIB), (os.getppid(), 0)]
    assert found.holders[0].name == psutil.Process(us).name()
    assert (found.load, found.temperature_c, found.power_w, found.n_links) == (0.87, 71, 320.0, 4)


@pytest.fixture
def engine_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the engine's libraries are looked for."""
    folder = tmp_path / "llama_cpp" / "lib"
    folder.mkdir(parents=True)
    monkeypatch.setattr(engine_build, "library_folder", lambda: folder)
    return folder


def test_an_engine_without_cuda_beside_a_gpu_is_said(nvml: Install, engine_files: Path) -> None:
    nvml(gpus=[gpu()])
    (warning,) = hardware.detect().warnings
    assert "built without CUDA" in warning
    assert "installer/run.py" in warning
    nvml(gpus=[])
    assert hardware.detect().warnings == ()  # nothing is lost on this machine


@pytest.mark.parametrize(("cuda", "warned"), [(11080, True), (12040, False), (13000, False), (0, False)])
def test_a_driver_too_old_for_the_engine_is_said(
    nvml: Install, engine_files: Path, cuda: int, warned: bool
) -> None:
    (engine_files / "libggml-cuda.so").write_bytes(b"\x7fELF..." + bytes(100) + b"libcudart.so.12\0")
    nvml(gpus=[gpu()], cuda=cuda)
    warnings = hardware.detect().warnings
    assert bool(warnings) == warned
    if warned:
        assert "CUDA up to 11.8" in warnings[0]
        assert "needs CUDA 12" in warnings[0]
    (engine_files / "libggml-cuda.so").write_bytes(b"linked to none")
    engine_build.cuda_major.cache_clear()
    assert hardware.detect().warnings == ()


def test_a_card_of_another_maker_is_said(
    nvml: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = tmp_path / "pci" / "0000:03:00.0"
    card.mkdir(parents=True)
    (card / "class").write_text("0x030000\n")
    (card / "vendor").write_text("0x1002\n")
    monkeypatch.setattr(driver, "PCI_DEVICES", tmp_path / "pci")
    nvml(init=12)
    assert "AMD" in hardware.detect().reason
    (card / "vendor").write_text("0x10de\n")
    assert "no NVIDIA driver is installed" in hardware.detect().reason


# The monitor --------------------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_monitor_samples_while_somebody_looks(nvml: Install) -> None:
    file = nvml(gpus=[gpu(load=50, memory=[[24 * GIB, 20 * GIB], [24 * GIB, 10 * GIB]])])
    monitor = hardware.Monitor(every_s=0.05, unwatched_s=1)
    assert monitor.samples() == ()
    until(lambda: any(s.gpus and s.gpus[0].free_bytes == 10 * GIB for s in monitor.samples()))
    newest = monitor.samples()[-1]
    assert newest.gpus[0].load == 0.5
    assert 0 <= newest.cpu_load <= 1
    assert 0 < newest.ram_used_bytes <= newest.ram_total_bytes
    thread = monitor._thread
    assert thread
    thread.join(timeout=10)  # nobody looks any more
    assert not thread.is_alive()
    assert not [p for p in psutil.Process().children() if "probe.py" in " ".join(p.cmdline())]
    file.write_text(json.dumps({"gpus": [gpu(memory=[15])]}))
    monitor.samples()  # and it starts again
    until(lambda: monitor.samples()[-1].gpus[0].state == "lost")
    assert monitor.samples()[-1].gpus[0].free_bytes == 0
    monitor.close()


def test_monitor_without_a_driver_watches_the_rest(nvml: Install) -> None:
    nvml(init=12)
    monitor = hardware.Monitor(every_s=0.05)
    until(lambda: len(monitor.samples()) > 3)
    assert monitor.samples()[-1].gpus == ()
    monitor.close()


# CUDA_VISIBLE_DEVICES -----------------------------------------------------------------------------

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
        (" 1 , 1", [1], ""),
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


# CPU, RAM, disk -----------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def machine_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=16 * GIB, available=8 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.mark.usefixtures("machine_memory")
def test_container_limits_hold_for_ram(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/app\n",
            "sys/fs/cgroup/user/app/memory.max": "max\n",
            "sys/fs/cgroup/user/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/user/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/user/memory.stat": f"anon 5\ninactive_file {GIB // 4}\n",
        },
    )
    assert host.read_ram(tmp_path) == hardware.Ram(2 * GIB, GIB + GIB // 4)


@pytest.mark.usefixtures("machine_memory")
def test_container_limits_of_the_older_layout(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 8}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert host.read_ram(tmp_path) == hardware.Ram(GIB, GIB // 2 + GIB // 8)
    assert host.read_cpu(tmp_path).physical_cores == 1


@pytest.mark.usefixtures("machine_memory")
def test_no_limits_mean_the_machine(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
        },
    )
    assert host.read_ram(tmp_path) == hardware.Ram(16 * GIB, 8 * GIB)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity and control groups are Linux's")
def test_cores_are_those_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(8):  # four cores of two threads each
        write(
            tmp_path,
            {
                f"sys/devices/system/cpu/cpu{cpu}/topology/core_id": f"{cpu // 2}\n",
                f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id": "0\n",
            },
        )
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert host.read_cpu(tmp_path).physical_cores == 4
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5})
    assert host.read_cpu(tmp_path).physical_cores == 3
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"})
    assert host.read_cpu(tmp_path).physical_cores == 2


def test_processor_as_linux_describes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    write(
        tmp_path,
        {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Ryzen 9\nflags\t\t: sse avx2 fma avx512vbmi\n"},
    )
    cpu = host._identify(tmp_path)
    assert cpu == ("Ryzen 9", ("fma", "avx2", "avx512_vbmi"))
    write(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n",
            "proc/device-tree/model": "NVIDIA DGX Spark\0",
        },
    )
    assert host._identify(tmp_path) == ("NVIDIA DGX Spark", ("neon", "dotprod", "i8mm"))


# Profiles -----------------------------------------------------------------------------------------

PROFILE = """
[[gpu]]
name = "RTX 4090"
uuid = "GPU-1"
compute_capability = "8.9"
total_bytes = 24_000_000_000
free_bytes = 23_000_000_000

[ram]
total_bytes = 64_000_000_000
available_bytes = 60_000_000_000

[cpu]
name = "Ryzen"
physical_cores = 16
features = ["avx2"]

[disk]
free_bytes = 1_000_000
"""


def test_profile_replaces_detection(tmp_path: Path) -> None:
    file = tmp_path / "desk.toml"
    file.write_text(PROFILE)
    found = hardware.survey(config.load({"hardware": str(file)}))
    assert found == hardware.Hardware(
        mode="gpu",
        reason="Described by desk.toml, not detected.",
        gpus=(hardware.Gpu(0, "GPU-1", "RTX 4090", "8.9", 24_000_000_000, 23_000_000_000),),
        cpu=hardware.Cpu("Ryzen", 16, ("avx2",)),
        ram=hardware.Ram(64_000_000_000, 60_000_000_000),
        disk_free_bytes=1_000_000,
    )


def test_profile_of_gpus_alone_takes_the_rest_from_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "gpu.toml"
    file.write_text('[[gpu]]\nname = "A"\ntotal_bytes = 100\n[[gpu]]\nname = "B"\ntotal_bytes = 200\n')
    found = hardware.load_profile(file, models_dir=tmp_path)
    assert [(g.index, g.uuid, g.free_bytes) for g in found.gpus] == [
        (0, "GPU-profile-0", 100),
        (1, "GPU-profile-1", 200),
    ]
    assert found.cpu == host.read_cpu()
    assert found.ram.total_bytes == host.read_ram().total_bytes
    assert found.disk_free_bytes > 0


def test_profile_without_gpus_is_a_cpu_machine(tmp_path: Path) -> None:
    file = tmp_path / "cpu.toml"
    file.write_text("[ram]\ntotal_bytes = 8\n[cpu]\nphysical_cores = 4\n")
    found = hardware.load_profile(file)
    assert (found.mode, found.gpus) == ("cpu", ())
    assert (found.ram.available_bytes, found.cpu.physical_cores) == (8, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpus = 1", "unknown key 'gpus'"),
        ("gpu = 1", "gpu is not a list"),
        ("gpu = [1]", "gpu 0 is not a table"),
        ("[[gpu]]\ntotal_bytes = 1", "gpu 0 has no name"),
        ('[[gpu]]\nname = "A"', "gpu 0 has no total_bytes"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = 1\nvram = 2', "unknown key 'vram'"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = "24 GB"', "total_bytes = '24 GB' is not a whole number"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = -1', "total_bytes = -1"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = true', "total_bytes = True"),
        ("[[gpu]]\nname = 4090\ntotal_bytes = 1", "name = 4090 is not text"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = 1\nfree_bytes = 2', "more than total_bytes"),
        ("ram = 1", "ram is not a table"),
        ("[ram]\navailable_bytes = 1", "ram has no total_bytes"),
        ("[ram]\ntotal_bytes = 1\navailable_bytes = 2", "more than total_bytes"),
        ('[cpu]\nname = "A"', "cpu has no physical_cores"),
        ("[cpu]\nphysical_cores = 1\nfeatures = [1]", "a list of texts"),
        ("[[gpu", "TOML"),
        ("x = '\udcff'", "TOML"),
    ],
)
def test_wrong_profiles(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        hardware.load_profile(file)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no hardware profile at"):
        hardware.load_profile(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Cannot read"):
        hardware.load_profile(tmp_path)


# Machines of all kinds ----------------------------------------------------------------------------

PROFILES = sorted((Path(__file__).parent / "hardware_profiles").glob("*.toml"))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_machine_gets_a_plan_that_it_can_hold(path: Path) -> None:
    machine = hardware.load_profile(path)
    model = catalog.load().get("nemotron-3-nano-4b")
    assert model
    files = [sizing.Candidate(row.quant, row.quant, row.bytes, model.shape(row)) for row in model.files]
    made = sizing.plan(model.id, files, machine)
    assert {gpu.state for gpu in made.placement.gpus} <= {"ok"}
    assert bool(made.placement.gpus) == (machine.mode == "gpu")
    assert made.placement.ram_bytes <= machine.ram.available_bytes
    for gpu, share in zip(made.placement.gpus, made.placement.shares, strict=True):
        assert share.total_bytes <= gpu.free_bytes
    if any(gpu.is_slice for gpu in machine.gpus):
        assert [gpu.uuid[:4] for gpu in made.placement.gpus] == ["MIG-"]
