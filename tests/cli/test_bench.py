"""`nemolocal bench`: the table, the JSON, baselines, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import synthetic
from tests.cli.conftest import Cli, is_one_error
from tests.fakes import FakeService, FakeTextModel
from tests.profiles import machine


class Bench(FakeService):
    """A service over a model that says as many words as are wanted, for whatever it is called."""

    def admit(self, ref: str | None) -> FakeTextModel:
        return self.model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeTextModel:
    """What is measured, on a machine with one GPU."""
    fake = FakeTextModel(["word "] * 200)
    fake.delay_s = 0.001
    monkeypatch.setattr("nemolocal.bench.Service", lambda config, **hooks: Bench(fake))
    monkeypatch.setattr("nemolocal.hardware.survey", lambda config: machine(("RTX 4090", 24)))
    return fake


def bench(cli: Cli, *arguments: str | Path) -> Any:
    result = cli("bench", *arguments, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


FEW = ("--concurrency", "1,4", "--prompt-tokens", "16", "--new-tokens", "8")


@pytest.mark.usefixtures("model")
def test_json_has_the_promised_shape(cli: Cli, tiny: Path) -> None:
    result = bench(cli, tiny, *FEW)
    assert {"model", "plan", "runs", "library", "hardware"} <= set(result)
    assert [run["streams"] for run in result["runs"]] == [1, 4]
    promised = {"prompt_tokens", "new_tokens", "ttft_p50", "tokens_per_s_total", "tokens_per_s_stream"}
    assert all(promised <= set(run) for run in result["runs"])
    assert result["plan"]["slots"] == 4
    assert [entry["name"] for entry in result["memory"]] == ["RTX 4090", "RAM"]
    assert (result["left_out"], result["comparison"]) == ([], None)
    assert result["hardware"]["gpus"][0]["name"] == "RTX 4090"


@pytest.mark.usefixtures("model")
def test_table(cli: Cli, tiny: Path) -> None:
    result = cli("bench", tiny, *FEW, "--slots", "2")
    assert result.code == 0, result.err
    for text in ("RTX 4090", "2 answers at a time", "llama-cpp-python", "First text", "Planned", "Test CPU"):
        assert text in result.out
    assert "- Not measured: 4 streams need 4 slots" in result.out
    assert "baseline" not in result.out
    *_, step, measured = result.err.splitlines()
    assert step == "Measuring 1 stream"
    assert re.fullmatch(r"[\d,.]+ tokens a second in all, first text after [\d,]+ ms", measured)


def test_answers_that_end_early_are_said(cli: Cli, tiny: Path, model: FakeTextModel) -> None:
    model.pieces = ("so", "it", "ends")
    assert "- 4 at a time: 4 answers did not have 8 tokens." in cli("bench", tiny, *FEW).out


def test_baseline_is_kept_and_compared_with(cli: Cli, tiny: Path, home: Path, model: FakeTextModel) -> None:
    saved = cli("bench", tiny, *FEW, "--save", "before")
    assert "Saved as the baseline" in saved.out
    [path] = (home / "data" / "bench").rglob("*.json")
    assert path.stem == "before"
    kept = path.read_text()
    model.delay_s = 0.02
    later = cli("bench", tiny, *FEW)
    assert "To baseline" in later.out
    assert "- More than 10 % slower than the baseline before of" in later.out
    assert "1, 4 at a time." in later.out
    comparison = bench(cli, tiny, *FEW, "--compare", "before", "--save", "before")["comparison"]
    assert comparison["slower"] == [1, 4]
    assert comparison["differences"] == []
    assert all(run["tokens_per_s_total"] < 0.9 for run in comparison["runs"])
    assert path.read_text() != kept  # the new one is in the old one's place


@pytest.mark.usefixtures("model")
def test_what_was_measured_is_shown_where_it_cannot_be_kept(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(result: object, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("nemolocal.baselines.write", is_full)
    result = cli("bench", tiny, *FEW, "--save", "before")
    assert result.code == 1
    assert "First text" in result.out
    assert "No space left on device" in result.err.splitlines()[-1]


@pytest.mark.usefixtures("model")
def test_baseline_in_a_file_of_another_machine(
    cli: Cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "there.json"
    bench(cli, tiny, *FEW, "--save", file)
    monkeypatch.setattr("nemolocal.hardware.survey", lambda config: machine())
    assert bench(cli, tiny, *FEW)["comparison"] is None  # it has no name here
    assert "- The baseline is of another machine: RTX 4090" in cli("bench", tiny, *FEW, "--compare", file).out
    no_run = cli("bench", tiny, *FEW, "--new-tokens", "9", "--compare", file)
    assert "No run is like one of the baseline" in no_run.out


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    "wrong",
    [
        ("--concurrency", "0"),
        ("--concurrency", "-1,8"),
        ("--concurrency", "many"),
        ("--concurrency", ""),
        ("--concurrency", "1,,8"),
        ("--concurrency", "64"),
        ("--concurrency", "1.5"),
        ("--prompt-tokens", "0"),
        ("--prompt-tokens", "-5"),
        ("--prompt-tokens", "long"),
        ("--new-tokens", "1"),
        ("--new-tokens", "x"),
        ("--save", "a/b"),
        ("--save", "no-such-folder/x.json"),
        ("--compare", "before"),
        ("--compare", "no-such-file.json"),
        ("--slots", "1", "--concurrency", "2"),
        ("--ctx", "16", "--concurrency", "2"),
        ("--slots", "many"),
    ],
)
def test_nonsense_is_refused_before_anything_is_measured(
    cli: Cli, tiny: Path, model: FakeTextModel, wrong: tuple[str, ...]
) -> None:
    assert is_one_error(cli("bench", tiny, *wrong), 2)
    assert model.calls == []


def test_model_that_is_not_here(cli: Cli) -> None:
    assert is_one_error(cli("bench", "nope"), 1)
    assert is_one_error(cli("bench"), 1)
