"""What the installed llama-cpp-python was built for, told from its files: to import it is for the engine's
process alone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from nemolocal.hardware.parts import Gpu

_CUDA_LIBRARIES = ("libggml-cuda.so", "ggml-cuda.dll")
_LIBRARIES = ("libggml-base.so", "ggml-base.dll")
_RUNTIME = re.compile(rb"libcudart\.so\.(\d+)|cudart64_(\d+)\.dll")

OLDEST_GPU: Final = {12: (5, 0), 13: (7, 5)}
"""The least compute capability that CUDA's compiler of a major version makes code for (release notes)."""


@dataclass(frozen=True, slots=True)
class Build:
    """`has_cuda` is None where the files do not tell; `cuda_major` is the CUDA that it needs, 0 where it does
    not say."""

    version: str = ""
    has_cuda: bool | None = None
    cuda_major: int = 0

    def __str__(self) -> str:
        kinds = {None: "", False: "for the CPU alone", True: "with CUDA"}
        kind = f"with CUDA {self.cuda_major}" if self.cuda_major else kinds[self.has_cuda]
        return " ".join(filter(None, ["llama-cpp-python", self.version, kind]))


def find() -> Build | None:
    """The installed build; None where there is none."""
    folder = library_folder()
    if folder is None:
        return None
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:  # the package's folder alone, on the path
        version = ""
    library = next((folder / name for name in _CUDA_LIBRARIES if (folder / name).is_file()), None)
    if library is not None:
        return Build(version, has_cuda=True, cuda_major=cuda_major(library))
    # Elsewhere than beside the package, or in one piece, the libraries are whose who built them.
    is_usual = any((folder / name).is_file() for name in _LIBRARIES)
    return Build(version, has_cuda=False if is_usual else None)


def hindrance(
    build: Build | None, gpu: Gpu, *, driver_cuda: tuple[int, int], has_cuda_library: bool = True
) -> str:
    """What keeps this build from using a healthy GPU, and the fix; "" where nothing does. `driver_cuda` is
    the newest CUDA that the driver runs, (0, 0) where it does not say."""
    if not has_cuda_library:
        return (
            "The driver's CUDA library (libcuda) is missing, so models run on the CPU, many times slower: "
            "start a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility; elsewhere install the driver "
            "anew."
        )
    if build is None or build.has_cuda is None:
        return ""
    if not build.has_cuda:
        return (
            "The installed llama-cpp-python was built without CUDA, so models run on the CPU, many times "
            f"slower: {_fix()}."
        )
    major = build.cuda_major
    if major and driver_cuda != (0, 0) and driver_cuda[0] < major:
        return (
            f"The NVIDIA driver {gpu.driver} runs CUDA up to {driver_cuda[0]}.{driver_cuda[1]}, but the "
            f"installed llama-cpp-python needs CUDA {major}, so models run on the CPU: update the driver, or "
            f"{_fix()}."
        )
    capability = tuple(int(part) for part in gpu.compute_capability.split(".") if part.isdecimal())
    if capability and capability < OLDEST_GPU.get(major, (0, 0)):
        return (
            f"The {gpu.name} (compute capability {gpu.compute_capability}) is too old for CUDA {major}, with "
            f"which the installed llama-cpp-python was built: {_fix()}."
        )
    return ""


def _fix() -> str:
    """The set-up keeps a build that it once chose for this driver, unless its notes are gone."""
    notes = Path(sys.prefix) / "setup.json"
    if notes.is_file():
        return f"delete {notes} and run `python3 installer/run.py` for a build that fits this machine"
    return "install it again with CMAKE_ARGS=-DGGML_CUDA=on and NVIDIA's CUDA toolkit"


def library_folder() -> Path | None:
    """Where the package keeps its libraries, None when it is not installed."""
    try:
        found = importlib.util.find_spec("llama_cpp")
    except (ImportError, ValueError):
        return None
    return Path(found.origin).parent / "lib" if found and found.origin else None


@cache
def cuda_major(library: Path) -> int:
    """The CUDA runtime that a library is linked to, 0 where it holds its own."""
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _RUNTIME.search(content)
            return int((found[1] or found[2]).decode()) if found else 0
    except (OSError, ValueError):
        return 0
