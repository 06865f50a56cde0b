"""What keeps the installed engine from a healthy GPU: said, with the fix, and planned for the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nemolocal import hardware
from nemolocal.errors import UsageError
from nemolocal.hardware import engine_build
from nemolocal.models import wish
from tests.hardware.conftest import GIB, Install, gpu


def link_to(folder: Path, runtime: bytes) -> None:
    (folder / "libggml-cuda.so").write_bytes(b"\x7fELF" + bytes(100) + runtime + b"\0")
    engine_build.cuda_major.cache_clear()


def test_a_build_without_cuda_is_said_and_the_gpu_left_alone(nvml: Install, engine_files: Path) -> None:
    (engine_files / "libggml-cuda.so").unlink()
    nvml(gpus=[gpu(), gpu(uuid="GPU-2")])
    found = hardware.detect()
    assert found.mode == "cpu"
    assert {each.state for each in found.gpus} == {"unused"}
    assert found.gpus[0].free_bytes == 20 * GIB  # it is still read
    (warning,) = found.warnings
    assert found.reason == warning  # once, however many GPUs there are
    assert "built without CUDA" in warning
    assert "for the CPU alone" in found.engine
    assert wish.groups(found, wish.Wish()) == [[]]
    with pytest.raises(UsageError, match=r"GPU 1 cannot be used: .* without CUDA"):
        wish.groups(found, wish.Wish(gpus=("1",)))
    nvml(gpus=[])
    assert hardware.detect().warnings == ()  # nothing is lost on this machine


def test_the_fix_is_that_of_how_it_was_set_up(
    nvml: Install, engine_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine_files / "libggml-cuda.so").unlink()
    nvml(gpus=[gpu()])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert "CMAKE_ARGS=-DGGML_CUDA=on" in hardware.detect().warnings[0]
    (tmp_path / "setup.json").touch()
    (warning,) = hardware.detect().warnings
    assert f"delete {tmp_path / 'setup.json'} and run `python3 installer/run.py`" in warning


@pytest.mark.parametrize(("cuda", "is_warned"), [(11080, True), (12000, False), (13000, False), (0, False)])
def test_a_driver_too_old_for_the_engine_is_said(nvml: Install, cuda: int, is_warned: bool) -> None:
    nvml(gpus=[gpu()], cuda=cuda)
    found = hardware.detect()
    assert found.mode == ("cpu" if is_warned else "gpu")
    assert bool(found.warnings) == is_warned
    if is_warned:
        assert "driver 580.95.05 runs CUDA up to 11.8" in found.reason
        assert "needs CUDA 12" in found.reason
        assert "update the driver" in found.reason


@pytest.mark.parametrize("runtime", [b"libcudart.so.13", b"cudart64_13.dll"])
def test_the_cuda_that_a_library_needs_is_read_from_it(engine_files: Path, runtime: bytes) -> None:
    link_to(engine_files, runtime)
    build = engine_build.find()
    assert build
    assert (build.has_cuda, build.cuda_major) == (True, 13)
    assert str(build).endswith("with CUDA 13")


def test_a_library_that_holds_its_own_cuda_asks_for_no_driver(nvml: Install, engine_files: Path) -> None:
    link_to(engine_files, b"libm.so.6")
    nvml(gpus=[gpu()], cuda=11000)
    assert hardware.detect().mode == "gpu"


def test_windows_libraries_have_other_names(engine_files: Path) -> None:
    for old, new in (("libggml-cuda.so", "ggml-cuda.dll"), ("libggml-base.so", "ggml-base.dll")):
        (engine_files / old).rename(engine_files / new)
    build = engine_build.find()
    assert build
    assert build.has_cuda
    (engine_files / "ggml-cuda.dll").unlink()
    build = engine_build.find()
    assert build
    assert build.has_cuda is False


def test_nothing_is_claimed_of_a_build_that_lies_elsewhere(nvml: Install, engine_files: Path) -> None:
    for file in engine_files.iterdir():
        file.unlink()
    nvml(gpus=[gpu()])
    found = hardware.detect()
    assert (found.mode, found.warnings) == ("gpu", ())


def test_no_engine_at_all(nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_build, "library_folder", lambda: None)
    nvml(gpus=[gpu()])
    found = hardware.detect()
    assert (found.mode, found.engine, found.warnings) == ("gpu", "", ())


def test_a_gpu_too_old_for_the_engine_leaves_the_others(nvml: Install, engine_files: Path) -> None:
    link_to(engine_files, b"libcudart.so.13")
    nvml(gpus=[gpu(), gpu("GTX 1080", "GPU-old", capability=[6, 1])])
    found = hardware.detect()
    assert [each.state for each in found.gpus] == ["ok", "unused"]
    assert found.mode == "gpu"
    assert found.reason.startswith(
        "1 NVIDIA GPU can be used. The GTX 1080 (compute capability 6.1) is too old"
    )
    assert [[each.uuid for each in group] for group in wish.groups(found, wish.Wish())] == [
        ["GPU-bbbb0000-1"]
    ]
    link_to(engine_files, b"libcudart.so.12")
    assert hardware.detect().warnings == ()


def test_a_container_without_the_drivers_cuda_is_said(nvml: Install) -> None:
    nvml(gpus=[gpu()], cuda_error=12)
    found = hardware.detect()
    assert found.mode == "cpu"
    assert "NVIDIA_DRIVER_CAPABILITIES" in found.warnings[0]
