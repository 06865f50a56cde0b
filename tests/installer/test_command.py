"""Running one command: the log, the line that moves, and what a failure carries."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import command
import pytest
from command import CommandError, Context, find_progress, run


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(log=tmp_path / "setup.log", cwd=tmp_path, env=dict(os.environ))


def python(code: str) -> list[str]:
    return [sys.executable, "-IS", "-c", code]


def test_output_is_returned_and_logged(context: Context) -> None:
    lines = run(python("import sys; print('out'); print('err', file=sys.stderr)"), context)
    assert sorted(lines) == ["err", "out"]
    log = context.log.read_text()
    assert "\nout\n" in log
    assert "\nerr\n" in log
    assert log.startswith("\n$ ")


def test_log_grows_over_commands(context: Context) -> None:
    run(python("print('first')"), context)
    run(python("print('second')"), context)
    assert context.log.read_text().index("first\n") < context.log.read_text().index("second\n")


def test_undecodable_output_and_a_closed_input_do_no_harm(context: Context) -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff caf\\xc3\\xa9\\n'); print(sys.stdin.read() == '')"
    assert run(python(code), context) == ["\ufffd café", "True"]


def test_failure_carries_the_last_words(context: Context) -> None:
    with pytest.raises(CommandError) as caught:
        run(python("print('reading\\nERROR: no wheel today\\ncleaning up'); raise SystemExit(3)"), context)
    assert caught.value.message.endswith("failed: ERROR: no wheel today")
    assert caught.value.lines == ["reading", "ERROR: no wheel today", "cleaning up"]


def test_program_that_is_not_there(context: Context) -> None:
    with pytest.raises(CommandError, match="Cannot start /no/such/program: No such file"):
        run(["/no/such/program"], context)


def test_long_command_shows_how_far_it_is(
    context: Context, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "LOG_EVERY_S", 0.05)
    run(python("import time; print('[12/345] c++ ggml.cpp', flush=True); time.sleep(0.4)"), context)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) >= 2
    assert shown[-1] == "    0:00  compiling, 12 of 345"


def test_terminal_gets_one_line_that_is_rewritten_and_taken_away(
    context: Context, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "TERMINAL_EVERY_S", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(python("import time; print('[1/9] cc', flush=True); time.sleep(0.4)"), context)
    shown = capsys.readouterr().err
    assert "\n" not in shown
    assert "\r    0:00  compiling, 1 of 9" in shown
    assert shown.endswith(f"\r{' ' * len('    0:00  compiling, 1 of 9')}\r")


def test_log_that_cannot_be_written_is_an_error(context: Context, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs a device that is always full")
    full = Context(log=Path("/dev/full"), cwd=tmp_path, env=dict(os.environ))
    with pytest.raises(OSError, match="No space left"):
        run(python("print('x')"), full)


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        ("[45/312] /usr/bin/c++ -O3 -c ggml.cpp", "compiling, 45 of 312"),
        ("  [ 12%] Building CXX object ggml.cpp.o", "compiling, 12 %"),
        ("  ggml-quants.c", "compiling ggml-quants.c"),
        ("Collecting gradio<7,>=6.31 (from nemolocal==0.1)", "collecting gradio<7,>=6.31"),
        (
            "  Downloading gradio-6.31.0-py3-none-any.whl (24 MB)",
            "downloading gradio-6.31.0-py3-none-any.whl (24 MB)",
        ),
        (
            "  Building wheel for llama-cpp-python (pyproject.toml): started",
            "building wheel for llama-cpp-python (pyproject.toml)",
        ),
        ("Installing collected packages: a, b, c", "installing collected packages"),
        ("Requirement already satisfied: pip", ""),
        ("-- The CXX compiler identification is GNU 12.2.0", ""),
    ],
)
def test_progress_is_read_from_the_output(line: str, progress: str) -> None:
    assert find_progress(line) == progress
