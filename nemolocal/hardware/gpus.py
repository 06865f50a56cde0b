"""The GPUs of this machine: asks the driver in a child process, and reads the answer.

Knows nothing of NVML itself beyond its numbers; why there is no driver is absence.py's to say.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemolocal.hardware import absence, holders
from nemolocal.hardware.parts import Gpu, Ram

PROBE_TIMEOUT_S = 15.0
"""Without the persistence daemon a driver starts each GPU when it is asked: seconds on a large machine."""

WSL_FOLDER = Path("/usr/lib/wsl/lib")
"""Where WSL keeps the Windows driver's library. A Linux driver's, installed beside it, is found first and
cannot work there."""

GPU_IS_LOST = 15
RESET_REQUIRED = 16
COMPUTE_IS_PROHIBITED = 2

FASTEST_FIRST = "FASTEST_FIRST"

_log = logging.getLogger(__name__)
_unkillable: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class Found:
    """GPUs in NVML's order; `problem` says in one line why there are none, "" where there are. `cuda` is the
    newest CUDA that the driver runs, (0, 0) where it does not say. Without `has_cuda_library` it runs none.
    """

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    cuda: tuple[int, int] = (0, 0)
    has_cuda_library: bool = True


def find_gpus(ram: Ram, *, timeout_s: float = PROBE_TIMEOUT_S) -> Found:
    """Every NVIDIA GPU of the machine, also the lost ones. Never raises on what the driver does.

    `ram` stands in for the memory of a GPU that has none of its own. Blocks for up to `timeout_s`.
    """
    answer = _ask_driver(timeout_s)
    if not answer.get("gpus") and (folder := wsl_library()):
        _log.debug("first NVML library: %s", answer)
        second = _ask_driver(timeout_s, library_folder=folder)
        answer = second if second.get("gpus") else answer
    return read_answer(answer, ram)


def wsl_library() -> Path | None:
    """The folder of the Windows driver's library, None outside WSL."""
    return WSL_FOLDER if (WSL_FOLDER / "libnvidia-ml.so.1").exists() else None


def read_answer(answer: dict[str, Any], ram: Ram) -> Found:
    """What the probe has printed, as values."""
    if "gpus" not in answer:
        return Found(problem=absence.why_no_driver(answer["error"]))
    cuda = answer["cuda"] // 1000, answer["cuda"] % 1000 // 10
    gpus = tuple(_read_gpu(gpu, driver=answer["driver"], cuda=cuda, ram=ram) for gpu in answer["gpus"])
    problem = "" if gpus else "The NVIDIA driver runs, but reports no GPU."
    return Found(gpus, problem, cuda, answer["has_cuda_library"])


def visible(gpus: Sequence[Gpu], value: str | None, *, order: str = "") -> tuple[tuple[Gpu, ...], str]:
    """What CUDA_VISIBLE_DEVICES leaves of the GPUs, in its order, and a remark ("" where all is well).

    As in CUDA: entries are indices, UUIDs or beginnings of UUIDs that fit one GPU; the first entry that
    names no GPU, or one again, hides itself and all that follow. Indices count in PCI bus order, as the
    engine's process does; where `order`, CUDA_DEVICE_ORDER, asks for another that may differ, that is
    remarked, since only CUDA knows it. A GPU that MIG has cut brings its slices.
    """
    if value is None:
        return tuple(gpus), ""
    chosen, remark = _listed(gpus, value)
    is_numbered = any(part.strip().isdecimal() for part in value.split(","))
    if order.upper() == FASTEST_FIRST and is_numbered and len({gpu.name for gpu in gpus}) > 1:
        counted = (
            "Numbers in CUDA_VISIBLE_DEVICES are counted in PCI order, not fastest first as "
            "CUDA_DEVICE_ORDER asks; UUIDs are certain."
        )
        remark = " ".join(filter(None, (remark, counted)))
    return chosen, remark


def _listed(gpus: Sequence[Gpu], value: str) -> tuple[tuple[Gpu, ...], str]:
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in value.split(",")):
        matches = _named_by(entry, gpus)
        if len(matches) != 1:
            if not entry or entry == "-1":
                remark = "" if chosen else f"CUDA_VISIBLE_DEVICES is {value!r}, which hides every GPU."
            else:
                remark = f"CUDA_VISIBLE_DEVICES names {entry!r}, which is no GPU of this machine."
            return tuple(chosen), remark
        if matches[0] in chosen:
            return tuple(chosen), f"CUDA_VISIBLE_DEVICES names {entry!r} twice, which ends its list."
        parts = [gpu for gpu in gpus if matches[0].state == "mig" and _is_part(gpu, matches[0])]
        chosen += [gpu for gpu in (*matches, *parts) if gpu not in chosen]
    return tuple(chosen), ""


