"""Measuring: what is asked of the model, what comes of it, and what is refused or left out before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemolocal import bench, config
from nemolocal.bench import Load, Prompts
from nemolocal.errors import DoesNotFitError, EngineError, ModelNotFoundError, UsageError
from nemolocal.hardware import Hardware
from tests import synthetic
from tests.fakes import FakeTextModel
from tests.profiles import machine

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the bench on another machine."""

    def put(hardware: Hardware) -> None:
        monkeypatch.setattr("nemolocal.hardware.survey", lambda config: hardware)

    put(machine())
    return put


def prompts_of(model: FakeTextModel) -> list[Sequence[int]]:
    return [call[0] for call in model.calls]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("streams", "n_prompt", "n_new"),
    [((), 8, 8), ((1, 0), 8, 8), ((-1,), 8, 8), ((33,), 8, 8), ((1,), 0, 8), ((1,), 8, 1)],
)
def test_nonsense_is_refused(streams: tuple[int, ...], n_prompt: int, n_new: int) -> None:
    with pytest.raises(UsageError):
        Load(streams, n_prompt, n_new)


async def test_streams_ask_at_once_for_whole_answers_to_prompts_that_share_nothing() -> None:
    model = FakeTextModel(["word "] * 100)
    model.read_delay_s, model.delay_s = 0.05, 0.002
    prompts = Prompts(1000)
    run = await bench.measure(model, prompts, Load((5,), 20, 10), 5)
    assert (run.streams, run.prompt_tokens, run.new_tokens, run.n_short) == (5, 20, 10, 0)
    asked = prompts_of(model)
    assert [len(prompt) for prompt in asked] == [20] * 5
    assert len({prompt[0] for prompt in asked}) == 5
    assert all(125 <= id < 500 for prompt in asked for id in prompt)
    for _, params in model.calls:
        assert params.sampling.ignore_eos
        assert (params.max_tokens, params.reuse_cache) == (10, False)
    # Five prompts of 20 tokens are read in 50 ms and a bit, side by side.
    assert 0.05 < run.ttft_p50 <= run.ttft_max
    assert run.prompt_tokens_per_s == pytest.approx(5 * 20 / run.ttft_max, rel=0.5)
    # Nine more texts, each 2 ms or more after the one before.
    assert 0 < run.tokens_per_s_stream < 500
    assert run.tokens_per_s_decode == pytest.approx(5 * run.tokens_per_s_stream, rel=0.5)
    assert run.tokens_per_s_total < run.tokens_per_s_decode


async def test_one_stream_is_measured_several_times_with_fresh_prompts() -> None:
    model = FakeTextModel(["word "] * 10)
    await bench.measure(model, Prompts(1000), Load((1,), 4, 4), 1)
    assert len({tuple(prompt) for prompt in prompts_of(model)}) == len(model.calls) == bench.N_ROUNDS_ALONE


async def test_answers_of_another_length_are_counted() -> None:
    run = await bench.measure(FakeTextModel(["a", "b", "c"]), Prompts(1000), Load((2,), 4, 8), 2)
    assert run.n_short == 2


async def test_failure_of_one_answer_ends_the_others() -> None:
    model = FakeTextModel(["word "] * 1000)
    model.delay_s = 0.01
    model.error = EngineError("The engine is gone.")
    with pytest.raises(EngineError, match="gone"):
        await bench.measure(model, Prompts(1000), Load((3,), 4, 500), 3)


def test_tiny_vocabulary_has_prompts_too() -> None:
    assert len(Prompts(3).next(5)) == 5


@pytest.mark.usefixtures("on")
def test_there_is_a_slot_for_each_stream_and_room_for_all(tiny: Path) -> None:
    made = bench.prepare(str(tiny), config.load(), Load((1, 12, 3), 300, 40))
    assert made.plan.load.n_slots == 12
    assert made.plan.load.n_ctx >= 12 * 340
    assert made.left_out == ()
    assert made.model.path == tiny


