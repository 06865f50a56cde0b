"""`nemolocal chat`: one answer on stdout, and the conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nemolocal import config
from nemolocal.cli import chat
from nemolocal.errors import ContextLengthError, EngineDiedError, EngineError
from nemolocal.types import GenerationParams, Message
from tests import synthetic
from tests.cli.conftest import Cli, is_one_error
from tests.fakes import FakeService, FakeTextModel

Type = Callable[..., None]


def test_one_answer_is_all_of_stdout(cli: Cli, service: FakeService) -> None:
    result = cli("chat", "fake", "-p", "Hi", "--system", "Be brief.")
    assert (result.code, result.out, result.err) == (0, "Hello there.\n", "")
    (messages, params) = service.model.calls[0]
    assert messages == (Message("system", "Be brief."), Message("user", "Hi"))
    assert params == GenerationParams()
    assert service.n_closed == 1


def test_an_answer_ends_in_one_newline(cli: Cli, service: FakeService) -> None:
    service.model.pieces = ("One\n",)
    assert cli("chat", "-p", "Hi").out == "One\n"


@pytest.mark.parametrize("arguments", [["-p", "-"], []])
def test_prompt_from_stdin(cli: Cli, service: FakeService, arguments: list[str]) -> None:
    result = cli("chat", *arguments, stdin="two\nlines\n")
    assert (result.code, result.out) == (0, "Hello there.\n")
    assert service.model.calls[0][0] == (Message("user", "two\nlines\n"),)


def test_empty_prompt(cli: Cli, service: FakeService) -> None:
    assert is_one_error(cli("chat", "-p", "-", stdin=" \n"), 2)
    assert service.model.calls == []


def test_with_several_models_here_one_is_to_be_named(cli: Cli) -> None:
    folder = config.load().models_dir
    folder.mkdir(parents=True)
    for name in ("one", "two"):
        synthetic.write_tiny(folder / f"{name}.gguf")
    for command in (("chat", "-p", "Hi"), ("bench",)):
        refused = cli(*command)
        assert is_one_error(refused, 1), refused
        assert "one, two" in refused.err
        assert "REF" in refused.err


def test_cut_answer_is_said_on_stderr(cli: Cli, service: FakeService) -> None:
    service.model.n_ctx = 3
    result = cli("chat", "-p", "Hi")
    assert (result.code, result.out) == (0, "Hello there\n")
    assert "cut off after 2 tokens" in result.err


def test_prompt_over_the_context(cli: Cli, service: FakeService) -> None:
    service.model.n_ctx = 100
    result = cli("chat", "-p", "word " * 200)
    assert is_one_error(result, 1)
    assert "200 tokens" in result.err
    assert "100" in result.err


def test_engine_that_dies_in_the_middle(cli: Cli, service: FakeService) -> None:
    service.model.error = EngineDiedError("The engine's process ended.", hint="Try again.")
    result = cli("chat", "-p", "Hi")
    assert (result.code, result.out) == (1, "Hello")
    assert result.err == "error: The engine's process ended. Try again.\n"
    assert service.n_closed == 1


def test_load_that_fails(cli: Cli, service: FakeService) -> None:
    def fail(ref: str) -> None:
        raise EngineError(f"{ref} cannot be loaded.", hint="Free some memory.")

    service.on_load = fail
    result = cli("chat", "-p", "Hi")
    assert is_one_error(result, 1)
    assert service.n_closed == 1


def test_unknown_model(shell: Cli) -> None:
    result = shell("chat", "nemotron-3-nano-4c", "-p", "Hi")
    assert is_one_error(result, 1), result
    assert "Did you mean nemotron-3-nano-4b" in result.err


def test_model_of_the_catalogue_that_is_not_here(shell: Cli) -> None:
    result = shell("chat", "starter", "-p", "Hi")
    assert is_one_error(result, 1), result
    assert "nemolocal models pull starter" in result.err


@pytest.mark.model
def test_real_answer_where_the_driver_is_broken(
    shell: Cli, starter_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvml.json").write_text('{"init": 18}')
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml.json"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "fake_nvml"))
    result = shell("chat", starter_path, "-p", "Repeat the word: yes", "--ctx", "512", "--temperature", "0")
    assert (result.code, result.err) == (0, "")
    assert result.out.strip()


@pytest.mark.model
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send")
def test_ctrl_c_ends_a_real_answer_quietly(starter_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "nemolocal.cli.app",
        "chat",
        str(starter_path),
        "-p",
        "Tell a long story.",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4)  # the answer has begun
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the engine's process too
        assert process.wait(timeout=30) == 130
        assert process.stderr.read() == b""
    deadline = time.monotonic() + 5
    while left := running_in_group(process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def running_in_group(group: int) -> list[str]:
    """The processes of a process group that have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


