"""One look at the machine: what is there now, or what a profile says is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nemolocal.config import Config
from nemolocal.hardware import engine_build, host
from nemolocal.hardware import gpus as driver
from nemolocal.hardware.parts import Gpu, Hardware
from nemolocal.hardware.profile import load_profile


def survey(config: Config) -> Hardware:
    """The machine that the settings speak of: the profile's where one is set, else this one as it is now.

    Raises ConfigError for a profile that cannot be used.
    """
    if config.settings.hardware:
        return load_profile(config.settings.hardware, models_dir=config.models_dir)
    return detect(
        models_dir=config.models_dir,
        cuda_visible_devices=config.cuda_visible_devices,
        cuda_device_order=config.cuda_device_order,
    )


def detect(
    *,
    models_dir: Path | None = None,
    cuda_visible_devices: str | None = None,
    cuda_device_order: str = "",
    timeout_s: float = driver.PROBE_TIMEOUT_S,
) -> Hardware:
    """This machine as it is now: nothing is remembered from one call to the next.

    `cuda_visible_devices` and `cuda_device_order` are the variables' values, None or "" when unset. Never
    raises on what a driver does: a GPU that cannot be used, by the installed engine above all, says so in its
    `state`, and `reason` says why the mode is what it is. Blocks for tens of milliseconds, and for up to
    `timeout_s` seconds where the driver hangs.
    """
    ram = host.read_ram()
    build = engine_build.find()
    found = driver.find_gpus(ram, timeout_s=timeout_s)
    gpus, remark = driver.visible(found.gpus, cuda_visible_devices, order=cuda_device_order)
    gpus = tuple(_for_engine(gpu, build, found) for gpu in gpus)
    return Hardware(
        mode="gpu" if any(gpu.state == "ok" for gpu in gpus) else "cpu",
        reason=_reason(gpus, found.problem or remark),
        gpus=gpus,
        cpu=host.read_cpu(),
        ram=ram,
        disk_free_bytes=host.free_disk_bytes(models_dir) if models_dir else 0,
        engine=str(build or ""),
        warnings=tuple(dict.fromkeys(gpu.problem for gpu in gpus if gpu.state == "unused")),
    )


def _for_engine(gpu: Gpu, build: engine_build.Build | None, found: driver.Found) -> Gpu:
    """A healthy GPU that the installed engine cannot use is told from one that it can."""
    if gpu.state != "ok":
        return gpu
    problem = engine_build.hindrance(
        build, gpu, driver_cuda=found.cuda, has_cuda_library=found.has_cuda_library
    )
    return replace(gpu, state="unused", problem=problem) if problem else gpu


def _reason(gpus: tuple[Gpu, ...], problem: str) -> str:
    usable = [gpu for gpu in gpus if gpu.state == "ok"]
    whole, slices = (_count(usable, is_slice=is_slice) for is_slice in (False, True))
    can = " and ".join(filter(None, (whole, slices)))
    # What keeps the engine from a GPU is often the same for all, and names the GPU where it is not.
    told = [gpu.problem if gpu.state == "unused" else f"GPU {gpu.index}: {gpu.problem}" for gpu in gpus]
    problems = dict.fromkeys(text for text, gpu in zip(told, gpus, strict=True) if gpu.problem)
    return " ".join(filter(None, [f"{can} can be used." if can else "", problem, *problems]))


def _count(usable: list[Gpu], *, is_slice: bool) -> str:
    n = sum(gpu.is_slice == is_slice for gpu in usable)
    what = "MIG slice" if is_slice else "NVIDIA GPU"
    return f"{n} {what}{'s' if n > 1 else ''}" if n else ""
