"""The metrics: their format, and that they say what the models did."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from starlette.applications import Starlette

from nemolocal.api.metrics import COUNTERS, GAUGES, exposition
from nemolocal.service import LoadedModel
from nemolocal.totals import ModelTotals, Totals
from nemolocal.types import Finish, Timings, Usage
from tests.api.serving import assert_error, client
from tests.fakes import FakeService

pytestmark = pytest.mark.anyio

LINE = re.compile(r'(nemolocal_[a-z_]+)\{model="((?:[^"\\\n]|\\["\\n])*)"\} ([0-9.e+-]+)')


def samples(text: str) -> dict[tuple[str, str], float]:
    """(metric, model) to value. Each metric has its two lines of comment before its samples."""
    found, current = {}, ""
    for line in text.splitlines():
        if line.startswith("# "):
            _, word, name, *rest = line.split(" ")
            assert (name != current) if word == "HELP" else (word, name) == ("TYPE", current)
            assert rest
            current = name
        else:
            name, model, value = LINE.fullmatch(line).groups()  # type: ignore[union-attr]
            assert name == current
            found[name.removeprefix("nemolocal_"), model] = float(value)
    assert text.endswith("\n")
    return found


async def test_what_the_models_did() -> None:
    service, totals = FakeService(), Totals()
    usage = Usage(100, 20, cached_tokens=64, drafted_tokens=9, accepted_tokens=4)
    for _ in range(2):
        totals.finished("a", Finish("stop", usage, Timings(0.25, 0.5, 2.0)))
    totals.failed("b")
    totals.cancelled("a")
    totals.loaded("b", seconds=1.5)
    totals.load_failed("b")
    service.done = totals.snapshot()
    async with client(service) as caller:
        response = await caller.get("/metrics")
        assert (await caller.head("/metrics")).status_code == 200
        assert_error(await caller.post("/metrics", json={}), 405, code="method_not_allowed")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(response.text)
    assert {name: value for (name, model), value in found.items() if model == "a"} == {
        "requests_total": 2,
        "requests_cancelled_total": 1,
        "requests_failed_total": 0,
        "queue_seconds_total": 0.5,
        "prompt_tokens_total": 72,
        "prompt_tokens_cached_total": 128,
        "prompt_seconds_total": 1,
        "tokens_predicted_total": 40,
        "tokens_predicted_seconds_total": 4,
        "draft_tokens_total": 18,
        "draft_tokens_accepted_total": 8,
        "loads_total": 0,
        "loads_failed_total": 0,
        "load_seconds_total": 0,
    }
    of_b = {name: value for (name, model), value in found.items() if model == "b" and value}
    assert of_b == {
        "requests_failed_total": 1,
        "loads_total": 1,
        "loads_failed_total": 1,
        "load_seconds_total": 1.5,
    }


async def test_what_is_running_and_what_waits() -> None:
    service = FakeService()
    service.in_memory = [
        LoadedModel("m", "CPU", 4096, 4, 0, 0, 9, None, n_waiting=5, n_cells=4096, n_taken_cells=1024),
        LoadedModel("embedder", "CPU", 512, 4, 0, 0, 3, None),
    ]
    async with client(service) as caller:
        found = samples((await caller.get("/metrics")).text)
    names = [metric.name for metric in GAUGES]
    assert names == ["requests_processing", "requests_deferred", "kv_cache_usage_ratio"]
    assert [found[name, "m"] for name in names] == [4, 5, 0.25]
    assert [found[name, "embedder"] for name in names] == [3, 0, 0]


def test_before_the_first_request_there_is_no_sample() -> None:
    text = exposition({}, [])
    assert samples(text) == {}
    assert text.count(" counter\n") == len(COUNTERS)
    assert text.count(" gauge\n") == len(GAUGES)


def test_a_name_of_any_kind_stays_one_label() -> None:
    text = exposition({'a"b\\c\nd': ModelTotals(n_requests=1)}, [])
    assert samples(text)["requests_total", r"a\"b\\c\nd"] == 1


def test_every_total_is_told() -> None:
    """A figure that is counted and told by no metric would change nothing here."""
    nothing = exposition({"m": ModelTotals()}, [])
    for field in fields(ModelTotals):
        assert exposition({"m": ModelTotals(**{field.name: 1})}, []) != nothing, field.name


async def test_a_page_does_not_take_the_route() -> None:
    service = FakeService()
    service.done = {"m": ModelTotals(n_requests=3)}
    async with client(service, page=Starlette) as caller:
        assert 'nemolocal_requests_total{model="m"} 3\n' in (await caller.get("/metrics")).text
