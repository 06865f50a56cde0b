"""Why there is no NVIDIA driver to ask, in one line with the fix. Knows NVML's error numbers and where
systems leave traces of graphics cards."""

from __future__ import annotations

import contextlib
import platform
import re
import sys
from pathlib import Path
from typing import Any, Final

ROOT = Path("/")
"""The folder that /proc, /sys and /run are below."""

DRIVER_NOT_LOADED: Final = 9
LIBRARY_NOT_FOUND: Final = 12
VERSION_MISMATCH: Final = 18

NVIDIA, AMD, INTEL = "10de", "1002", "8086"
_DISPLAY_CLASS = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"


def why_no_driver(error: dict[str, Any]) -> str:
    """`error` is the probe's: {"code", "text"}."""
    match error["code"]:
        case "no_module":
            return f"The Python package nvidia-ml-py cannot be used ({error['text']}); install it again."
        case "timeout":
            return f"The NVIDIA driver gave no answer within {error['text']} s; a reboot may mend it."
        case "crash":
            return f"The NVIDIA driver crashed when it was asked for its GPUs ({error['text']})."
        case code if code == LIBRARY_NOT_FOUND:
            return _why_no_library()
        case code if code == DRIVER_NOT_LOADED:
            if is_wsl():
                return (
                    "A Linux driver is installed, which cannot work under WSL, and Windows' is not there "
                    "(NVML 9): install or update NVIDIA's driver in Windows."
                )
            return "The NVIDIA driver is installed but not loaded (NVML 9); try `nvidia-smi`, or reboot."
        case code if code == VERSION_MISMATCH:
            return (
                "The NVIDIA driver and its library differ in version (NVML 18), as after an update: "
                "reload the driver or reboot."
            )
        case _:
            return f"The NVIDIA driver cannot be used: {cite(error)}; a reboot may mend it."


def cite(error: dict[str, Any]) -> str:
    text = " ".join(str(error["text"]).split()).rstrip(".")
    return f"{text or 'no text'} (NVML {error['code']})"


def is_wsl() -> bool:
    return "microsoft" in _text("proc/version").lower()


def is_jetson() -> bool:
    return "nvidia,tegra" in _text("proc/device-tree/compatible")


def _why_no_library() -> str:
    if platform.system() == "Darwin":
        return "GPUs are used through NVIDIA's CUDA, which macOS does not have."
    if is_wsl():
        return (
            "No NVIDIA driver was found; under WSL it is the one of Windows: install or update it there, "
            "then run `wsl --update` and `wsl --shutdown`."
        )
    if is_jetson():
        return "This Jetson's system lacks NVML, through which GPUs are found; JetPack 6 and newer have it."
    if (ROOT / "proc/driver/nvidia/version").exists():
        if _is_container():
            return (
                "The NVIDIA driver runs, but this container has no access to it: start it with `--gpus all` "
                "and the NVIDIA Container Toolkit."
            )
        return "The NVIDIA driver runs, but its library NVML is missing; install the driver again."
    cards = _makers()
    if NVIDIA in cards:
        return "An NVIDIA card is in this machine, but no NVIDIA driver is installed; install it for the GPU."
    makers = [name for id, name in ((AMD, "AMD"), (INTEL, "Intel")) if id in cards]
    if makers:
        return (
            f"The graphics of this machine are by {' and '.join(makers)}; GPUs are used through CUDA, which "
            "is NVIDIA's alone, so models run on the CPU."
        )
    return "No NVIDIA driver is installed."


def _makers() -> set[str]:
    """The PCI vendor numbers of the display controllers."""
    return _makers_in_windows() if sys.platform == "win32" else _makers_in_linux()


def _makers_in_linux() -> set[str]:
    makers = set()
    for vendor in (ROOT / "sys/bus/pci/devices").glob("*/vendor"):
        with contextlib.suppress(OSError):
            if vendor.with_name("class").read_text().startswith("0x03"):
                makers.add(vendor.read_text().strip().removeprefix("0x"))
    return makers


def _makers_in_windows() -> set[str]:
    makers: set[str] = set()
    if sys.platform == "win32":
        import winreg

        with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _DISPLAY_CLASS) as all_:
            for at in range(winreg.QueryInfoKey(all_)[0]):
                with contextlib.suppress(OSError), winreg.OpenKey(all_, winreg.EnumKey(all_, at)) as one:
                    makers.add(_maker(str(winreg.QueryValueEx(one, "MatchingDeviceId")[0])))
    return makers


def _maker(device_id: str) -> str:
    """The vendor in Windows' name of a device, like pci\\ven_10de&dev_2684."""
    found = re.search(r"ven_([0-9a-f]{4})", device_id.lower())
    return found[1] if found else ""


def _is_container() -> bool:
    marks = [ROOT / ".dockerenv", ROOT / "run/.containerenv"]
    return any(mark.exists() for mark in marks) or "container=" in _text("proc/1/environ")


def _text(name: str) -> str:
    try:
        return (ROOT / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
