"""Programs in a GPU's memory, by names that a person knows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from nemolocal.hardware import holders

GIB = 1 << 30
WAIT = "import sys; print(flush=True); sys.stdin.read()"
SPAWN = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAIT!r}])"


@contextmanager
def running(*arguments: str | Path) -> Iterator[psutil.Process]:
    """A Python process with these arguments, until the end of the block. A process has its command line only
    a moment after it has begun, so its first line is waited for."""
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout
        process.stdout.readline()
        yield psutil.Process(process.pid)
        assert process.stdin
        process.stdin.close()


def name(pid: int) -> str:
    (holder,) = holders.name_all([(pid, GIB)])
    return holder.name


def test_programs_of_python_are_told_apart_by_their_script(tmp_path: Path) -> None:
    (tmp_path / "draw.py").write_text(WAIT)
    with running("-X", "utf8", tmp_path / "draw.py", "--listen") as process:
        assert name(process.pid).endswith("(draw.py)")
    with running("-c", WAIT) as process:
        assert name(process.pid) == process.name()


@pytest.mark.parametrize("script", ["nemolocal", "nemolocal.exe"])
def test_our_engine_is_a_child_of_ours(tmp_path: Path, script: str) -> None:
    (tmp_path / script).write_text(SPAWN)
    with running(tmp_path / script, "serve") as process:
        assert name(process.pid) == "NemoLocal"
        while not process.children():
            assert process.is_running()
        assert name(process.children()[0].pid) == "NemoLocal"


def test_others_who_read_our_files_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(WAIT)
    with running(tmp_path / "other.py", "nemolocal") as process:
        assert name(process.pid).endswith("(other.py)")


def test_one_that_the_system_hides_is_kept_and_one_that_ended_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def hide(process: psutil.Process) -> str:
        raise psutil.AccessDenied(process.pid)

    with running("-c", WAIT) as process:
        pid = process.pid
        monkeypatch.setattr(psutil.Process, "name", hide)
        assert [each.name for each in holders.name_all([(pid, GIB), (2**22 + 5, GIB)])] == ["unknown program"]


def test_the_largest_comes_first(tmp_path: Path) -> None:
    with running("-c", WAIT) as one, running("-c", WAIT) as two:
        found = holders.name_all([(one.pid, 1), (two.pid, 2)])
    assert [each.used_bytes for each in found] == [2, 1]
