"""`/metrics`: what each model has done and what it is doing, in Prometheus' text format.

The names are those of llama.cpp's server where it counts the same, with our prefix. Format:
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nemolocal.service import LoadedModel, Service
from nemolocal.totals import ModelTotals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "nemolocal_"

router = APIRouter()
Model = TypeVar("Model")


@dataclass(frozen=True, slots=True)
class Metric(Generic[Model]):
    """One figure of each model."""

    name: str
    help: str
    value: Callable[[Model], float]


COUNTERS: tuple[Metric[ModelTotals], ...] = (
    Metric("requests_total", "Requests that ended with an answer.", lambda it: it.n_requests),
    Metric("requests_cancelled_total", "Requests whose client left.", lambda it: it.n_cancelled),
    Metric("requests_failed_total", "Requests that the engine failed.", lambda it: it.n_failures),
    Metric("queue_seconds_total", "Time that requests waited for a slot.", lambda it: it.queue_s),
    Metric(
        "prompt_tokens_total", "Prompt tokens that were read.", lambda it: it.prompt_tokens - it.cached_tokens
    ),
    Metric("prompt_tokens_cached_total", "Prompt tokens known already.", lambda it: it.cached_tokens),
    Metric("prompt_seconds_total", "Time that reading prompts took.", lambda it: it.prompt_s),
    Metric("tokens_predicted_total", "Tokens of answers.", lambda it: it.completion_tokens),
    Metric("tokens_predicted_seconds_total", "Time that writing answers took.", lambda it: it.decode_s),
    Metric("draft_tokens_total", "Tokens that were guessed ahead.", lambda it: it.drafted_tokens),
    Metric("draft_tokens_accepted_total", "Guessed tokens that were right.", lambda it: it.accepted_tokens),
    Metric("loads_total", "Times that the model was loaded.", lambda it: it.n_loads),
    Metric("loads_failed_total", "Times that loading it failed.", lambda it: it.n_failed_loads),
    Metric("load_seconds_total", "Time that loading it took.", lambda it: it.load_s),
)

GAUGES: tuple[Metric[LoadedModel], ...] = (
    Metric("requests_processing", "Requests that have a slot now.", lambda it: it.n_active - it.n_waiting),
    Metric("requests_deferred", "Requests that wait for a slot now.", lambda it: it.n_waiting),
    Metric(
        "kv_cache_usage_ratio",
        "Share of the KV cache that holds something, be it what is remembered.",
        lambda it: it.n_taken_cells / it.n_cells if it.n_cells else 0.0,
    ),
)


@router.api_route("/metrics", methods=["GET", "HEAD"])
async def get_metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    text = exposition(service.totals(), service.loaded())
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


def exposition(totals: Mapping[str, ModelTotals], loaded: Sequence[LoadedModel]) -> str:
    """The totals of each model by its id, and the state of those that are loaded, as text."""
    lines = [line for metric in COUNTERS for line in _lines(metric, "counter", totals)]
    now = {model.id: model for model in loaded}
    lines += [line for metric in GAUGES for line in _lines(metric, "gauge", now)]
    return "".join(line + "\n" for line in lines)


def _lines(metric: Metric[Model], kind: str, models: Mapping[str, Model]) -> Iterator[str]:
    name = PREFIX + metric.name
    yield f"# HELP {name} {metric.help}"
    yield f"# TYPE {name} {kind}"
    for id, model in models.items():
        yield f'{name}{{model="{_escaped(id)}"}} {metric.value(model)}'


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
