"""The GPUs of this machine: asks the driver in a child process, and reads the answer.

Knows nothing of NVML itself beyond its error numbers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from nemolocal.hardware.parts import Gpu, Holder, Ram

PROBE_TIMEOUT_S = 15.0
"""Without the persistence daemon a driver starts each GPU when it is asked: seconds on a large machine."""

WSL_FOLDER = Path("/usr/lib/wsl/lib")
"""Where WSL keeps the Windows driver's library. A Linux driver's, installed beside it, is found first and
cannot work there."""

PCI_DEVICES = Path("/sys/bus/pci/devices")

DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
GPU_IS_LOST = 15
VERSION_MISMATCH = 18

_log = logging.getLogger(__name__)
_unkillable: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class Found:
    """GPUs in NVML's order; `problem` says in one line why there are none, "" where there are. `cuda` is the
    newest CUDA that the driver runs, (0, 0) where it does not say."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    cuda: tuple[int, int] = (0, 0)


def find_gpus(ram: Ram, *, timeout_s: float = PROBE_TIMEOUT_S) -> Found:
    """Every NVIDIA GPU of the machine, also the lost ones. Never raises on what the driver does.

    `ram` stands in for the memory of a GPU that has none of its own. Blocks for up to `timeout_s`.
    """
    answer = _ask_driver(timeout_s)
    if "gpus" not in answer and (folder := wsl_library()):
        _log.debug("first NVML library: %s", answer)
        second = _ask_driver(timeout_s, library_folder=folder)
        answer = second if "gpus" in second else answer
    return read_answer(answer, ram)


def wsl_library() -> Path | None:
    """The folder of the Windows driver's library, None outside WSL."""
    return WSL_FOLDER if (WSL_FOLDER / "libnvidia-ml.so.1").exists() else None


