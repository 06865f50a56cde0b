"""Which build of the engine belongs on which machine."""

from __future__ import annotations

from pathlib import Path

import llama_build
import pytest
from llama_build import Installed, Machine, choices


def names(machine: Machine) -> list[str]:
    return [build.name for build in choices(machine)]


@pytest.mark.parametrize(
    ("driver", "first"),
    [
        ((13, 2), "cu132"),
        ((13, 5), "cu132"),
        ((13, 1), "cu130"),
        ((12, 8), "cu125"),
        ((12, 5), "cu125"),
        ((12, 4), "cu124"),
        ((12, 1), "cu121"),
        ((12, 0), "cu118"),
        ((11, 8), "cu118"),
    ],
)
def test_newest_wheel_that_the_driver_serves_comes_first(driver: tuple[int, int], first: str) -> None:
    builds = choices(Machine("Linux", driver=driver))
    assert builds[0].name == first
    assert builds[0].index == f"https://abetlen.github.io/llama-cpp-python/whl/{first}"
    assert builds[0].kind == "wheel"


def test_older_wheels_then_the_compiler_then_the_cpu_follow() -> None:
    machine = Machine("Linux", driver=(12, 2), nvcc=("/usr/bin/nvcc", (12, 2)))
    assert names(machine) == ["cu122", "cu121", "cu118", "cuda", "cpu"]
    source = choices(machine)[3]
    assert (source.kind, source.cmake_args, source.nvcc, source.cuda) == (
        "source",
        "-DGGML_CUDA=on",
        "/usr/bin/nvcc",
        (12, 2),
    )


def test_driver_too_old_for_every_wheel_compiles() -> None:
    assert names(Machine("Linux", driver=(11, 4), nvcc=("/usr/bin/nvcc", (11, 4)))) == ["cuda", "cpu"]
    builds = choices(Machine("Linux", driver=(11, 4)))
    assert [build.name for build in builds] == ["cpu"]
    assert "CUDA 11.4" in builds[0].reason
    assert "GPU stays unused" in builds[0].reason


def test_no_driver_means_the_cpu_even_with_a_cuda_compiler() -> None:
    """A CUDA build cannot be loaded without the driver's library."""
    machine = Machine("Linux", nvcc=("/usr/local/bin/nvcc", (13, 0)))
    assert names(machine) == ["cpu"]
    assert choices(machine)[0].reason == "compiled for this machine's CPU: no NVIDIA driver was found"


def test_compiler_newer_than_the_driver_is_not_used() -> None:
    assert "cuda" not in names(Machine("Linux", driver=(12, 4), nvcc=("nvcc", (13, 0))))


@pytest.mark.parametrize(
    ("gpus", "first"),
    [
        (((6, 1),), "cu125"),  # CUDA 13 has no code for Pascal
        (((8, 9), (6, 1)), "cu125"),  # the oldest of two decides
        (((7, 5),), "cu132"),
        (((12, 0),), "cu132"),
        ((), "cu132"),
    ],
)
def test_wheel_has_code_for_every_gpu(gpus: tuple[tuple[int, int], ...], first: str) -> None:
    assert names(Machine("Linux", driver=(13, 2), gpus=gpus))[0] == first


def test_gpu_newer_than_a_wheel_skips_it() -> None:
    assert "cu118" not in names(Machine("Linux", driver=(12, 1), gpus=((9, 0),)))


def test_without_a_compiler_a_prebuilt_cpu_wheel_is_left() -> None:
    build = choices(Machine("Windows", has_compiler=False))[-1]
    assert build.index == "https://abetlen.github.io/llama-cpp-python/whl/cpu"
    mac = choices(Machine("Darwin", has_compiler=False))[-1]
    assert mac.index == "https://abetlen.github.io/llama-cpp-python/whl/metal"


def test_build_that_pip_kept_needs_no_compiler() -> None:
    assert choices(Machine("Linux", has_compiler=False, has_cached_build=True))[-1].kind == "source"


