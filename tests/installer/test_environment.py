"""The set-up as a user meets it: run.py in a clone, with a stand-in for the environment's Python."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import command
import environment
import pytest

from tests.installer.conftest import Clone, make_venv


def wait_for_call(clone: Clone, words: str) -> None:
    deadline = time.monotonic() + 20
    while not any(words in call for call in clone.calls()):
        assert time.monotonic() < deadline, f"{words} was never called"
        time.sleep(0.02)


def installs(clone: Clone) -> list[str]:
    return [call.split(" off ")[1] for call in clone.calls() if "pip install" in call]


def test_first_start_sets_everything_up_and_passes_the_arguments_on(clone: Clone) -> None:
    done = clone.run("chat", "-p", "Hello, you two")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["chat", "-p", "Hello, you two"]
    assert installs(clone)[-1] == "-e ."
    assert any("llama-cpp-python==0.3.36" in call for call in installs(clone))
    assert [call for call in clone.calls() if call.startswith("nemolocal")] == [
        "nemolocal models pull starter",
        "nemolocal chat -p Hello, you two",
    ]


def test_second_start_only_looks(finished: Clone) -> None:
    finished.forget_calls()
    done = finished.run()
    assert json.loads(done.stdout) == ["ui"]
    assert done.stderr == ""
    assert [call for call in finished.calls() if "version_info" not in call] == ["nemolocal ui"]


def test_exit_code_is_the_commands(finished: Clone) -> None:
    assert finished.run("serve", "--fail").returncode == 7


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_signal_reaches_the_command_itself(finished: Clone) -> None:
    process = finished.popen("serve", "--stay")
    assert process.stdout is not None
    assert "serve" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM


def test_failed_step_is_one_line_with_the_log_and_is_taken_up_again(clone: Clone) -> None:
    clone.set_faults(**{"-e .": {"says": "NewConnectionError: no route", "exit": 1}})
    done = clone.run()
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == (
        "Set-up failed: The package index cannot be reached. Check the connection (HTTPS_PROXY, where there "
        f"is a proxy) and run the same command again. (log: {clone.root}/.venv/setup.log)"
    )
    assert "Traceback" not in done.stderr
    assert "no route" in (clone.root / ".venv" / "setup.log").read_text()
    clone.set_faults()
    clone.forget_calls()
    assert clone.run().returncode == 0
    assert installs(clone) == ["-e ."], "the engine was installed before and is left alone"


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_set_up_ends_its_command_and_goes_on_later(
    clone: Clone, number: signal.Signals, code: int
) -> None:
    clone.set_faults(**{"-e .": {"sleeps_s": 60}})
    process = clone.popen("chat")
    wait_for_call(clone, "-e .")
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == code
    assert stderr.splitlines()[-1] == "Stopped. The same command goes on from here."
    assert set(clone.stamps()) == {"python", "engine"}
    clone.set_faults()
    clone.forget_calls()
    assert clone.run("chat").returncode == 0
    assert installs(clone) == ["-e ."]


def test_second_set_up_waits_for_the_first(clone: Clone) -> None:
    clone.set_faults(**{"-e .": {"sleeps_s": 0.8}})
    first = clone.popen("one")
    wait_for_call(clone, "-e .")
    second = clone.popen("two")
    one = first.communicate(timeout=30)
    two = second.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (0, 0)
    assert json.loads(one[0]) == ["one"]
    assert json.loads(two[0]) == ["two"]
    assert two[1] == "Another set-up is at work in this folder; waiting for it to end.\n"
    assert len([call for call in installs(clone) if call == "-e ."]) == 1


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_killed_set_up_keeps_the_lock_while_its_command_lives(clone: Clone) -> None:
    clone.set_faults(**{"-e .": {"sleeps_s": 0.8}})
    first = clone.popen()
    wait_for_call(clone, "-e .")
    first.kill()
    second = clone.run()
    first.communicate()
    assert second.returncode == 0
    assert second.stderr.startswith("Another set-up is at work")


def test_changed_project_installs_the_package_again_but_not_the_engine(finished: Clone) -> None:
    with (finished.root / "pyproject.toml").open("a") as file:
        file.write("# another line\n")
    finished.forget_calls()
    assert finished.run().returncode == 0
    assert installs(finished) == ["-e ."]


def test_another_engine_version_in_the_project_installs_that(finished: Clone) -> None:
    path = finished.root / "pyproject.toml"
    path.write_text(path.read_text().replace("llama-cpp-python==0.3.36", "llama-cpp-python==0.3.99"))
    assert finished.run().returncode == 0
    assert finished.stamps()["engine"]["version"] == "0.3.99"
    assert (finished.root / ".venv" / "engine").read_text() == "0.3.99"


def test_another_home_without_a_model_gets_one(finished: Clone) -> None:
    finished.forget_calls()
    assert finished.run(NEMOLOCAL_HOME="/somewhere/else").returncode == 0
    assert installs(finished) == []
    assert any("models_dir" in call for call in finished.calls())


def test_moved_clone_is_installed_again(finished: Clone, tmp_path: Path) -> None:
    moved = Clone(tmp_path / "elsewhere", finished.env)
    shutil.copytree(finished.root, moved.root)
    moved.forget_calls()
    assert moved.run().returncode == 0
    assert installs(moved) == ["-e ."]


def test_environment_whose_python_is_gone_is_made_anew(
    clone: Clone, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clone.run()
    venv = clone.root / ".venv"
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to("/nowhere/python3")
    (venv / "leftover").mkdir()
    made: list[Path] = []

    def run(words: list[object], *rest: object, **options: object) -> object:
        if "venv" in words:
            made.append(Path(str(words[-1])))
            make_venv(made[-1])
            return []
        return command.run(words, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(environment, "run", run)
    environment.set_up(environment.Place(clone.root))
    assert made == [venv]
    assert not (venv / "leftover").exists()
    assert "making it anew" in capsys.readouterr().err
    assert set(clone.stamps()) == {"python", "engine", "package", "models"}


def test_half_made_environment_is_not_trusted(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped while the environment was made: its Python may run although pip is only half there."""
    stamps = clone.root / ".venv" / "setup.json"
    stamps.write_text('{"making": true}')
    made: list[object] = []

    def run(words: list[object], *rest: object, **options: object) -> object:
        if "venv" in words:
            made.append(words)
            make_venv(clone.root / ".venv")
            return []
        return command.run(words, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(environment, "run", run)
    environment.set_up(environment.Place(clone.root))
    assert len(made) == 1


def test_python_without_venv_names_the_package(
    clone: Clone, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (clone.root / ".venv" / "bin" / "python").unlink()
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}")
    place = environment.Place(clone.root)
    assert environment.guard(lambda: environment.set_up(place), place) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert "comes without venv and ensurepip." in line
    assert f"apt-get install python{version}-venv" in line


def test_package_whose_installation_was_cut_off_is_forgotten(clone: Clone) -> None:
    half = clone.root / ".venv" / "site-packages" / "numpy-2.0.dist-info"
    whole = clone.root / ".venv" / "site-packages" / "rich-15.0.dist-info"
    for folder in (half, whole):
        folder.mkdir()
        (folder / "METADATA").write_text("")
    (whole / "RECORD").write_text("")
    clone.run()
    assert not half.exists()
    assert whole.exists()


def test_starter_is_fetched_only_where_there_is_no_model(clone: Clone) -> None:
    (clone.root / "models" / "mine").mkdir(parents=True)
    (clone.root / "models" / "mine" / "own.gguf").touch()
    clone.run()
    assert "nemolocal models pull starter" not in clone.calls()


def test_model_that_was_added_where_it_lies_counts(tmp_path: Path) -> None:
    assert not environment.has_model(tmp_path / "models")
    note = tmp_path / "models" / "imported" / "own.json"
    note.parent.mkdir(parents=True)
    assert not environment.has_model(tmp_path / "models")
    note.write_text("{}")
    assert environment.has_model(tmp_path / "models")


def test_starter_that_cannot_be_fetched_is_said_with_the_way_out(clone: Clone) -> None:
    clone.root.joinpath("no-model").touch()
    done = clone.run()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "Set-up failed: The starter model could not be fetched: The hub cannot be reached. Check the "
        f"connection. Run the same command again, or put a .gguf file into {clone.root}/models."
    )
    clone.root.joinpath("no-model").unlink()
    assert clone.run().returncode == 0


