"""The environment in .venv: what setting it up takes, which of that is done, and how to start from it.

Each finished step leaves a stamp, so that an interrupted set-up goes on where it was and a finished one is
only looked at. Of the package it knows no more than its name and two of its commands.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine
import interpreter
import llama_build
from command import CommandError, Context, Stopped, run, say, stop_signals
from faults import SetupError, explain
from lock import only_one
from packages import Packages

WINDOWS = os.name == "nt"
FIND_MODELS = "from nemolocal import config; print(config.load().models_dir)"


@dataclass(frozen=True)
class Place:
    """The folders and files of one clone's set-up."""

    root: Path

    @property
    def pyproject(self) -> Path:
        return self.root / "pyproject.toml"

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def scripts(self) -> Path:
        return self.venv / ("Scripts" if WINDOWS else "bin")

    @property
    def python(self) -> Path:
        return self.script("python")

    def script(self, name: str) -> Path:
        """A command that the environment brings."""
        return self.scripts / (f"{name}.exe" if WINDOWS else name)

    @property
    def log(self) -> Path:
        return self.venv / "setup.log"

    @property
    def stamps(self) -> Path:
        return self.venv / "setup.json"

    @property
    def lock(self) -> Path:
        return self.venv / "setup.lock"


def guard(work: Callable[[], None], place: Place) -> int:
    """Do the work and return the exit code: whatever stops it becomes one line."""
    try:
        with stop_signals():
            work()
    except SetupError as error:
        return _fail(error, place)
    except OSError as error:
        return _fail(explain(error), place)
    except KeyboardInterrupt:
        say("Stopped. The same command goes on from here.")
        return 130
    except Stopped as stop:
        say("Stopped. The same command goes on from here.")
        return 128 + stop.number
    return 0


def _fail(error: SetupError, place: Place) -> int:
    log = f" (log: {place.log})" if place.log.is_file() else ""
    say(f"Set-up failed: {error}{log}")
    return 1


def set_up(place: Place, *, with_tests: bool = False) -> None:
    """Bring the environment to where NemoLocal, and with `with_tests` its test suite, can run.

    Returns within 0.1 s when that was done before. Raises SetupError or OSError. A second set-up in the
    same folder waits for the first.
    """
    if not Setup(place, with_tests=with_tests).pending():
        return
    place.venv.mkdir(exist_ok=True)
    with only_one(place.lock) as lock_fds:
        pending = Setup(place, with_tests=with_tests, kept_fds=lock_fds).pending()
        for n, step in enumerate(pending, start=1):
            say(f"[{n}/{len(pending)}] {step.title}")
            step.work()
        if pending:
            say("Set-up finished.")


def start(place: Place, arguments: Sequence[str]) -> int:
    """Become the command line; without arguments it opens the app. Returns its exit code where a program
    cannot replace itself."""
    command = [str(place.script("nemolocal")), *(arguments or ["ui"])]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if not WINDOWS:
            os.execve(command[0], command, clean_env())
        process = subprocess.Popen(command, env=clean_env())
    except OSError as error:
        return _fail(explain(error), place)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the console told the child too; how it ends is its own affair
            continue


def clean_env() -> dict[str, str]:
    """The environment variables without those that would mix another Python's packages in."""
    strangers = ("PYTHONHOME", "PYTHONPATH", "__PYVENV_LAUNCHER__")
    return {name: value for name, value in os.environ.items() if name not in strangers}


@dataclass(frozen=True)
class Step:
    title: str
    work: Callable[[], None]


