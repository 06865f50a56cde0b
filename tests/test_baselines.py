"""Results that are kept: where, and what is said of a new one beside an old one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nemolocal import baselines, config
from nemolocal.errors import UsageError
from tests.profiles import machine

HARDWARE = asdict(machine(("RTX 4090", 24)))


def run(streams: int, speed: float, *, n_new: int = 128) -> dict[str, Any]:
    figures = {"tokens_per_s_total": speed, "ttft_p50": 10 / speed if speed else 0.0}
    return {"streams": streams, "prompt_tokens": 512, "new_tokens": n_new, **figures}


def result(*runs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    devices = [{"n_layers": 33}]
    plan = {"context": 8192, "slots": 8, "kv_type": "f16", "kv_layout": "shared", "split_mode": "none"}
    plan["devices"] = devices
    about = {"model": "m:Q4_K_M", "plan": plan, "library": "llama-cpp-python 0.3.36", "nemolocal": "0.1.0"}
    return {"date": "2026-12-01", **about, "hardware": HARDWARE, "runs": list(runs), **changes}


def place(name: str, *, model: str = "m:Q4_K_M", hardware: Any = HARDWARE) -> Path:
    return baselines.place(name, config.load(), model=model, hardware=hardware)


def test_names_are_kept_apart_by_model_and_machine(home: Path) -> None:
    path = place("before")
    assert path.is_relative_to(home / "data" / "bench")
    other = asdict(machine(("RTX 4090", 24), ("RTX 4090", 24)))
    assert len({path, place("before", model="m:Q8_0"), place("before", hardware=other), place("b")}) == 4
    assert place("before", hardware={**HARDWARE, "ram": "of which less is free now"}) == path


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up", "a b", "-x", "x" * 65, "c:\\x", "näme"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name"):
        place(name)


def test_files_may_lie_anywhere(tmp_path: Path) -> None:
    assert place(str(tmp_path / "mine.json")) == tmp_path / "mine.json"
    with pytest.raises(UsageError, match="no folder"):
        place(str(tmp_path / "missing" / "mine.json"))
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UsageError):
        place(str(tmp_path / "folder.json"))


def test_what_is_written_is_read_again_and_the_last_one_is_found() -> None:
    loaded = config.load()
    assert baselines.last(loaded, model="m:Q4_K_M", hardware=HARDWARE) is None
    first = place("first")
    baselines.write(result(run(1, 100)), first)
    baselines.write(result(run(1, 200)), first)
    assert baselines.read(first)["runs"] == [run(1, 200)]
    assert [path.name for path in first.parent.iterdir()] == ["first.json"]
    assert baselines.last(loaded, model="m:Q4_K_M", hardware=HARDWARE) == first
    assert baselines.last(loaded, model="m:Q8_0", hardware=HARDWARE) is None


def test_missing_baseline_names_those_that_are_there() -> None:
    with pytest.raises(UsageError, match="--save NAME"):
        baselines.read(place("before"))
    baselines.write(result(run(1, 100)), place("after"))
    with pytest.raises(UsageError, match=r"no baseline before.*There are after"):
        baselines.read(place("before"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"runs": []}', "\0"])
def test_other_files_are_no_baselines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError):
        baselines.read(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError):
        baselines.read(path)


def test_runs_beside_the_same_runs_of_before() -> None:
    now = result(run(1, 100), run(8, 440), run(32, 910), run(4, 50))
    then = result(run(32, 1000), run(8, 500), run(1, 80), run(4, 50, n_new=64), run(4, 0))
    made = baselines.compare(now, then, "before")
    shares = {compared.streams: compared.tokens_per_s_total for compared in made.runs}
    assert shares == {1: 1.25, 8: 0.88, 32: 0.91}
    assert [compared.streams for compared in made.slower] == [8]
    assert made.runs[0].ttft == pytest.approx(0.8)
    assert made.differences == ()
    assert (made.name, made.date) == ("before", "2026-12-01")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hardware": asdict(machine(("RTX 3090", 24)))}, "machine: RTX 3090, Test CPU with 8 cores"),
        ({"model": "m:Q8_0"}, "model: m:Q8_0"),
        ({"library": "llama-cpp-python 0.3.35"}, "library: llama-cpp-python 0.3.35"),
        ({"nemolocal": "0.0.9"}, "version of NemoLocal: 0.0.9"),
        ({"plan": {**result()["plan"], "kv_type": "q8_0"}}, "plan: 8,192 tokens, 8 slots, shared q8_0 cache"),
    ],
)
def test_what_is_not_alike_is_said(changes: dict[str, Any], what: str) -> None:
    [line] = baselines.compare(result(run(1, 100)), result(run(1, 100), **changes), "before").differences
    assert line.startswith(f"The baseline is of another {what}")


def test_damaged_baseline_is_one_line() -> None:
    good = result(run(1, 100))
    for bad in ({**good, "runs": [{}]}, {**good, "hardware": None}, {**good, "runs": None}):
        with pytest.raises(UsageError, match="damaged"):
            baselines.compare(good, json.loads(json.dumps(bad)), "before")