def test_another_pythons_packages_are_kept_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/opt/ros/packages")
    monkeypatch.setenv("PYTHONHOME", "/opt/python2")
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    env = environment.Setup(environment.Place(tmp_path)).context.env
    assert "PYTHONPATH" not in env
    assert "PYTHONHOME" not in env
    assert env["PIP_USER"] == "0"
    assert env["HTTPS_PROXY"] == "http://proxy:3128"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "The disk is full. Free about 4 GB where NemoLocal and the temporary folder lie, and run the "
            "same command again.",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/opt/nemolocal/.venv"),
            "Cannot write /opt/nemolocal/.venv: permission denied. Close a running NemoLocal, or clone "
            "into a folder of your own.",
        ),
        (
            FileExistsError(errno.EEXIST, "File exists", "/x/.venv"),
            "Cannot use /x/.venv: File exists. Mend or remove it.",
        ),
    ],
)
def test_file_errors_are_one_line(
    error: OSError, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise error

    assert environment.guard(work, environment.Place(tmp_path)) == 1
    assert capsys.readouterr().err == f"Set-up failed: {line}\n"


def test_file_in_the_way_of_the_environment(clone: Clone) -> None:
    clone.root.joinpath(".venv").rename(clone.root / "old")
    clone.root.joinpath(".venv").write_text("")
    done = clone.run()
    assert done.returncode == 1
    assert done.stderr == f"Set-up failed: Cannot use {clone.root}/.venv: File exists. Mend or remove it.\n"