@pytest.mark.usefixtures("on")
def test_settings_count_and_streams_that_they_do_not_allow_are_left_out(tiny: Path) -> None:
    load = Load((1, 4, 8), 300, 40)
    made = bench.prepare(str(tiny), config.load({"slots": 4}), load)
    assert [entry.streams for entry in made.left_out] == [8]
    assert "8 slots" in made.left_out[0].why
    made = bench.prepare(str(tiny), config.load({"ctx": 1500}), load)
    assert [entry.streams for entry in made.left_out] == [8]
    assert "2,720 tokens" in made.left_out[0].why
    made = bench.prepare(str(tiny), config.load({"kv_layout": "split"}), load)
    assert (made.left_out, made.plan.load.kv_layout) == ((), "split")
    assert 340 <= made.plan.load.n_ctx < 680  # each slot has so much
    with pytest.raises(UsageError, match="1 stream needs a context of 340 tokens"):
        bench.prepare(str(tiny), config.load({"kv_layout": "split", "ctx": 256}), load)
    with pytest.raises(UsageError, match=r"Nothing.*2 streams need 2 slots"):
        bench.prepare(str(tiny), config.load({"slots": 1}), replace(load, streams=(2, 3)))


def test_what_does_not_fit_is_said_with_a_way_out(tiny: Path, on: Any) -> None:
    on(machine(ram_gib=0.1))
    with pytest.raises(DoesNotFitError, match="--concurrency"):
        bench.prepare(str(tiny), config.load(), Load((32,), 512, 128))


@pytest.mark.usefixtures("on")
def test_model_that_writes_nothing_is_refused(tmp_path: Path) -> None:
    path = synthetic.write_tiny(tmp_path / "embed.gguf", keys={"llama.pooling_type": 1})
    with pytest.raises(UsageError, match="writes no answers"):
        bench.prepare(str(path), config.load(), Load((1,), 8, 8))


@pytest.mark.usefixtures("on")
def test_model_that_is_not_here() -> None:
    with pytest.raises(ModelNotFoundError):
        bench.prepare("starter", config.load(), Load((1,), 8, 8))


async def test_memory_beside_the_plan(tiny: Path, on: Any) -> None:
    """What a GPU's free memory lost since before the load, at most; what the profile of a machine that is
    not this one cannot tell is not told."""
    before = machine(("RTX 4090", 24))
    on(before)
    made = bench.prepare(str(tiny), config.load(), Load((1,), 8, 8))
    memory = bench.Memory(made)
    for gib in (3, 1):
        gpu = replace(before.gpus[0], free_bytes=before.gpus[0].free_bytes - (gib << 30))
        on(replace(before, gpus=(gpu,)))
        await memory.look()
    card, ram = memory.entries()
    assert (card.name, card.taken_bytes) == ("RTX 4090", 3 << 30)
    assert card.forecast_bytes == made.plan.to_dict()["devices"][0]["total_bytes"]
    assert (ram.id, ram.taken_bytes) == ("ram", None)
    settings = replace(made.config.settings, hardware="machine.toml")
    memory = bench.Memory(replace(made, config=replace(made.config, settings=settings)))
    await memory.look()
    assert next(memory.entries()).taken_bytes is None


def test_what_takes_minutes_is_said_by_what_took_how_long_before() -> None:
    assert bench.time_left(600, n_done=3, n_left=4) == ", at most about 13 min for the rest"
    assert bench.time_left(30, n_done=3, n_left=4) == ""
    assert bench.time_left(0, n_done=0, n_left=41) == ""


@pytest.mark.model
async def test_whole_bench_on_a_real_engine(tiny: Path) -> None:
    made = bench.prepare(str(tiny), config.load(), Load((1, 3), 24, 6))
    steps: list[str] = []
    report = await bench.run(made, steps.append)
    assert [run.streams for run in report.runs] == [1, 3]
    assert [run.n_short for run in report.runs] == [0, 0]
    assert all(run.tokens_per_s_total > 0 < run.ttft_p50 for run in report.runs)
    assert [step.split()[0] for step in steps[:2] + steps[3:4]] == ["Loading", "Measuring", "Measuring"]
    assert [step.endswith(" ms") for step in steps] == [False, False, True, False, True]
    result = json.loads(json.dumps(report.to_dict()))
    assert {"model", "plan", "runs", "library", "hardware"} <= set(result)
    assert result["plan"]["slots"] == 3
    assert result["library"].startswith("llama-cpp-python 0.")
    assert result["memory"][-1]["taken_bytes"] > 10 << 20  # a process of its own
