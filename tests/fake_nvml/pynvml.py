"""Stands in for NVIDIA's module in the probe's process: tests put this folder on PYTHONPATH.

The file that FAKE_NVML names holds the machine as JSON: `init` (an error code), `gpus` (each with name,
uuid, bus, capability, and `memory`: a list of [total, free] or error codes, one for each look, the last
for ever; perhaps links, load, temperature, power, mode, processes, `windows`, which are processes that
draw, and `slices`, which are such GPUs themselves), `cuda` (its version) or `cuda_error` (a code), `is_old`
for a driver that lacks the newer functions, and `behaviour` (see nvmlInit). `library` is a word: where
LD_LIBRARY_PATH holds it, `init` is no error and `gpus_of_library` are the GPUs.
"""

# ruff: noqa: N802 - the names are NVIDIA's

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

_file = Path(os.environ["FAKE_NVML"])
_machine = json.loads(_file.read_text())
_is_up = False

_TEXTS = {
    1: "Uninitialized",
    3: "Not Supported",
    4: "Insufficient Permissions",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    16: "GPU requires reset",
    18: "RM has detected an NVML/RM version mismatch.",
    999: "Unknown Error",
}


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(value)
        self.value = value

    def __str__(self):
        return _TEXTS.get(self.value, f"code {self.value}")


def nvmlInit():
    global _is_up
    match _machine.get("behaviour"):
        case "hang":
            time.sleep(60)
        case "hang for ever":  # a child of our own keeps the pipe open after we are killed
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3)"])
            time.sleep(60)
        case "crash":
            os.abort()
        case "chatter":
            print("a library prints what it likes")
    word = _machine.get("library", "")
    is_library = bool(word) and word in os.environ.get("LD_LIBRARY_PATH", "")
    if _machine.get("init") and not is_library:
        raise NVMLError(_machine["init"])
    if is_library and "gpus_of_library" in _machine:
        _machine["gpus"] = _machine.pop("gpus_of_library")
    _is_up = True


def nvmlShutdown():
    if not _is_up:
        raise NVMLError(1)


def nvmlSystemGetDriverVersion():
    return b"580.95.05"


def nvmlDeviceGetCount():
    return len(_machine.get("gpus", []))


def nvmlDeviceGetHandleByIndex(index):
    if _machine["gpus"][index].get("handle"):
        raise NVMLError(_machine["gpus"][index]["handle"])
    return index


def _newer():
    if _machine.get("is_old"):
        raise NVMLError(13)


def nvmlSystemGetCudaDriverVersion():
    return _machine.get("cuda", 13000)


def nvmlSystemGetCudaDriverVersion_v2():
    _newer()
    if code := _machine.get("cuda_error"):
        raise NVMLError(code)
    return nvmlSystemGetCudaDriverVersion()


def _device(handle):
    if isinstance(handle, tuple):
        return _machine["gpus"][handle[0]]["slices"][handle[1]]
    return _machine["gpus"][handle]


def _fact(handle, name):
    if name not in _device(handle):
        raise NVMLError(3)
    return _device(handle)[name]


def nvmlDeviceGetName(handle):
    return _device(handle)["name"]


def nvmlDeviceGetUUID(handle):
    return _device(handle)["uuid"]


def nvmlDeviceGetPciInfo(handle):
    return SimpleNamespace(busId=_fact(handle, "bus").encode())


def nvmlDeviceGetCudaComputeCapability(handle):
    return tuple(_fact(handle, "capability"))


def nvmlDeviceGetMigMode(handle):
    return [_fact(handle, "mig"), 0]


def nvmlDeviceGetMigDeviceHandleByIndex(handle, at):
    if at >= len(_device(handle).get("slices", [])):
        raise NVMLError(6)
    return (handle, at)


def nvmlDeviceGetComputeMode(handle):
    return _fact(handle, "mode")


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=_fact(handle, "load"), memory=0)


def nvmlDeviceGetTemperature(handle, sensor):
    return _fact(handle, "temperature")


def nvmlDeviceGetPowerUsage(handle):
    return _fact(handle, "power") * 1000


def nvmlDeviceGetNvLinkState(handle, link):
    if link >= 18:
        raise NVMLError(2)
    return int(link < _fact(handle, "links"))


def nvmlDeviceGetComputeRunningProcesses(handle):
    _newer()
    return nvmlDeviceGetComputeRunningProcesses_v2(handle)


def nvmlDeviceGetComputeRunningProcesses_v2(handle):
    return [SimpleNamespace(pid=p, usedGpuMemory=n) for p, n in _device(handle).get("processes", [])]


def nvmlDeviceGetGraphicsRunningProcesses(handle):
    _newer()
    return nvmlDeviceGetGraphicsRunningProcesses_v2(handle)


def nvmlDeviceGetGraphicsRunningProcesses_v2(handle):
    return [SimpleNamespace(pid=p, usedGpuMemory=n) for p, n in _device(handle).get("windows", [])]


def nvmlDeviceGetMemoryInfo(handle):
    memory = _device(handle)["memory"]
    now = memory.pop(0) if len(memory) > 1 else memory[0]
    _file.write_text(json.dumps(_machine))
    if isinstance(now, int):
        raise NVMLError(now)
    return SimpleNamespace(total=now[0], free=now[1], used=now[0] - now[1])