def test_users_cmake_args_decide() -> None:
    builds = choices(Machine("Linux", driver=(12, 8), cmake_args="-DGGML_VULKAN=on"))
    assert [(build.kind, build.cmake_args) for build in builds] == [("source", "-DGGML_VULKAN=on")]


CPU = Installed("cpu", cuda=None, driver=None, cmake_args="")
WHEEL = Installed("cu124", cuda=(12, 4), driver=(12, 6), cmake_args="")


@pytest.mark.parametrize(
    ("installed", "driver", "cmake_args", "fits"),
    [
        (CPU, None, "", True),
        (CPU, (12, 4), "", False),  # a GPU came
        (
            Installed("cpu", cuda=None, driver=(12, 4), cmake_args=""),
            (12, 4),
            "",
            True,
        ),  # was tried, and failed
        (Installed("cpu", cuda=None, driver=(12, 4), cmake_args=""), (13, 0), "", False),
        (WHEEL, (12, 6), "", True),
        (WHEEL, (13, 0), "", True),  # a newer driver serves older programs
        (WHEEL, (12, 2), "", False),
        (WHEEL, None, "", False),  # the GPU left
        (CPU, None, "-DGGML_BLAS=on", False),
        (Installed("custom", cuda=None, driver=None, cmake_args="-DGGML_BLAS=on"), None, "", True),
        (Installed("custom", cuda=None, driver=None, cmake_args="-DGGML_BLAS=on"), (12, 4), "", True),
    ],
)
def test_installed_engine_is_kept_while_it_fits(
    installed: Installed, driver: tuple[int, int] | None, cmake_args: str, fits: bool
) -> None:
    assert installed.still_fits(driver=driver, cmake_args=cmake_args) is fits


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4     |", (12, 4)),
        ("| NVIDIA-SMI 595.10   KMD Version: 595.10   CUDA UMD Version: 13.2 |", (13, 2)),
        ("| NVIDIA-SMI 390.157   Driver Version: 390.157   CUDA Version: N/A |", None),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", None),
    ],
)
def test_cuda_version_is_read_from_nvidia_smi(text: str, version: tuple[int, int] | None) -> None:
    assert llama_build.parse_smi_version(text) == version


def test_compute_capabilities_are_read_from_nvidia_smi() -> None:
    assert llama_build.parse_compute_capabilities("8.9\n12.0\n") == ((8, 9), (12, 0))
    assert llama_build.parse_compute_capabilities('Field "compute_cap" is not a valid field to query.') == ()
    assert llama_build.parse_compute_capabilities("[N/A]\n") == ()


def test_nvcc_version_is_read() -> None:
    text = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.6, V12.6.77\n"
    assert llama_build.parse_nvcc_version(text) == (12, 6)
    assert llama_build.parse_nvcc_version("") is None


@pytest.mark.parametrize(
    ("system", "tool", "words"),
    [
        ("Linux", "apt-get", "apt-get install g++"),
        ("Linux", "dnf", "dnf install gcc-c++"),
        ("Linux", "", "Install g++ or clang++"),
        ("Darwin", "", "xcode-select --install"),
        ("Windows", "", "winget install Microsoft.VisualStudio.2022.BuildTools"),
    ],
)
def test_missing_compiler_names_the_fix_of_the_platform(system: str, tool: str, words: str) -> None:
    line = llama_build.compiler_fix(system, has=lambda name: name == tool)
    assert words in line
    assert "\n" not in line


def test_user_who_is_not_root_gets_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_build.os, "geteuid", lambda: 1000, raising=False)
    assert llama_build.as_root("dnf install gcc-c++") == "sudo dnf install gcc-c++"
    monkeypatch.setattr(llama_build.os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(llama_build.os, "name", "posix")
    assert llama_build.as_root("dnf install gcc-c++") == "dnf install gcc-c++"


def test_compiler_named_by_the_user_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler") + " -std=c++17")
    assert llama_build.look().has_compiler is False