# The conversation -------------------------------------------------------------------------------


@pytest.fixture
def typed(cli: Cli, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> Type:
    """Type lines at the prompt; an exception in their place is what input() raises."""

    def run(*lines: str | type[BaseException]) -> None:
        queue: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

        def answer(prompt: str) -> str:
            line = next(queue)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", answer)
        with asyncio.Runner() as runner:
            chat._converse(runner, chat.Conversation(service.model, GenerationParams()), service)

    return run


def questions(model: FakeTextModel) -> list[list[str]]:
    """What each call to the model was about."""
    return [[m.content for m in messages if isinstance(m, Message)] for messages, _ in model.calls]


def test_each_question_comes_with_its_history(
    typed: Type, service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("Hi", "", "And?")
    assert questions(service.model) == [["Hi"], ["Hi", "Hello there.", "And?"]]
    shown = capsys.readouterr()
    assert shown.out == "Hello there.\n" * 2
    assert "fake on CPU, context 8192 tokens" in shown.err
    assert "3 tokens" in shown.err


def test_commands(typed: Type, service: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    typed(
        "Hi",
        "/system Be a pirate.",
        "Ahoy",
        "/system",
        "/reset",
        "Again",
        "/nope",
        "/etc/hosts?",
        "/quit",
        "Not this",
    )
    assert questions(service.model) == [
        ["Hi"],
        ["Be a pirate.", "Ahoy"],
        ["Be a pirate.", "Again"],
        ["Be a pirate.", "Again", "Hello there.", "/etc/hosts?"],
    ]
    shown = capsys.readouterr().err
    assert "no command /nope" in shown
    assert "Be a pirate." in shown


def test_text_of_several_lines(typed: Type, service: FakeService) -> None:
    typed('"""one', "  two", 'three"""')
    assert questions(service.model) == [["one\n  two\nthree"]]


def test_ctrl_c_at_the_prompt_drops_the_line(typed: Type, service: FakeService) -> None:
    typed(KeyboardInterrupt, "Hi")
    assert questions(service.model) == [["Hi"]]


def test_failed_answer_keeps_the_session(
    typed: Type, service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.model.refusal = ContextLengthError(n_prompt=9, n_ctx=8)
    typed("Hi", "Again")
    assert questions(service.model) == [["Hi"], ["Again"]]  # what got no answer is not part of the history
    assert capsys.readouterr().err.count("error: The prompt has 9 tokens") == 2


def test_stopped_answer_keeps_the_session_and_what_came(service: FakeService) -> None:
    """Ctrl-C cancels the task that asks; the next question comes with the beginning of the answer."""
    service.model.pieces = ("Once", " upon") + (" a",) * 1000
    service.model.delay_s = 0.001
    talk = chat.Conversation(service.model, GenerationParams())
    written: list[str] = []

    async def ask() -> None:
        await talk.ask("A story", written.append)

    async def stop() -> None:
        task = asyncio.create_task(ask())
        while len(written) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stop())
    assert service.model.n_closed_early == 1
    assert talk.turns == [Message("user", "A story"), Message("assistant", "".join(written))]