class Setup:
    """One look at an environment: what of it is done, and the steps that do the rest."""

    def __init__(self, place: Place, *, with_tests: bool = False, kept_fds: tuple[int, ...] = ()) -> None:
        self.place = place
        self.with_tests = with_tests
        pip_env = {"PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.context = Context(
            log=place.log, cwd=place.root, env={**clean_env(), **pip_env}, kept_fds=kept_fds
        )
        self.packages = Packages(place.python, self.context)
        self.stamps = _read_stamps(place.stamps)

    def pending(self) -> list[Step]:
        """The steps that are still to be done; where one is, all that builds on it are too."""
        version = engine.pinned_version(self.place.pyproject)
        steps: list[Step] = []
        if not self._has_python():
            steps.append(Step("Making the environment in .venv", self._make_venv))
        if steps or not engine.fits(self.stamps.get("engine"), version):
            steps.append(Step(f"Installing the engine, {engine.NAME} {version}", self._install_engine))
        if steps or self.stamps.get("package") != self._package_key():
            steps.append(Step("Installing NemoLocal and what it needs", self._install_package))
        if self.with_tests and (steps or self.stamps.get("tests") != self._package_key()):
            steps.append(Step("Installing the tools of the test suite", self._install_tests))
        if steps or not self._has_model():
            steps.append(Step("Looking for a model", self._fetch_model))
        return steps

    # The interpreter

    def _has_python(self) -> bool:
        return "python" in self.stamps and self._python_version() == self.stamps["python"]

    def _python_version(self) -> str:
        """Which Python runs in the environment, "" when none does: its base may be gone or replaced."""
        command = [str(self.place.python), "-I", "-S", "-c", "import sys; print(sys.version_info[:2])"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        except (OSError, subprocess.SubprocessError):
            return ""
        found = re.search(r"\((\d+), (\d+)\)", said)
        return f"{found[1]}.{found[2]}" if found else ""

    def _make_venv(self) -> None:
        """Take the environment that is there where it can be used, else make one."""
        version = self._python_version()
        is_usable = bool(version) and not interpreter.find_fault(tuple(map(int, version.split("."))))
        if not is_usable or self.stamps.get("python", version) != version or "making" in self.stamps:
            self._make_anew()
        if not self.packages.has_pip():
            self.packages.run("-m", "ensurepip", "--default-pip")
        self._stamp(python=self._python_version(), making=None)

    def _make_anew(self) -> None:
        missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
        if missing:
            raise SetupError(f"This Python comes without {' and '.join(missing)}.", hint=_venv_fix())
        if (self.place.venv / "pyvenv.cfg").exists():
            say("    What is there is broken or unfinished; making it anew.")
        self.stamps = {}
        self._stamp(making=True)
        self._clear()
        base = getattr(sys, "_base_executable", "") or sys.executable
        # pip comes in a command of its own: venv would keep to itself why it cannot be put in
        run([base, "-m", "venv", "--without-pip", self.place.venv], self.context)

    def _clear(self) -> None:
        """Empty the environment, but for what belongs to this very set-up."""
        for path in self.place.venv.iterdir():
            if path in (self.place.lock, self.place.log, self.place.stamps):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    # The packages

    def _install_engine(self) -> None:
        stamp = engine.install(self.packages, engine.pinned_version(self.place.pyproject))
        self._stamp(engine=stamp)
        if stamp["driver"] and stamp["name"] == "cpu":
            say(f"    To try again for the GPU, delete {self.place.stamps} and run the same command.")

    def _package_key(self) -> str:
        """Changes with whatever asks for another installation; a clone that was moved does too."""
        parts = [
            self.place.pyproject.read_bytes(),
            str(self.place.root).encode(),
            json.dumps([self.stamps.get("python"), self.stamps.get("engine")]).encode(),
        ]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def _install_package(self) -> None:
        self.packages.forget_halves()
        self.packages.install("-e", ".")
        self._stamp(package=self._package_key())

    def _install_tests(self) -> None:
        self.packages.install("-e", ".[test]")
        self._stamp(tests=self._package_key())

    # The model

    def _has_model(self) -> bool:
        """Whether there is a model where this user's settings look for one."""
        folder = self.stamps.get("models", {}).get(_settings_key())
        return folder is not None and has_model(Path(folder))

    def _fetch_model(self) -> None:
        try:
            folder = Path(self.packages.run("-c", FIND_MODELS)[-1])
        except CommandError:
            return  # the settings are broken, which the command line says better
        if not has_model(folder):
            say("    There is none yet; fetching the starter model, about 100 MB.")
            try:
                run([self.place.script("nemolocal"), "models", "pull", "starter"], self.context)
            except CommandError as error:
                said = next((line.strip() for line in reversed(error.lines) if line.strip()), error.message)
                raise SetupError(
                    f"The starter model could not be fetched: {said.rstrip(chr(46))}.",
                    hint=f"Run the same command again, or put a .gguf file into {folder}.",
                ) from None
        self._stamp(models={**self.stamps.get("models", {}), _settings_key(): str(folder)})

    def _stamp(self, **values: Any) -> None:
        """Write down what is done, all at once: a stamp is never half written. None takes one away."""
        stamps = {**self.stamps, **values}
        self.stamps = {name: value for name, value in stamps.items() if value is not None}
        fresh = self.place.stamps.with_suffix(".new")
        fresh.write_text(json.dumps(self.stamps, indent=1), encoding="utf-8")
        fresh.replace(self.place.stamps)


def has_model(folder: Path) -> bool:
    """Whether a model file lies there, or a note of one that was added where it lies."""
    return any(next(folder.glob(pattern), None) is not None for pattern in ("**/*.gguf", "imported/*.json"))


def _venv_fix() -> str:
    version = ".".join(platform.python_version_tuple()[:2])
    if shutil.which("apt-get"):
        words = llama_build.as_root(f"apt-get install python{version}-venv")
        return f"Run: {words}, then the same command again."
    return f"Install a complete Python {version} and run the same command again."


def _settings_key() -> str:
    """What decides where models are looked for; each value keeps a stamp of its own."""
    names = ("NEMOLOCAL_HOME", "NEMOLOCAL_MODELS_DIR", "XDG_DATA_HOME", "HOME", "LOCALAPPDATA")
    return "|".join(os.environ.get(name, "") for name in names)


def _read_stamps(path: Path) -> dict[str, Any]:
    try:
        stamps = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) else {}
