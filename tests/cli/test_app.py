"""The front door: help, exit codes, one-line errors, and nothing heavy before a command runs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from nemolocal import __version__
from nemolocal.cli import output
from tests.cli.conftest import Cli, is_one_error

COMMANDS = ("ui", "serve", "chat", "plan", "bench", "models", "hardware", "config")

VERBS = ("list", "search", "show", "pull", "verify", "import", "rm", "quantize")


def test_help_and_version(shell: Cli) -> None:
    shown = shell("--help")
    assert shown.code == 0
    for command in COMMANDS:
        assert f" {command} " in shown.out
    assert shell("--version").out == f"nemolocal {__version__}\n"


@pytest.mark.parametrize("command", [*COMMANDS, *(f"models {verb}" for verb in VERBS)])
def test_every_command_has_help(cli: Cli, command: str) -> None:
    shown = cli(*command.split(), "-h")
    assert (shown.code, shown.err) == (0, "")
    assert f"nemolocal {command}" in shown.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["chatt"], "Did you mean 'chat'? See `nemolocal --help`."),
        (["models", "lst"], "No such command 'lst'"),
        (["hardware", "--jason"], "No such option: --jason"),
        (["hardware", "extra"], "unexpected extra argument"),
        (["models", "show"], "Missing argument 'REF'. See `nemolocal models show --help`."),
        (["chat", "-p"], "requires an argument"),
        (["chat", "--kv", "q2"], "--kv: 'q2' is not one of f16, q8_0, q4_0."),
        (["chat", "--ctx", "8k"], "--ctx: '8k' is not a whole number."),
        (["serve", "--port", "70000"], "--port: 70000 is more than 65535."),
        (["chat", "--gpu-layers", "-2"], "--gpu-layers: -2 is less than -1."),
        (["bench", "--new-tokens", "many"], "--new-tokens wants a whole number."),
        (["starter"], "`nemolocal chat starter`"),
        (["./own.gguf"], "'./own.gguf' is a model, no command."),
        (["models", "starter"], "No such command 'starter'"),
        (["models", "search", " "], "nothing to look for"),
        (["hardware", "--hardware", "/no/such.toml"], "no hardware profile at /no/such.toml"),
    ],
)
def test_wrong_usage_is_one_line_and_2(cli: Cli, arguments: list[str], words: str) -> None:
    result = cli(*arguments)
    assert is_one_error(result, 2), result
    assert words in result.err


def test_help_says_what_holds_by_default(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = " ".join(cli("serve", "--help").out.split())
    for words in ("Default: 6366.", "Default: balanced.", "Default: 900.", "Default: ngram."):
        assert words in shown
    assert "[REF]..." in shown


def test_models_alone_prints_its_help(cli: Cli) -> None:
    result = cli("models")
    assert (result.code, result.err) == (2, "")
    assert "pull" in result.out


def test_wrong_flag_in_a_real_process(shell: Cli) -> None:
    result = shell("hardware", "--jason")
    assert is_one_error(result, 2), result


def test_wrong_settings_file(cli: Cli, home: Any) -> None:
    home.mkdir()
    (home / "config.toml").write_text("prot = 1")
    result = cli("config")
    assert is_one_error(result, 2)
    assert "unknown key 'prot'" in result.err


def test_what_the_system_refuses_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: object) -> None:
        raise PermissionError(13, "Permission denied", "/root/models")

    monkeypatch.setattr("nemolocal.hardware.survey", refuse)
    result = cli("hardware")
    assert is_one_error(result, 1)
    assert "/root/models" in result.err


def test_ctrl_c_is_quiet(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nemolocal.hardware.survey", interrupt)
    result = cli("hardware")
    assert (result.code, result.out, result.err) == (130, "", "")


def test_a_fault_of_ours_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        problem = error
    output.report_bug(ValueError, problem, problem.__traceback__)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "ValueError: two lines" in shown
    monkeypatch.setenv("NEMOLOCAL_DEBUG", "1")
    output.report_bug(ValueError, problem, problem.__traceback__)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="the shell that ends a pipe early is POSIX's")
def test_reader_that_leaves_is_quiet() -> None:
    # `true` reads nothing: the pipe is gone before the first line.
    script = 'sleep 0.1; "$0" -m nemolocal.cli.app models list; echo "code $?" >&2'
    done = subprocess.run(
        ["sh", "-c", f"({script}) | true", sys.executable],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert done.stderr.splitlines()[-1] == "code 1"


def run_python(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_the_engine_process_imports_next_to_nothing_again() -> None:
    loaded = run_python("import nemolocal.cli.app, sys; print(*sys.modules)")
    ours = {name for name in loaded if name.startswith("nemolocal")}
    assert ours == {"nemolocal", "nemolocal.cli", "nemolocal.cli.app"}
    assert not loaded & {"typer", "rich", "asyncio"}


def test_commands_are_there_before_anything_heavy() -> None:
    loaded = run_python("import nemolocal.cli.commands, sys; print(*sys.modules)")
    heavy = {
        "gradio",
        "fastapi",
        "uvicorn",
        "llama_cpp",
        "huggingface_hub",
        "jinja2",
        "psutil",
        "numpy",
        "httpx",
    }
    assert not loaded & heavy
    assert not {name for name in loaded if name.startswith("nemolocal.") and "cli" not in name} - {
        "nemolocal.config",
        "nemolocal.units",
        "nemolocal.errors",
        "nemolocal.log",
    }
