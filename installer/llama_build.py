"""Which build of llama-cpp-python belongs on this machine, and what of the machine decides it.

Chooses only; installing is the environment's. `choices` is pure: a machine in, builds in the order of
preference out, each with its reason.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Version = tuple[int, int]

# llama-cpp-python's own index of prebuilt wheels, as its README documents it
INDEX = "https://abetlen.github.io/llama-cpp-python/whl/"


@dataclass(frozen=True)
class CudaIndex:
    """One part of the index: wheels for CUDA `version`, with code for GPUs of compute capability
    `oldest_gpu` to `newest_gpu`."""

    name: str
    version: Version
    oldest_gpu: Version = (6, 0)
    newest_gpu: Version = (99, 0)


CUDA_INDEXES = (
    CudaIndex("cu132", (13, 2), oldest_gpu=(7, 5)),
    CudaIndex("cu130", (13, 0), oldest_gpu=(7, 5)),
    CudaIndex("cu125", (12, 5)),
    CudaIndex("cu124", (12, 4)),
    CudaIndex("cu123", (12, 3)),
    CudaIndex("cu122", (12, 2)),
    CudaIndex("cu121", (12, 1)),
    CudaIndex("cu118", (11, 8), newest_gpu=(8, 9)),
)

# The wheels leave the CUDA runtime and cuBLAS out. NVIDIA packages both; within a major version a newer
# one serves an older program and an older driver.
RUNTIME_PACKAGES = {
    11: ("nvidia-cuda-runtime-cu11>=11.8", "nvidia-cublas-cu11>=11.11"),
    12: ("nvidia-cuda-runtime-cu12>=12.5", "nvidia-cublas-cu12>=12.5"),
    13: ("nvidia-cuda-runtime>=13.0,<14", "nvidia-cublas>=13.0,<14"),
}


@dataclass(frozen=True)
class Machine:
    """What decides the build. `driver` is the newest CUDA that the NVIDIA driver serves, None without one;
    `gpus` their compute capabilities, empty when unknown; `nvcc` the CUDA compiler's path and version;
    `has_cached_build` says that pip keeps a CPU build from before; `cmake_args` is the user's CMAKE_ARGS."""

    system: str
    driver: Version | None = None
    gpus: tuple[Version, ...] = ()
    nvcc: tuple[str, Version] | None = None
    has_compiler: bool = True
    has_cached_build: bool = False
    cmake_args: str = ""


@dataclass(frozen=True)
class Build:
    """One way to get the engine. `index` is where a prebuilt wheel lies, None means to compile;
    `cuda` is the CUDA version that it needs at run time, None for a build without."""

    kind: Literal["wheel", "source"]
    name: str
    reason: str
    index: str | None = None
    cuda: Version | None = None
    cmake_args: str = ""
    nvcc: str = ""

    @property
    def title(self) -> str:
        return self.reason[0].upper() + self.reason[1:]


def choices(machine: Machine) -> list[Build]:
    """The builds to try, best first. The list ends with one that runs on the CPU alone; it holds nothing
    to compile where there is no compiler, unless the user asked for it with CMAKE_ARGS."""
    if machine.cmake_args:
        return [
            Build(
                "source", "custom", f"as CMAKE_ARGS says: {machine.cmake_args}", cmake_args=machine.cmake_args
            )
        ]
    builds = [*_cuda_wheels(machine), *_cuda_source(machine)]
    why = "no NVIDIA driver was found"
    if machine.driver:
        why = f"no build for the driver's CUDA {_text(machine.driver)} can be had; the GPU stays unused"
    if machine.system == "Darwin":
        why = "with Metal where the processor has it"
    if machine.has_compiler or machine.has_cached_build:
        builds.append(Build("source", "cpu", f"compiled for this machine's CPU: {why}"))
    else:
        part = "metal" if machine.system == "Darwin" else "cpu"
        builds.append(
            Build(
                "wheel",
                part,
                f"prebuilt for the CPU, since no C++ compiler is here: {why}",
                index=f"{INDEX}{part}",
            )
        )
    return builds


def _cuda_wheels(machine: Machine) -> list[Build]:
    driver = machine.driver
    if driver is None:
        return []
    return [
        Build(
            "wheel",
            index.name,
            f"prebuilt for CUDA {_text(index.version)}: the driver serves CUDA {_text(driver)}",
            index=f"{INDEX}{index.name}",
            cuda=index.version,
        )
        for index in CUDA_INDEXES
        if index.version <= driver
        and all(index.oldest_gpu <= gpu <= index.newest_gpu for gpu in machine.gpus)
    ]


def _cuda_source(machine: Machine) -> list[Build]:
    """A CUDA build cannot even be loaded without a driver, nor with one of an older major version."""
    if machine.driver is None or machine.nvcc is None or not machine.has_compiler:
        return []
    path, version = machine.nvcc
    if version[0] > machine.driver[0]:
        return []
    why = f"compiled for CUDA {_text(version)} with {path}"
    return [Build("source", "cuda", why, cuda=version, cmake_args="-DGGML_CUDA=on", nvcc=path)]


