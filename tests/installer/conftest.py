"""A clone with a stand-in for the Python of its environment: pip, the engine and the command line are played
by a script that writes down how it was called, so that no test installs anything or needs a network."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "installer") not in sys.path:
    sys.path.append(str(ROOT / "installer"))

FAKE = Path(__file__).with_name("fake_python.py")


@dataclass(frozen=True)
class Clone:
    """`faults` tells the stand-in what goes wrong; `calls` is what it was asked for."""

    root: Path
    env: dict[str, str]

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(self.root / "installer" / "run.py")]

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *arguments],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.command, *arguments],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def make_venv(self) -> None:
        make_venv(self.root / ".venv")

    def set_faults(self, **faults: Any) -> None:
        """Words of a call → {"says": text, "exit": code, "sleeps_s": seconds}."""
        self.root.joinpath("faults.json").write_text(json.dumps(faults), encoding="utf-8")

    def calls(self) -> list[str]:
        path = self.root / "calls.txt"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def forget_calls(self) -> None:
        self.root.joinpath("calls.txt").unlink(missing_ok=True)

    def stamps(self) -> dict[str, Any]:
        path = self.root / ".venv" / "setup.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def make_venv(venv: Path) -> None:
    """What `python -m venv` would make, with the stand-in for its Python."""
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    (venv / "site-packages").mkdir(exist_ok=True)
    (venv / "pyvenv.cfg").write_text("version = 3\n", encoding="utf-8")
    script = venv / "bin" / "python"
    script.unlink(missing_ok=True)
    script.write_text(f"#!{sys.executable} -IS\n{FAKE.read_text(encoding='utf-8')}", encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """A clone in a path with spaces, with an environment in which nothing is installed yet."""
    return _make_clone(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone whose set-up is done, for tests that leave it so."""
    made = _make_clone(tmp_path_factory.mktemp("finished"))
    assert made.run("hardware").returncode == 0
    return made


def _make_clone(folder: Path) -> Clone:
    if os.name == "nt":
        pytest.skip("the stand-in is a script with a #! line")
    root = folder / "a clone of it"
    shutil.copytree(ROOT / "installer", root / "installer", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    strangers = ("CMAKE_ARGS", "NEMOLOCAL_MODELS_DIR", "XDG_DATA_HOME")
    env = {name: value for name, value in os.environ.items() if name not in strangers}
    made = Clone(root, {**env, "HOME": str(folder), "NEMOLOCAL_HOME": str(folder / "home")})
    made.make_venv()
    return made
