"""The checks of the project, one after the other, in the environment that was set up."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

import browser as browsers
import environment
from environment import Place

BROWSER_VARIABLE = "NEMOLOCAL_TEST_BROWSER"


@dataclass(frozen=True)
class Check:
    name: str
    command: tuple[str, ...]


def get_browser(place: Place) -> str:
    """The path of a browser for the page's tests, "" when none can be had."""
    return browsers.get(environment.Setup(place).packages)


def plan(place: Place, arguments: Sequence[str], *, has_browser: bool) -> list[Check]:
    """What is run. `arguments` go on to pytest, after ours, so that a -m of the user's wins."""
    python = str(place.python)
    markers = "not gpu" if has_browser else "not gpu and not browser"
    return [
        Check("ruff format", (python, "-m", "ruff", "format", "--check", ".")),
        Check("ruff check", (python, "-m", "ruff", "check", ".")),
        Check("mypy", (python, "-m", "mypy")),
        Check("lint-imports", (str(place.script("lint-imports")),)),
        Check("pytest", (python, "-m", "pytest", "-m", markers, *arguments)),
    ]


def run_all(place: Place, arguments: Sequence[str], *, browser: str, is_ci: bool) -> int:
    """Run every check, whatever fails; 0 when all passed. Without a browser its tests are left out, which
    counts as a failure on a CI machine only."""
    env = environment.clean_env()
    env.pop(BROWSER_VARIABLE, None)
    if browser:
        env[BROWSER_VARIABLE] = browser
    env["PATH"] = f"{place.scripts}{os.pathsep}{env.get('PATH', '')}"
    failed: list[str] = []
    for check in plan(place, arguments, has_browser=bool(browser)):
        _tell(f"== {check.name}: {subprocess.list2cmdline(check.command)}")
        started = time.monotonic()
        try:
            code = subprocess.call(check.command, cwd=place.root, env=env)
        except KeyboardInterrupt:
            _tell("Stopped.")
            return 130
        except OSError as error:
            _tell(f"Cannot run it: {error}")
            code = 1
        how = f"ended by signal {-code}" if code < 0 else "failed" if code else "passed"
        _tell(f"== {check.name}: {how} in {time.monotonic() - started:.0f} s")
        if code:
            failed.append(check.name)
    if not browser:
        _tell("No browser could be found or installed, so the tests of the page did not run.")
        if is_ci:
            failed.append("the tests of the page")
    _tell(f"Failed: {', '.join(failed)}." if failed else "All checks passed.")
    return 1 if failed else 0


def _tell(text: str) -> None:
    print(text, flush=True)
