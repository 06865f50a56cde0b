"""Installing the engine: the best build that can be had and loaded, with a stand-in for pip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import engine
import llama_build
import pytest
from command import CommandError
from faults import SetupError, find_fault
from llama_build import Machine

UNREACHABLE = ("WARNING: Retrying: NewConnectionError('no route to host')",)
NO_SUCH_VERSION = ("ERROR: No matching distribution found for llama-cpp-python==0.3.36",)


@dataclass
class FakePackages:
    """`says` maps words of an install to the lines with which it fails; `loads` tells for each check in
    turn whether the engine loads and sees a GPU, None when it does not load; the last one repeats."""

    site: Path
    says: Mapping[str, Sequence[str]] = field(default_factory=dict)
    loads: list[bool | None] = field(default_factory=lambda: [None, True])
    is_cached: bool = False
    installed: list[str] = field(default_factory=list)
    envs: list[Mapping[str, str]] = field(default_factory=list)

    def run(self, *words: str) -> Sequence[str]:
        assert words == ("-c", engine.CHECK)
        sees_gpu = self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]
        if sees_gpu is None:
            raise CommandError("-c failed: OSError: libcudart.so.12")
        return ["some notice", f"engine 0.3.36 {sees_gpu}"]

    def install(self, *words: str, env: Mapping[str, str] | None = None) -> Sequence[str]:
        line = " ".join(words)
        self.installed.append(line)
        self.envs.append(env or {})
        for part, lines in self.says.items():
            if part in line:
                fault = find_fault(lines, "pip")
                raise CommandError(fault.message, kind=fault.kind, lines=lines)
        return [] if self.is_cached else ["Building wheel for llama-cpp-python (pyproject.toml)"]

    def has_cached_wheel(self, name: str, version: str) -> bool:
        return self.is_cached

    def cache_folder(self) -> Path:
        return Path("/cache/pip")

    def folder(self) -> Path:
        return self.site

    def forget_halves(self) -> None:
        pass

    def indexes(self) -> list[str]:
        """The part of the index that each try went to, "" for the usual one."""
        return [
            line.split("/whl/")[1].split()[0] if "/whl/" in line else ""
            for line in self.installed
            if "--no-deps" in line
        ]


def install(packages: FakePackages, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setattr(llama_build, "look", lambda: machine)
    return engine.install(packages, "0.3.36")  # type: ignore[arg-type]


def test_cuda_wheel_is_taken_from_its_index_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages = FakePackages(tmp_path)
    stamp = install(packages, Machine("Linux", driver=(12, 6)), monkeypatch)
    first, second = packages.installed
    assert "--index-url https://abetlen.github.io/llama-cpp-python/whl/cu125 --only-binary :all:" in first
    assert first.endswith("--timeout 20 llama-cpp-python==0.3.36")
    assert second == "llama-cpp-python==0.3.36", "what it needs comes from the usual index"
    assert (stamp["name"], stamp["cuda"], stamp["driver"]) == ("cu125", (12, 5), (12, 6))


def test_wheel_that_the_newest_index_lacks_is_looked_for_in_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = FakePackages(tmp_path, says={"whl/cu125": NO_SUCH_VERSION})
    stamp = install(packages, Machine("Linux", driver=(12, 6)), monkeypatch)
    assert packages.indexes() == ["cu125", "cu124"]
    assert stamp["name"] == "cu124"


def test_unreachable_index_is_asked_once_and_then_nvcc_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = FakePackages(tmp_path, says={"/whl/": UNREACHABLE})
    machine = Machine("Linux", driver=(12, 6), nvcc=("/opt/cuda/bin/nvcc", (12, 6)))
    stamp = install(packages, machine, monkeypatch)
    assert packages.indexes() == ["cu125", ""]
    assert packages.envs[1] == {"CMAKE_ARGS": "-DGGML_CUDA=on", "CUDACXX": "/opt/cuda/bin/nvcc"}
    assert "--cache-dir /cache/pip/llama-cpp-python-" in packages.installed[1]
    assert stamp["name"] == "cuda"


def test_unreachable_index_without_nvcc_compiles_for_the_cpu_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = FakePackages(tmp_path, says={"/whl/": UNREACHABLE})
    stamp = install(packages, Machine("Linux", driver=(12, 6)), monkeypatch)
    assert packages.indexes() == ["cu125", ""]
    assert (stamp["name"], stamp["driver"]) == ("cpu", (12, 6))
    assert "the GPU stays unused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [("CUDA=on", "NewConnectionError"), ("whl/cu125", "[Errno 28] No space left on device")],
)
def test_gpu_is_not_given_up_for_a_passing_fault(
    words: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A CPU build would stay after the network or the disk is mended."""
    is_source = words == "CUDA=on"
    says = {"/whl/": UNREACHABLE, "--cache-dir": (line,)} if is_source else {words: (line,)}
    packages = FakePackages(tmp_path, says=says)
    machine = Machine("Linux", driver=(12, 6), nvcc=("/opt/cuda/bin/nvcc", (12, 6)))
    with pytest.raises(SetupError):
        install(packages, machine, monkeypatch)
    assert packages.indexes() == (["cu125", ""] if is_source else ["cu125"])