def _named_by(entry: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    if entry.isdecimal():
        return [gpu for gpu in gpus if gpu.index == int(entry) and not gpu.is_slice]
    if entry.lower().startswith(("gpu-", "mig-")):
        return [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())]
    return []


def _is_part(gpu: Gpu, whole: Gpu) -> bool:
    return gpu.is_slice and gpu.index == whole.index


def _read_gpu(raw: dict[str, Any], *, driver: str, cuda: tuple[int, int], ram: Ram) -> Gpu:
    gpu = Gpu(
        index=raw["index"],
        # A Jetson's NVML and CUDA know its one GPU by different UUIDs.
        uuid=str(raw["index"]) if absence.is_jetson() else raw.get("uuid", ""),
        name=raw.get("name", f"GPU {raw['index']}"),
        compute_capability=".".join(map(str, raw.get("capability", ()))),
        total_bytes=raw.get("total_bytes", 0),
        free_bytes=raw.get("free_bytes", 0),
        pci_bus_id=raw.get("pci_bus_id", ""),
        driver=driver,
        driver_cuda="" if cuda == (0, 0) else f"{cuda[0]}.{cuda[1]}",
        is_slice=raw.get("is_slice", False),
        n_links=raw.get("n_links", 0),
        holders=holders.name_all(raw.get("holders", ())),
        load=raw.get("load"),
        temperature_c=raw.get("temperature_c"),
        power_w=raw.get("power_w"),
    )
    state, problem = _state(raw)
    if state != "ok":
        gpu = replace(gpu, load=None, temperature_c=None, power_w=None, holders=())
        return replace(gpu, state=state, problem=problem, total_bytes=0, free_bytes=0)
    if raw.get("shares_ram"):
        return replace(gpu, total_bytes=ram.total_bytes, free_bytes=ram.available_bytes, shares_ram=True)
    return gpu


def _state(raw: dict[str, Any]) -> tuple[str, str]:
    """What a GPU's state is, and what is wrong where it is not "ok"."""
    code = raw.get("error", {}).get("code")
    if code == GPU_IS_LOST:
        return (
            "lost",
            "The GPU has fallen off the bus (NVML 15), as after a suspend; a reboot brings it back.",
        )
    if raw.get("is_mig"):  # asked before other errors: who may use a slice alone may not ask for the whole
        return "mig", (
            "MIG has cut this GPU into slices, which are used in its place; "
            f"`nvidia-smi -i {raw['index']} -mig 0` gives the whole GPU back."
        )
    if code == RESET_REQUIRED:
        return "error", (
            "The GPU must be reset before it works again (NVML 16): "
            f"`nvidia-smi -i {raw['index']} --gpu-reset`, or reboot."
        )
    if code is not None:
        return "error", f"The driver cannot read this GPU: {absence.cite(raw['error'])}."
    if raw.get("compute_mode") == COMPUTE_IS_PROHIBITED:
        return "error", (
            "The GPU's compute mode prohibits CUDA: "
            f"`nvidia-smi -i {raw['index']} -c DEFAULT` as administrator allows it."
        )
    return "ok", ""


def _ask_driver(timeout_s: float, *, library_folder: Path | None = None) -> dict[str, Any]:
    """Run the probe. `library_folder` is searched before all others for the driver's library.

    Returns the probe's answer, or an error of the same shape with the code "timeout" or "crash". While an
    earlier probe still hangs in the driver no other is sent after it.
    """
    if _still_hangs():
        return {"error": {"code": "timeout", "text": f"{timeout_s:g}"}}
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


def _still_hangs() -> bool:
    """Whether a probe that could not be killed is still there. Those that have ended are let go."""
    for process in list(_unkillable):
        if process.poll() is not None:
            _unkillable.remove(process)
            for pipe in filter(None, (process.stdout, process.stderr)):
                pipe.close()
    return bool(_unkillable)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    try:
        process.communicate(timeout=1)
    except subprocess.TimeoutExpired:
        # A process that waits inside a hung driver cannot be killed. Kept, since collecting a Popen that
        # still runs is warned about.
        _unkillable.append(process)
