"""The list of models, and the health check."""

from __future__ import annotations

import dataclasses

import pytest

from tests.api.serving import assert_error, client
from tests.fakes import FakeService

pytestmark = pytest.mark.anyio


async def test_the_list_of_models() -> None:
    async with client(FakeService()) as caller:
        body = (await caller.get("/v1/models")).json()
    assert body["object"] == "list"
    assert body["data"] == [
        {
            "id": "fake",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "tests",
            "meta": {
                "name": "Fake",
                "n_ctx": 8192,
                "n_params": 134_515_008,
                "size": 98_362_432,
                "quant": "Q4_1",
                "is_loaded": True,
                "purpose": "chat",
            },
        }
    ]
    assert [model["name"] for model in body["models"]] == ["fake"]


async def test_one_model() -> None:
    async with client(FakeService()) as caller:
        assert (await caller.get("/v1/models/fake")).json()["id"] == "fake"
        for id in ("nope", "hf:owner/repo:Q4_K_M", "a%2Fb"):
            assert_error(await caller.get(f"/v1/models/{id}"), 404, param="model", code="model_not_found")


async def test_health_says_when_requests_can_be_served() -> None:
    service = FakeService()
    async with client(service) as caller:

        async def health(state: str, **fields: object) -> tuple[int, dict[str, object]]:
            service.current = dataclasses.replace(service.current, state=state, **fields)  # type: ignore[arg-type]
            response = await caller.get("/health")
            return response.status_code, response.json()

        assert await health("ready") == (200, {"status": "ok"})
        assert await health("idle") == (200, {"status": "ok"})
        assert await health("loading", progress=0.25) == (503, {"status": "loading", "progress": 0.25})
        assert await health("failed", problem="It is cut off.") == (
            503,
            {"status": "failed", "problem": "It is cut off."},
        )
        assert (await caller.head("/health")).status_code == 503
        # Another model is there and answers.
        assert await health("failed", loaded=("fake",)) == (200, {"status": "ok"})
        assert await health("loading", loaded=("fake",)) == (200, {"status": "ok"})


async def test_the_headless_root_points_to_the_api() -> None:
    async with client(FakeService()) as caller:
        response = await caller.get("/")
        assert response.status_code == 200
        assert "/v1" in response.text
        assert_error(await caller.get("/else"), 404, code="unknown_route")