def test_wheel_that_misses_the_cuda_runtime_gets_nvidias_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia" / "cublas" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "cuda_runtime" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "cublas" / "lib" / "libcublasLt.so.12").write_text("lt")
    (tmp_path / "nvidia" / "cublas" / "lib" / "libnvblas.so.12").write_text("not asked for")
    (tmp_path / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.12").write_text("rt")
    library = tmp_path / "llama_cpp" / "lib"
    library.mkdir(parents=True)
    packages = FakePackages(tmp_path, loads=[None, None, True])
    stamp = install(packages, Machine("Linux", driver=(12, 4)), monkeypatch)
    assert packages.installed[-1] == "nvidia-cuda-runtime-cu12>=12.5 nvidia-cublas-cu12>=12.5"
    assert sorted(path.name for path in library.iterdir()) == ["libcublasLt.so.12", "libcudart.so.12"]
    assert (library / "libcudart.so.12").read_text() == "rt"
    assert stamp["name"] == "cu124"


def test_wheel_that_sees_no_gpu_gives_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages = FakePackages(tmp_path, loads=[False])
    stamp = install(packages, Machine("Linux", driver=(11, 8)), monkeypatch)
    assert packages.indexes() == ["cu118", ""]
    assert stamp["name"] == "cpu"


@pytest.mark.parametrize("driver", [None, (12, 4)])
def test_engine_that_is_there_and_fits_is_kept(
    driver: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    packages = FakePackages(tmp_path, loads=[driver is not None])
    stamp = install(packages, Machine("Linux", driver=driver), monkeypatch)
    assert packages.installed == []
    monkeypatch.setattr(llama_build, "find_driver", lambda: driver)
    assert engine.fits(stamp, "0.3.36")
    monkeypatch.setattr(llama_build, "find_driver", lambda: None if driver else (12, 4))
    assert not engine.fits(stamp, "0.3.36")


def test_kept_build_that_does_not_load_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wheel in pip's cache may come from another processor or from other build settings."""
    packages = FakePackages(tmp_path, loads=[None, None, False], is_cached=True)
    install(packages, Machine("Linux"), monkeypatch)
    assert packages.installed[-1].startswith("--no-cache-dir --no-binary llama-cpp-python")


def test_fresh_build_that_does_not_load_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = FakePackages(tmp_path, loads=[None])
    with pytest.raises(SetupError, match="libcudart"):
        install(packages, Machine("Linux"), monkeypatch)
    assert len(packages.indexes()) == 1


def test_no_compiler_and_no_wheel_is_one_line_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = FakePackages(tmp_path, says={"/whl/": UNREACHABLE})
    with pytest.raises(SetupError) as caught:
        install(packages, Machine("Darwin", has_compiler=False), monkeypatch)
    assert str(caught.value) == (
        "The engine has to be compiled, and no working C and C++ compiler was found. "
        "Run: xcode-select --install, then the same command again."
    )


def test_users_cmake_args_are_built_into_a_cache_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = FakePackages(tmp_path, loads=[False])
    stamp = install(packages, Machine("Linux", cmake_args="-DGGML_VULKAN=on"), monkeypatch)
    assert packages.envs[0] == {"CMAKE_ARGS": "-DGGML_VULKAN=on"}
    assert "--cache-dir /cache/pip/llama-cpp-python-" in packages.installed[0]
    assert (stamp["name"], stamp["cmake_args"]) == ("custom", "-DGGML_VULKAN=on")


@pytest.mark.parametrize("stamp", [None, {}, {"name": "cpu"}, [], {"name": "cu124", "cuda": "x"}, "cpu"])
def test_broken_stamp_is_no_engine(stamp: object) -> None:
    assert engine.fits(stamp, "0.3.36") is False


def test_version_is_read_from_the_project(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text('dependencies = [\n  "llama-cpp-python==1.2.3",  # pinned\n]\n')
    assert engine.pinned_version(path) == "1.2.3"
    path.write_text("dependencies = []\n")
    with pytest.raises(SetupError, match="pins no version"):
        engine.pinned_version(path)
