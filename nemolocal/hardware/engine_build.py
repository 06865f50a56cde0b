"""What the installed llama-cpp-python was built for, told from its files: to import it is for the engine's
process alone."""

from __future__ import annotations

import importlib.util
import mmap
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from nemolocal.hardware.parts import Gpu

FIX = "`python3 installer/run.py` on a machine with the driver installs the CUDA build"
_CUDA_LIBRARIES = ("libggml-cuda.so", "ggml-cuda.dll")
_RUNTIME = re.compile(rb"libcudart\.so\.(\d+)|cudart64_(\d+)\.dll")


def warnings(usable: Sequence[Gpu], driver_cuda: tuple[int, int]) -> tuple[str, ...]:
    """What keeps usable GPUs from being used, and how to mend it; `driver_cuda` is the newest CUDA that the
    driver runs, (0, 0) where it does not say."""
    folder = library_folder()
    if not usable or folder is None:
        return ()
    library = next((folder / name for name in _CUDA_LIBRARIES if (folder / name).is_file()), None)
    if library is None:
        return (
            "The installed llama-cpp-python was built without CUDA, so no GPU is used and answers are many "
            f"times slower: {FIX}.",
        )
    major = cuda_major(library)
    if major and driver_cuda != (0, 0) and driver_cuda[0] < major:
        runs = ".".join(map(str, driver_cuda))
        return (
            f"The NVIDIA driver runs CUDA up to {runs}, but the installed llama-cpp-python needs CUDA "
            f"{major}: update the driver, or let {FIX} that fits it.",
        )
    return ()


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
