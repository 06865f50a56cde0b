"""CPU, RAM and disk, as far as this process may use them: affinity and container limits count."""

from __future__ import annotations

import contextlib
import ctypes
import math
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from nemolocal.hardware.parts import Cpu, Ram

ROOT = Path("/")

_LINUX_FEATURES = {
    # x86: as /proc/cpuinfo spells them
    "sse4_2": "sse4_2",
    "avx": "avx",
    "f16c": "f16c",
    "fma": "fma",
    "avx2": "avx2",
    "avx_vnni": "avx_vnni",
    "avx512f": "avx512f",
    "avx512vbmi": "avx512_vbmi",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx_int8": "amx_int8",
    # ARM
    "asimd": "neon",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "sve": "sve",
    "sve2": "sve2",
}
_WINDOWS_FEATURES = {19: "neon", 38: "sse4_2", 39: "avx", 40: "avx2", 41: "avx512f", 43: "dotprod"}
"""Numbers of IsProcessorFeaturePresent, from winnt.h."""
_MAC_FEATURES = {"avx2_0": "avx2", "avx512f": "avx512f", "neon": "neon", "arm.FEAT_DotProd": "dotprod"}
"""Names below sysctl's hw.optional."""


def read_cpu(root: Path = ROOT) -> Cpu:
    """The processor. `root` is the folder that /proc and /sys are below."""
    name, features = _identify(root)
    cpus = _cpus_allowed()
    return Cpu(
        name=name or platform.machine() or "CPU",
        physical_cores=_cores(root, cpus),
        features=features,
        n_numa_nodes=_numa_nodes(root, cpus),
    )


def read_ram(root: Path = ROOT) -> Ram:
    """Total and available bytes; a container's limit stands in where it is below the machine's memory.

    What a container may still use is its limit less its usage, where file pages that the kernel would
    give up at once (inactive_file) do not count as used.
    """
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= memory.total:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        total = min(total, limit)
        available = min(available, max(0, limit - used + _reclaimable(folder / "memory.stat")))
    return Ram(total_bytes=total, available_bytes=available)


def mapped_bytes(pid: int | None) -> int:
    """Bytes of files that a process has in RAM, which `read_ram` counts as available although the process
    needs them; 0 where the system does not count them so, or the process is gone."""
    if pid is None:
        return 0
    try:
        return int(getattr(psutil.Process(pid).memory_info(), "shared", 0))
    except psutil.Error:
        return 0


def free_disk_bytes(folder: Path) -> int:
    """Free space where `folder` is or would be made; 0 where that cannot be told."""
    existing = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), None)
    try:
        return shutil.disk_usage(existing).free if existing else 0
    except OSError:
        return 0


def _cpus_allowed() -> set[int]:
    """The logical CPUs that our affinity leaves us; empty where the system keeps none."""
    ask = getattr(psutil.Process(), "cpu_affinity", None)  # macOS has none
    try:
        return set(ask()) if ask else set()
    except psutil.Error:
        return set()


def _cores(root: Path, cpus: set[int]) -> int:
    """Physical cores: of the machine, of those that our affinity allows, and at most the CPU quota."""
    n_cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    if cpus:
        n_cores = min(n_cores, _cores_allowed(root, cpus))
    for folder in _cgroup_folders(root, "cpu"):
        quota = _quota(folder)
        if quota is not None:
            n_cores = min(n_cores, math.ceil(quota))
    return max(1, n_cores)


def _numa_nodes(root: Path, cpus: set[int]) -> int:
    """NUMA nodes of the CPUs that we may use; one of memory alone, like a Grace Hopper's GPU, counts not."""
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    return max(1, sum(bool(_parse_list(_text(node)) & cpus) for node in nodes))


def _parse_list(text: str) -> set[int]:
    """Linux's lists of numbers, like 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return found


def _cores_allowed(root: Path, cpus: set[int]) -> int:
    """Distinct cores behind a set of logical CPUs; two threads of one core count once."""
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core, package = _number(topology / "core_id"), _number(topology / "physical_package_id")
        cores.add((package, cpu if core is None else core))
    return len(cores)


def _quota(folder: Path) -> float | None:
    """CPUs' worth of time that a control group may use; None without a limit."""
    if words := _text(folder / "cpu.max").split():
        return None if words[0] == "max" else int(words[0]) / int(words[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Our control group's folder and those above it, whose limits hold too; both versions of the layout."""
    top = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base = top
        elif controller in controllers.split(","):
            base = top / controller
        else:
            continue
        folder = base / path.lstrip("/")
        while folder != base and base in folder.parents:
            yield folder
            folder = folder.parent
        yield base


def _reclaimable(stat: Path) -> int:
    values = dict(line.split(" ", 1) for line in _text(stat).splitlines() if " " in line)
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))


def _identify(root: Path) -> tuple[str, tuple[str, ...]]:
    if sys.platform == "win32":
        name, features = _identify_windows()
    elif sys.platform == "darwin":
        name, features = _identify_mac()
    else:
        name, features = _identify_linux(root)
    return name, features


def _identify_linux(root: Path) -> tuple[str, tuple[str, ...]]:
    fields: dict[str, str] = {}
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    # ARM kernels name no processor there; boards name themselves in the device tree.
    name = fields.get("model name") or _text(root / "proc/device-tree/model").strip("\0 \n")
    return name, tuple(ours for theirs, ours in _LINUX_FEATURES.items() if theirs in flags)


def _identify_windows() -> tuple[str, tuple[str, ...]]:
    name = platform.processor()
    features: tuple[str, ...] = ()
    if sys.platform == "win32":
        import winreg

        path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
            name = str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
        has = ctypes.windll.kernel32.IsProcessorFeaturePresent
        features = tuple(ours for number, ours in _WINDOWS_FEATURES.items() if has(number))
    return name, features


def _identify_mac() -> tuple[str, tuple[str, ...]]:
    def ask(key: str) -> str:
        try:
            answer = subprocess.run(
                ["sysctl", "-n", key], capture_output=True, text=True, timeout=5, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return answer.stdout.strip()

    features = tuple(ours for key, ours in _MAC_FEATURES.items() if ask(f"hw.optional.{key}") == "1")
    return ask("machdep.cpu.brand_string"), features


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None
