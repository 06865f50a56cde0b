"""What the tests of the command line share: running it in this process, or in one of its own."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemolocal.cli import app
from tests import fake_hub
from tests.fakes import FakeService, FakeTextModel


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command in this process, with an empty stdin or the one given."""

    def run(*arguments: str | Path, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = app.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def shell() -> Cli:
    """Run a command as a shell would, in a process of its own."""

    def run(*arguments: str | Path) -> Result:
        command = [sys.executable, "-m", "nemolocal.cli.app", *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", stdin=subprocess.DEVNULL, timeout=60, check=False
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeService:
    """The service that commands get in place of a real one."""
    fake = FakeService(FakeTextModel())
    monkeypatch.setattr("nemolocal.service.Service", lambda config: fake)
    return fake


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_hub.FakeHub]:
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    with fake_hub.serve() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


def is_one_error(result: Result, code: int) -> bool:
    """Nothing on stdout, one line on stderr that begins as errors do."""
    lines = result.err.splitlines()
    return (result.code, result.out, len(lines)) == (code, "", 1) and lines[0].startswith("error: ")
