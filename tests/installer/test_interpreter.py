"""An old or too new Python gets a sentence."""

from __future__ import annotations

import ast
import tomllib

import interpreter
import pytest

from tests.installer.conftest import ROOT


@pytest.mark.parametrize("version", [(3, 11), (3, 12, 4), (3, 13)])
def test_fitting_python_has_no_fault(version: tuple[int, ...]) -> None:
    assert interpreter.find_fault(version, runs=lambda name: True) == ""


def test_old_python_names_the_bounds_and_what_to_install() -> None:
    line = interpreter.find_fault((3, 8, 18), runs=lambda name: False)
    assert line == (
        "NemoLocal needs Python 3.11 to 3.13; this is 3.8. "
        "Install Python 3.13 and run the same command with it."
    )


def test_too_new_python_points_to_one_that_is_here() -> None:
    line = interpreter.find_fault((3, 14), runs=lambda name: name in ("python3.11", "python3.12"))
    assert line == (
        "NemoLocal needs Python 3.11 to 3.13; this is 3.14. "
        "A fitting one is here: run the same command with python3.12."
    )


@pytest.mark.parametrize("name", ["run.py", "test.py", "interpreter.py"])
def test_what_an_old_python_reads_parses_there(name: str) -> None:
    text = (ROOT / "installer" / name).read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 8))
    assert "from __future__" not in text, "an old Python may not know it"


def test_bounds_are_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    newest = interpreter.NEWEST
    assert project["requires-python"] == ">={}.{},<{}.{}".format(
        *interpreter.OLDEST, newest[0], newest[1] + 1
    )
