"""Which Python may run the set-up.

Imported before anything else, possibly by an old Python: its syntax must parse on Python 3.8, and it
imports nothing of ours.
"""

import subprocess
import sys

OLDEST = (3, 11)
NEWEST = (3, 13)  # the same bounds as requires-python in pyproject.toml


def _runs(name: str) -> bool:
    try:
        return subprocess.call([name, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def find_fault(version: tuple, runs=_runs) -> str:
    """One line that says why a Python of this (major, minor) cannot be used and what can; "" when it can.

    `runs` tells whether a program of this name can be run.
    """
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return ""
    needed = "NemoLocal needs Python {}.{} to {}.{}; this is {}.{}.".format(*OLDEST, *NEWEST, *version[:2])
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        name = f"python3.{minor}"
        if runs(name):
            return f"{needed} A fitting one is here: run the same command with {name}."
    return f"{needed} Install Python 3.{NEWEST[1]} and run the same command with it."


def check() -> None:
    """End with one line and exit code 1 where this Python cannot be used."""
    fault = find_fault(sys.version_info)
    if fault:
        sys.exit(fault)
