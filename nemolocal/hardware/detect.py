"""One look at the machine: what is there now, or what a profile says is there."""

from __future__ import annotations

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
    return detect(models_dir=config.models_dir, cuda_visible_devices=config.cuda_visible_devices)


def detect(
    *,
    models_dir: Path | None = None,
    cuda_visible_devices: str | None = None,
    timeout_s: float = driver.PROBE_TIMEOUT_S,
) -> Hardware:
    """This machine as it is now: nothing is remembered from one call to the next.

    `cuda_visible_devices` is the variable's value, None when unset. Never raises on what a driver does: a
    GPU that cannot be used says so in its `state`, and `reason` says why the mode is what it is. Blocks
    for tens of milliseconds, and for up to `timeout_s` seconds where the driver hangs.
    """
    ram = host.read_ram()
    found = driver.find_gpus(ram, timeout_s=timeout_s)
    gpus, remark = driver.visible(found.gpus, cuda_visible_devices)
    usable = [gpu for gpu in gpus if gpu.state == "ok"]
    return Hardware(
        mode="gpu" if usable else "cpu",
        reason=_reason(gpus, usable, found.problem or remark),
        gpus=gpus,
        cpu=host.read_cpu(),
        ram=ram,
        disk_free_bytes=host.free_disk_bytes(models_dir) if models_dir else 0,
        warnings=engine_build.warnings(usable, found.cuda),
    )


def _reason(gpus: tuple[Gpu, ...], usable: list[Gpu], problem: str) -> str:
    parts = [problem]
    if usable:
        parts.insert(0, f"{len(usable)} NVIDIA GPU{'s' if len(usable) > 1 else ''} can be used.")
    parts += [f"GPU {gpu.index}: {gpu.problem}" for gpu in gpus if gpu.problem]
    return " ".join(filter(None, parts))
