"""Installs llama-cpp-python: tries the builds that fit this machine, best first, until one can be loaded.

Which builds fit is llama_build's to say; when this has to run is the environment's.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_build
from command import CommandError, say
from faults import COMPILER, SetupError
from llama_build import Build, Machine
from packages import Packages

NAME = "llama-cpp-python"

# A build that cannot be loaded (wrong processor, missing library) is found out here, not at the first chat.
CHECK = (
    "import llama_cpp as engine; engine.llama_backend_init(); "
    "print('engine', engine.__version__, engine.llama_supports_gpu_offload())"
)


def pinned_version(pyproject: Path) -> str:
    """The version that the project asks for."""
    found = re.search(rf'"{NAME}==([\w.+!-]+)"', pyproject.read_text(encoding="utf-8"))
    if not found:
        raise SetupError(f"{pyproject} pins no version of {NAME}.", hint="Restore the file.")
    return found[1]


def fits(stamp: Any, version: str) -> bool:
    """Whether the engine that left this stamp is still the right one for the machine as it is now."""
    try:
        installed = llama_build.Installed(
            name=stamp["name"],
            cuda=_pair(stamp["cuda"]),
            driver=_pair(stamp["driver"]),
            cmake_args=stamp["cmake_args"],
        )
        is_version = stamp["version"] == version
    except (KeyError, TypeError, ValueError, IndexError):
        return False
    cmake_args = os.environ.get("CMAKE_ARGS", "").strip()
    return is_version and installed.still_fits(driver=llama_build.find_driver(), cmake_args=cmake_args)


def _pair(value: Any) -> llama_build.Version | None:
    return None if value is None else (int(value[0]), int(value[1]))


def install(packages: Packages, version: str) -> dict[str, Any]:
    """Install the best build that can be had. Returns its stamp; raises SetupError when there is none."""
    work = Engine(packages, version)
    machine = llama_build.look()
    machine = replace(machine, has_cached_build=packages.has_cached_wheel(NAME, version))
    packages.forget_halves()
    if not machine.cmake_args and work.loads(needs_gpu=machine.driver is not None):
        say("    It is there already.")
        return work.stamp(Build("source", "found", "was there before", cuda=machine.driver), machine)
    builds = llama_build.choices(machine)
    is_index_gone = False
    for build in builds[:-1]:
        if build.index and is_index_gone:
            continue
        say(f"    {build.title}.")
        try:
            work.install(build)
        except CommandError as error:
            if error.kind == "disk" or (error.kind in ("network", "certificate") and not build.index):
                raise  # the next one would meet the same, and a GPU is not given up for a passing fault
            is_index_gone |= error.kind in ("network", "certificate")
            say(f"    That one cannot be had: {error.message}")
        else:
            return work.stamp(build, machine)
    last = builds[-1]
    say(f"    {last.title}.")
    try:
        work.install(last)
    except CommandError as error:
        raise explain_last(error, last, machine) from None
    return work.stamp(last, machine)


def explain_last(error: CommandError, build: Build, machine: Machine) -> SetupError:
    """Where there is no compiler, that is what is missing, whatever became of the attempt to do without."""
    is_without_compiler = build.kind == "wheel" and error.kind not in ("disk", "permission")
    if is_without_compiler or error.kind == "compiler":
        return SetupError(COMPILER.message, hint=llama_build.compiler_fix(machine.system))
    return error


@dataclass(frozen=True)
class Engine:
    packages: Packages
    version: str

    @property
    def requirement(self) -> str:
        return f"{NAME}=={self.version}"

    def install(self, build: Build) -> None:
        """Install one build and see that it loads; raises CommandError when either fails."""
        options = ["-v", "--no-deps", "--force-reinstall"]
        env: dict[str, str] = {}
        if build.index:  # this one alone: the same version elsewhere is another build
            options += [
                "--index-url",
                build.index,
                "--only-binary",
                ":all:",
                "--retries",
                "1",
                "--timeout",
                "20",
            ]
        if build.cmake_args:  # pip's cache does not tell builds of one version apart, so each gets its own
            env["CMAKE_ARGS"] = build.cmake_args
            options += ["--cache-dir", str(self._cache_folder(build))]
        if build.nvcc:
            env["CUDACXX"] = build.nvcc
        said = self.packages.install(*options, self.requirement, env=env)
        self.packages.install(self.requirement)  # what it needs, from the usual index
        needs_gpu = build.cuda is not None
        if self.loads(needs_gpu=needs_gpu):
            return
        if build.cuda:
            self.packages.install(*llama_build.RUNTIME_PACKAGES[build.cuda[0]])
            link_cuda_runtime(self.packages.folder())
        elif build.kind == "source" and not any("Building wheel" in line for line in said):
            say("    The build that pip had kept does not load here; compiling it anew.")
            self.packages.install("--no-cache-dir", "--no-binary", NAME, *options, self.requirement, env=env)
        self.check(needs_gpu=needs_gpu)

    def loads(self, *, needs_gpu: bool) -> bool:
        try:
            self.check(needs_gpu=needs_gpu)
        except CommandError:
            return False
        return True

    def check(self, *, needs_gpu: bool) -> None:
        """Load the engine. Raises CommandError when it cannot be, or when it sees no GPU but should."""
        said = self.packages.run("-c", CHECK)
        words = next((line.split() for line in said if line.startswith("engine ")), [])
        if words[1:2] != [self.version]:
            raise CommandError(f"{NAME} {self.version} was asked for, but {words[1:2]} is there.", lines=said)
        if needs_gpu and words[2] != "True":
            raise CommandError("It loads, but sees no GPU.", lines=said)

    def stamp(self, build: Build, machine: Machine) -> dict[str, Any]:
        return {
            "version": self.version,
            "name": build.name,
            "cuda": build.cuda,
            "driver": machine.driver,
            "cmake_args": machine.cmake_args,
        }

    def _cache_folder(self, build: Build) -> Path:
        words = f"{build.cmake_args} {build.cuda}".encode()
        return self.packages.cache_folder() / f"{NAME}-{hashlib.sha256(words).hexdigest()[:12]}"


_CUDA_LIBRARY = re.compile(r"lib(?:cudart|cublas|cublasLt)\.so\.\d+|(?:cudart|cublas|cublasLt)64_\d+\.dll")


def link_cuda_runtime(site_packages: Path) -> None:
    """Put NVIDIA's packaged libraries beside the engine's own: the one place where those look for them on
    every system."""
    target = site_packages / "llama_cpp" / "lib"
    for path in sorted((site_packages / "nvidia").rglob("*")):
        if not _CUDA_LIBRARY.fullmatch(path.name):
            continue
        link = target / path.name
        link.unlink(missing_ok=True)
        try:
            if os.name == "nt":
                link.hardlink_to(path)
            else:
                link.symlink_to(path)
        except OSError:  # a file system without links
            shutil.copy2(path, link)
