"""The child process that asks the NVIDIA driver: the only importer of pynvml.

Run as a script. It prints one line of JSON and exits, so that a driver that hangs or crashes takes nothing
else with it. Light on purpose: the standard library and pynvml alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

NOT_SUPPORTED = 3
GPU_IS_LOST = 15


def main() -> None:
    """Print the driver's answer: {"driver", "gpus": [...]} or {"error": {"code", "text"}}."""
    answer = ask()
    # ASCII only: the pipe's encoding differs from system to system.
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def ask() -> dict[str, Any]:
    try:
        import pynvml as nvml
    except ImportError as error:
        return _failure("no_module", str(error))
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        # Not shut down: NVML that was never up answers a shutdown with a second error.
        return _failure(error.value, str(error))
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        gpus = [_describe(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        answer = {"driver": driver, "gpus": gpus}
    except nvml.NVMLError as error:
        answer = _failure(error.value, str(error))
    with contextlib.suppress(nvml.NVMLError):  # the answer is complete, and the process ends here anyway
        nvml.nvmlShutdown()
    return answer


def _failure(code: int | str, text: str) -> dict[str, Any]:
    return {"error": {"code": code, "text": text}}


def _describe(nvml: Any, index: int) -> dict[str, Any]:
    """One GPU. `error` is set where the driver cannot give its memory, or not even its handle."""
    gpu: dict[str, Any] = {"index": index}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return gpu | _failure(error.value, str(error))

    def read(name: str, call: Callable[[], Any]) -> None:
        try:
            gpu[name] = call()
        except nvml.NVMLError as error:
            if error.value == GPU_IS_LOST:
                gpu.update(_failure(error.value, str(error)))

    read("name", lambda: _text(nvml.nvmlDeviceGetName(handle)))
    read("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle)))
    read("pci_bus_id", lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    read("capability", lambda: list(nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    if hasattr(nvml, "nvmlDeviceGetMigMode"):
        read("is_mig", lambda: nvml.nvmlDeviceGetMigMode(handle)[0] == 1)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        gpu.update(total_bytes=int(memory.total), free_bytes=int(memory.free))
    except nvml.NVMLError as error:
        if error.value == NOT_SUPPORTED:  # one memory for CPU and GPU, as on a DGX Spark
            gpu["shares_ram"] = True
        else:
            gpu.update(_failure(error.value, str(error)))
    return gpu


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


if __name__ == "__main__":
    main()
