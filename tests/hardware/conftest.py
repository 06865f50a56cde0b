"""A fake driver and a fake engine, in place of the machine's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemolocal.hardware import absence, engine_build
from nemolocal.hardware import gpus as driver

GIB = 1 << 30
Install = Callable[..., Path]


def gpu(name: str = "RTX 4090", uuid: str = "GPU-bbbb0000-1", **more: Any) -> dict[str, Any]:
    fields = {"bus": "00000000:41:00.0", "capability": [8, 9], "memory": [[24 * GIB, 20 * GIB]]}
    return {"name": name, "uuid": uuid, **fields, **more}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def engine_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the engine's libraries are looked for: those of a build for CUDA 12."""
    folder = tmp_path / "llama_cpp" / "lib"
    folder.mkdir(parents=True)
    (folder / "libggml-base.so").touch()
    (folder / "libggml-cuda.so").write_bytes(b"\x7fELF..." + bytes(100) + b"libcudart.so.12\0")
    monkeypatch.setattr(engine_build, "library_folder", lambda: folder)
    engine_build.cuda_major.cache_clear()
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty file tree in place of the system's, where traces of hardware are looked for."""
    monkeypatch.setattr(absence, "ROOT", tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_files: Path, root: Path) -> Install:
    """Puts a fake driver in place of the machine's own."""

    def install(**machine: Any) -> Path:
        file = tmp_path / "nvml.json"
        file.write_text(json.dumps(machine))
        monkeypatch.setenv("FAKE_NVML", str(file))
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "fake_nvml"))
        return file

    monkeypatch.setattr(driver, "WSL_FOLDER", tmp_path / "wsl")
    return install
