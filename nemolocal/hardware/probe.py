"""The child process that asks the NVIDIA driver: the only importer of pynvml.

Run as a script. It prints one line of JSON and exits, so that a driver that hangs or crashes takes nothing
else with it; with `--every SECONDS` it prints a line each so often, until its stdin is closed. Light on
purpose: the standard library and pynvml alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

NOT_SUPPORTED = 3
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
N_LINKS_MOST = 18
N_SLICES_MOST = 7
SENSOR_TEMPERATURE = 0
LINK_IS_ACTIVE = 1


def main() -> None:
    """Print the driver's answer: {"driver", "cuda", "has_cuda_library", "gpus": [...]} or
    {"error": {"code", "text"}}."""
    if "--every" not in sys.argv:
        _print(ask())
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        _print(ask())
        time.sleep(float(sys.argv[-1]))


def _end_with_parent() -> None:
    """The pipe to the parent is closed when it ends, however it ends."""
    sys.stdin.buffer.read()
    os._exit(0)


def _print(answer: dict[str, Any]) -> None:
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
        gpus = [gpu for index in range(nvml.nvmlDeviceGetCount()) for gpu in _describe_all(nvml, index)]
        answer = {"driver": driver, **_cuda(nvml), "gpus": gpus}
    except nvml.NVMLError as error:
        answer = _failure(error.value, str(error))
    with contextlib.suppress(nvml.NVMLError):  # the answer is complete, and the process ends here anyway
        nvml.nvmlShutdown()
    return answer


def _failure(code: int | str, text: str) -> dict[str, Any]:
    return {"error": {"code": code, "text": text}}


def _cuda(nvml: Any) -> dict[str, Any]:
    """`cuda` is the newest version that the driver runs, as 1000 * major + 10 * minor; 0 where it does not
    say. `has_cuda_library` is false where the driver's libcuda cannot be found, which NVML can do without."""
    for name in ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"):
        try:
            return {"cuda": int(getattr(nvml, name)()), "has_cuda_library": True}
        except nvml.NVMLError as error:
            if error.value == LIBRARY_NOT_FOUND:
                return {"cuda": 0, "has_cuda_library": False}
        except AttributeError:
            pass  # an older pynvml
    return {"cuda": 0, "has_cuda_library": True}


def _describe_all(nvml: Any, index: int) -> Iterator[dict[str, Any]]:
    """One GPU, and the slices that MIG has cut it into."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        yield {"index": index} | _failure(error.value, str(error))
        return
    gpu = _describe(nvml, handle, index)
    yield gpu
    if gpu.get("is_mig"):
        for at in range(N_SLICES_MOST):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, at)
            except nvml.NVMLError:
                continue  # fewer slices than there could be
            slice_ = _describe(nvml, part, index)
            slice_.update(is_slice=True, is_mig=False, capability=gpu.get("capability", []))
            yield slice_


def _describe(nvml: Any, handle: Any, index: int) -> dict[str, Any]:
    """One device. `error` is set where the driver cannot give its memory."""
    gpu: dict[str, Any] = {"index": index}

    def read(name: str, call: Callable[[], Any]) -> None:
        try:
            gpu[name] = call()
        except nvml.NVMLError as error:
            if error.value == GPU_IS_LOST:
                gpu.update(_failure(error.value, str(error)))
        except AttributeError:
            pass  # an older pynvml

    read("name", lambda: _text(nvml.nvmlDeviceGetName(handle)))
    read("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle)))
    read("pci_bus_id", lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    read("capability", lambda: list(nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    read("is_mig", lambda: nvml.nvmlDeviceGetMigMode(handle)[0] == 1)
    read("compute_mode", lambda: nvml.nvmlDeviceGetComputeMode(handle))
    read("load", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
    read("temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, SENSOR_TEMPERATURE))
    read("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
    read("n_links", lambda: _n_links(nvml, handle))
    holders: dict[int, int] = {}
    for kind in ("Compute", "Graphics"):
        read(kind, lambda kind=kind: holders.update(_holders(nvml, handle, kind)))  # type: ignore[misc]
        gpu.pop(kind, None)
    gpu["holders"] = sorted(holders.items())
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        gpu.update(total_bytes=int(memory.total), free_bytes=int(memory.free))
    except nvml.NVMLError as error:
        if error.value == NOT_SUPPORTED:  # one memory for CPU and GPU, as on a DGX Spark
            gpu["shares_ram"] = True
        else:
            gpu.update(_failure(error.value, str(error)))
    return gpu


def _holders(nvml: Any, handle: Any, kind: str) -> dict[int, int]:
    """Bytes that each process holds, by its number; 0 where the driver does not say, as on Windows."""
    name = f"nvmlDeviceGet{kind}RunningProcesses"
    try:
        found = getattr(nvml, name)(handle)
    except nvml.NVMLError as error:
        if error.value != FUNCTION_NOT_FOUND:
            raise
        found = getattr(nvml, f"{name}_v2")(handle)  # drivers before 510
    return {int(process.pid): int(process.usedGpuMemory or 0) for process in found}


def _n_links(nvml: Any, handle: Any) -> int:
    """Active NVLinks; the first number that the card has not ends the count."""
    n = 0
    for link in range(N_LINKS_MOST):
        try:
            n += nvml.nvmlDeviceGetNvLinkState(handle, link) == LINK_IS_ACTIVE
        except nvml.NVMLError:
            break
    return n


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


if __name__ == "__main__":
    main()
