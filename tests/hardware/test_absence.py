"""Why there is no GPU: each machine has its own reason, with its fix."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from nemolocal import hardware
from nemolocal.hardware import absence
from tests.hardware.conftest import Install, gpu, write

WSL = {"proc/version": "Linux version 6.6.87-microsoft-standard-WSL2\n"}


def card(vendor: str, kind: str = "0x030000", at: str = "0000:03:00.0") -> dict[str, str]:
    folder = f"sys/bus/pci/devices/{at}"
    return {f"{folder}/vendor": f"{vendor}\n", f"{folder}/class": f"{kind}\n"}


MACHINES = {
    "nothing": (12, {}, "No NVIDIA driver is installed"),
    "card without a driver": (12, card("0x10de"), "install it for the GPU"),
    "AMD": (12, card("0x1002"), "by AMD; GPUs are used through CUDA"),
    "Intel": (12, card("0x8086"), "by Intel; GPUs are used through CUDA"),
    "Intel and AMD": (12, card("0x8086") | card("0x1002", "0x038000", "0000:04:00.0"), "by AMD and Intel"),
    "Intel beside NVIDIA": (
        12,
        card("0x8086") | card("0x10de", "0x030200", "0000:04:00.0"),
        "An NVIDIA card is in this machine",
    ),
    "a network card": (12, card("0x8086", "0x020000"), "No NVIDIA driver is installed"),
    "WSL": (12, WSL, "wsl --update"),
    "WSL with a Linux driver": (9, WSL, "NVIDIA's driver in Windows"),
    "container without access": (
        12,
        card("0x10de") | {"proc/driver/nvidia/version": "580", ".dockerenv": ""},
        "--gpus all",
    ),
    "podman": (12, {"proc/driver/nvidia/version": "580", "run/.containerenv": ""}, "--gpus all"),
    "half a driver": (12, {"proc/driver/nvidia/version": "580"}, "install the driver again"),
    "Jetson": (12, {"proc/device-tree/compatible": "nvidia,p3737\0nvidia,tegra234\0"}, "JetPack 6"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_reason(nvml: Install, root: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    code, files, words = MACHINES[name]
    monkeypatch.setattr("sys.platform", "linux")
    write(root, files)
    nvml(init=code)
    found = hardware.detect()
    assert (found.mode, found.gpus, found.warnings) == ("cpu", (), ())
    assert words in found.reason
    assert "\n" not in found.reason


def test_mac(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert "macOS" in absence.why_no_driver({"code": 12, "text": ""})


@pytest.mark.parametrize(
    ("device_id", "maker"),
    [
        (r"PCI\VEN_10DE&DEV_2684&SUBSYS_16F410DE", absence.NVIDIA),
        (r"pci\ven_8086&dev_7d55", absence.INTEL),
        (r"root\basicdisplay", ""),
    ],
)
def test_cards_as_windows_names_them(device_id: str, maker: str) -> None:
    assert absence._maker(device_id) == maker


def test_a_jetsons_gpu_is_named_by_its_number(nvml: Install, root: Path) -> None:
    write(root, {"proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0"})
    nvml(gpus=[gpu("Orin (nvgpu)", "1833c8b5-9aa0-5382-b784-68b7e77eb185", capability=[8, 7], memory=[3])])
    (found,) = hardware.detect().gpus
    assert (found.uuid, found.state, found.shares_ram) == ("0", "ok", True)
