"""CPU and RAM within container limits and affinity, over a fake file tree."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nemolocal import hardware
from nemolocal.hardware import host
from tests.hardware.conftest import GIB, write


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
def test_container_limits_of_the_older_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    eight_cpus(monkeypatch, tmp_path)
    allow(monkeypatch, set(range(8)))
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


def eight_cpus(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Four cores of two threads each, two on either node of memory."""
    for cpu in range(8):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(root, {f"{topology}/core_id": f"{cpu // 2}\n", f"{topology}/physical_package_id": "0\n"})
    nodes = {"node0": "0-3\n", "node1": "4-5,6-7\n", "node2": "\n"}  # the last is memory alone
    write(root, {f"sys/devices/system/node/{name}/cpulist": cpus for name, cpus in nodes.items()})
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)


def allow(monkeypatch: pytest.MonkeyPatch, cpus: set[int]) -> None:
    monkeypatch.setattr(host, "_cpus_allowed", lambda: cpus)


@pytest.mark.parametrize(
    ("cpus", "quota", "n_cores", "n_nodes"),
    [
        (set(range(8)), "max 100000", 4, 2),
        ({0, 1, 2, 3, 4, 5}, "max 100000", 3, 2),
        ({4, 6}, "max 100000", 2, 1),
        ({0}, "max 100000", 1, 1),
        (set(range(8)), "150000 100000", 2, 2),
        ({0, 1}, "300000 100000", 1, 1),
        (set(), "max 100000", 4, 1),  # a system that keeps no affinity
    ],
)
def test_cores_and_nodes_are_those_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: set[int], quota: str, n_cores: int, n_nodes: int
) -> None:
    eight_cpus(monkeypatch, tmp_path)
    allow(monkeypatch, cpus)
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota})
    cpu = host.read_cpu(tmp_path)
    assert (cpu.physical_cores, cpu.n_numa_nodes) == (n_cores, n_nodes)


def test_affinity_is_this_process_own() -> None:
    allowed = host._cpus_allowed()
    assert len(allowed) <= (psutil.cpu_count() or 1)
    if hasattr(psutil.Process, "cpu_affinity"):
        assert allowed == set(psutil.Process().cpu_affinity())


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