def read_answer(answer: dict[str, Any], ram: Ram) -> Found:
    """What the probe has printed, as values."""
    if "gpus" not in answer:
        return Found(problem=_why_no_driver(answer["error"]))
    gpus = tuple(_read_gpu(gpu, driver=answer["driver"], ram=ram) for gpu in answer["gpus"])
    problem = "" if gpus else "The NVIDIA driver runs, but reports no GPU."
    return Found(gpus, problem, (answer["cuda"] // 1000, answer["cuda"] % 1000 // 10))


def visible(gpus: Sequence[Gpu], value: str | None) -> tuple[tuple[Gpu, ...], str]:
    """What CUDA_VISIBLE_DEVICES leaves of the GPUs, in its order, and a remark ("" where all is well).

    As in CUDA: entries are indices, UUIDs or beginnings of UUIDs that fit one GPU; the first entry that
    names no GPU hides itself and all that follow. Indices count in PCI bus order.
    """
    if value is None:
        return tuple(gpus), ""
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in value.split(",")):
        matches = _named_by(entry, gpus)
        if len(matches) != 1:
            if not entry or entry == "-1":
                remark = "" if chosen else f"CUDA_VISIBLE_DEVICES is {value!r}, which hides every GPU."
            else:
                remark = f"CUDA_VISIBLE_DEVICES names {entry!r}, which is no GPU of this machine."
            return tuple(chosen), remark
        if matches[0] not in chosen:
            chosen.append(matches[0])
    return tuple(chosen), ""


def _named_by(entry: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    if entry.isdecimal():
        return [gpu for gpu in gpus if gpu.index == int(entry) and not gpu.is_slice]
    if entry.lower().startswith(("gpu-", "mig-")):
        return [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())]
    return []


def _read_gpu(raw: dict[str, Any], *, driver: str, ram: Ram) -> Gpu:
    gpu = Gpu(
        index=raw["index"],
        uuid=raw.get("uuid", ""),
        name=raw.get("name", f"GPU {raw['index']}"),
        compute_capability=".".join(map(str, raw.get("capability", ()))),
        total_bytes=raw.get("total_bytes", 0),
        free_bytes=raw.get("free_bytes", 0),
        pci_bus_id=raw.get("pci_bus_id", ""),
        driver=driver,
        is_slice=raw.get("is_slice", False),
        n_links=raw.get("n_links", 0),
        holders=_name_holders(raw.get("holders", ())),
        load=raw.get("load"),
        temperature_c=raw.get("temperature_c"),
        power_w=raw.get("power_w"),
    )
    if error := raw.get("error"):
        if error["code"] == GPU_IS_LOST:
            state, problem = "lost", "The GPU has fallen off the bus (NVML 15); a reboot brings it back."
        else:
            state, problem = "error", f"The driver cannot read this GPU: {_cite(error)}."
        gpu = replace(gpu, load=None, temperature_c=None, power_w=None, holders=())
        return replace(gpu, state=state, problem=problem, total_bytes=0, free_bytes=0)
    if raw.get("is_mig"):
        problem = (
            "MIG has cut this GPU into slices, which are used in its place; "
            f"`nvidia-smi -i {gpu.index} -mig 0` gives the whole GPU back."
        )
        return replace(gpu, state="mig", problem=problem, total_bytes=0, free_bytes=0)
    if raw.get("shares_ram"):
        return replace(gpu, total_bytes=ram.total_bytes, free_bytes=ram.available_bytes, shares_ram=True)
    return gpu


def _name_holders(raw: Iterable[Sequence[int]]) -> tuple[Holder, ...]:
    """The programs by name, the largest first. One that has ended meanwhile is left out."""
    found = []
    for pid, n_bytes in raw:
        with contextlib.suppress(psutil.Error, ValueError):
            found.append(Holder(pid, psutil.Process(pid).name(), n_bytes))
    return tuple(sorted(found, key=lambda holder: (-holder.used_bytes, holder.pid)))


def _why_no_driver(error: dict[str, Any]) -> str:
    match error["code"]:
        case "no_module":
            return f"The Python package nvidia-ml-py cannot be used ({error['text']}); install it again."
        case "timeout":
            return f"The NVIDIA driver gave no answer within {error['text']} s; a reboot may mend it."
        case "crash":
            return f"The NVIDIA driver crashed when it was asked for its GPUs ({error['text']})."
        case code if code == LIBRARY_NOT_FOUND:
            if _has_card("0x10de"):
                return "An NVIDIA card is in this machine, but no NVIDIA driver is installed."
            if _has_card("0x1002"):
                return "The graphics card is AMD's; GPUs are used through CUDA, which is NVIDIA's alone."
            return "No NVIDIA driver is installed."
        case code if code == DRIVER_NOT_LOADED:
            return "The NVIDIA driver is installed but not loaded (NVML 9); try `nvidia-smi`, or reboot."
        case code if code == VERSION_MISMATCH:
            return (
                "The NVIDIA driver and its library differ in version (NVML 18), as after an update: "
                "reload the driver or reboot."
            )
        case _:
            return f"The NVIDIA driver cannot be used: {_cite(error)}; a reboot may mend it."


def _cite(error: dict[str, Any]) -> str:
    text = " ".join(str(error["text"]).split()).rstrip(".")
    return f"{text or 'no text'} (NVML {error['code']})"


def _has_card(vendor_id: str) -> bool:
    """Whether Linux sees a display controller (PCI class 03) of this vendor's."""
    for vendor in PCI_DEVICES.glob("*/vendor"):
        with contextlib.suppress(OSError):
            is_display = vendor.with_name("class").read_text().startswith("0x03")
            if is_display and vendor.read_text().strip() == vendor_id:
                return True
    return False


def _ask_driver(timeout_s: float, *, library_folder: Path | None = None) -> dict[str, Any]:
    """Run the probe. `library_folder` is searched before all others for the driver's library.

    Returns the probe's answer, or an error of the same shape with the code "timeout" or "crash".
    """
    try:
        process = start_probe(library_folder=library_folder, stdin=subprocess.DEVNULL)
    except OSError as error:
        return {"error": {"code": "crash", "text": str(error)}}
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        return {"error": {"code": "timeout", "text": f"{timeout_s:g}"}}
    if err:
        _log.debug("probe: %s", err.decode("utf-8", "replace").strip())
    try:
        answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": {"code": "crash", "text": f"exit status {process.returncode}"}}
    return answer


def start_probe(
    *arguments: str,
    library_folder: Path | None = None,
    stdin: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """The probe's process. Raises OSError."""
    environment = None
    if library_folder is not None:
        # Handed on, not read: the loader looks at this variable when a process starts.
        folders = [str(library_folder), os.environ.get("LD_LIBRARY_PATH", "")]
        environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}
    # -P keeps the script's own folder, ours, off its path.
    command = [sys.executable, "-P", str(Path(__file__).with_name("probe.py")), *arguments]
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    try:
        process.communicate(timeout=1)
    except subprocess.TimeoutExpired:
        # A process that waits inside a hung driver cannot be killed. Kept, since collecting a Popen that
        # still runs is warned about.
        _unkillable.append(process)