@dataclass(frozen=True)
class Installed:
    """The build that a finished set-up left, and what it was chosen for."""

    name: str
    cuda: Version | None
    driver: Version | None
    cmake_args: str

    def still_fits(self, *, driver: Version | None, cmake_args: str) -> bool:
        """Whether it need not be chosen anew: a driver that came, went or became too old asks for that;
        one that was merely updated does not, unless the GPU was left unused for want of a build."""
        if cmake_args and cmake_args != self.cmake_args:
            return False
        if self.cuda is not None:
            return driver is not None and driver >= min(self.cuda, self.driver or self.cuda)
        return self.name == "custom" or driver is None or driver == self.driver


def compiler_fix(system: str, has: Callable[[str], object] = shutil.which) -> str:
    """How to get a C++ compiler here, in one sentence. `has` tells whether a program is there."""
    if system == "Darwin":
        return "Run: xcode-select --install, then the same command again."
    if system == "Windows":
        return (
            "Install the Visual Studio Build Tools, then run the same command again: "
            "winget install Microsoft.VisualStudio.2022.BuildTools "
            '--override "--wait --passive --add Microsoft.VisualStudio.Workload.VCTools --includeRecommended"'
        )
    installers = {
        "apt-get": "apt-get install g++",
        "dnf": "dnf install gcc-c++",
        "zypper": "zypper install gcc-c++",
        "pacman": "pacman -S gcc",
        "apk": "apk add g++ linux-headers",
    }
    for tool, words in installers.items():
        if has(tool):
            return f"Run: {as_root(words)}, then the same command again."
    return "Install g++ or clang++, then run the same command again."


def as_root(words: str) -> str:
    """A command line as this user has to type it."""
    return words if os.name == "posix" and os.geteuid() == 0 else f"sudo {words}"


def look() -> Machine:
    """See what this machine has. Takes up to some seconds."""
    driver = find_driver()
    smi = (
        "" if driver is None else _output([_nvidia_smi(), "--query-gpu=compute_cap", "--format=csv,noheader"])
    )
    return Machine(
        system=platform.system(),
        driver=driver,
        gpus=parse_compute_capabilities(smi),
        nvcc=_find_nvcc(),
        has_compiler=_has_compiler(),
        cmake_args=os.environ.get("CMAKE_ARGS", "").strip(),
    )


def find_driver() -> Version | None:
    """The newest CUDA version that the NVIDIA driver serves, None where there is none. Asks the driver's
    library, which takes milliseconds, and nvidia-smi where the library is not on the search path."""
    if sys.platform == "darwin":
        return None
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        if library.cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value > 0:
            return number.value // 1000, number.value % 1000 // 10
    except (OSError, AttributeError):
        pass
    return parse_smi_version(_output([_nvidia_smi()])) if _nvidia_smi() else None


def parse_smi_version(text: str) -> Version | None:
    """The CUDA version in the head of nvidia-smi's table."""
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def parse_compute_capabilities(text: str) -> tuple[Version, ...]:
    """One capability a line, as nvidia-smi lists them; older drivers answer with an error instead."""
    found = [re.fullmatch(r"\s*(\d+)\.(\d+)\s*", line) for line in text.splitlines()]
    return tuple((int(match[1]), int(match[2])) for match in found if match)


def parse_nvcc_version(text: str) -> Version | None:
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _nvidia_smi() -> str:
    places = ["nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi"]
    return next((path for place in places if (path := shutil.which(place))), "")


def _find_nvcc() -> tuple[str, Version] | None:
    places = ["nvcc"]
    for variable in ("CUDACXX", "CUDA_PATH", "CUDA_HOME"):
        if value := os.environ.get(variable):
            places.append(value if variable == "CUDACXX" else str(Path(value, "bin", "nvcc")))
    places.append("/usr/local/cuda/bin/nvcc")
    for place in places:
        path = shutil.which(place)
        version = parse_nvcc_version(_output([path, "--version"])) if path else None
        if path and version:
            return path, version
    return None


def _has_compiler() -> bool:
    if chosen := os.environ.get("CXX", "").split():
        return shutil.which(chosen[0]) is not None
    if sys.platform == "win32":
        return _has_visual_studio() or any(map(shutil.which, ("cl", "g++", "clang++")))
    if sys.platform == "darwin":  # /usr/bin/c++ is there without the tools, and only asks to install them
        return bool(_output(["xcode-select", "-p"]).strip())
    return any(map(shutil.which, ("c++", "g++", "clang++")))


def _has_visual_studio() -> bool:
    folder = os.environ.get("PROGRAMFILES(X86)", r"C:\Program Files (x86)")
    where = Path(folder, "Microsoft Visual Studio", "Installer", "vswhere.exe")
    part = "Microsoft.VisualStudio.Component.VC.Tools.x86.x64"
    return bool(
        _output([str(where), "-products", "*", "-requires", part, "-property", "installationPath"]).strip()
    )


def _output(command: list[str]) -> str:
    """What a program prints; "" where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
