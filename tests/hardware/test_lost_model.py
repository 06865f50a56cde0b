"""A GPU that is lost and comes back while a server answers on the CPU: nothing restarts, nothing is stale."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nemolocal import config, shelf
from nemolocal.service import Service
from nemolocal.types import Finish, GenerationParams, SamplingParams
from tests import synthetic
from tests.hardware.conftest import GIB, Install, gpu

pytestmark = [pytest.mark.model, pytest.mark.anyio]
SHORT = GenerationParams(SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=3)


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    """Over two copies of a tiny model, on the CPU."""
    monkeypatch.setattr(shelf, "LOOK_EVERY_S", 0.0)
    folder = config.load().models_dir
    folder.mkdir(parents=True)
    one = synthetic.write_tiny(folder / "one.gguf")
    shutil.copy(one, folder / "two.gguf")
    made = Service(config.load({"ctx": 512, "slots": 1, "threads": 1, "gpu_layers": 0}))
    yield made
    await made.close()


async def answers(service: Service, ref: str) -> bool:
    items: list[Any] = [item async for item in service.find_model(ref).complete([1, 2, 3], SHORT)]
    return isinstance(items[-1], Finish) and items[-1].usage.completion_tokens == 3


async def test_a_lost_gpu_is_said_and_models_go_on(nvml: Install, service: Service) -> None:
    file = nvml(gpus=[gpu(memory=[[8 * GIB, 6 * GIB]])])
    assert await answers(service, "one")
    assert service.shelf.hardware().gpus[0].free_bytes == 6 * GIB
    file.write_text(json.dumps({"gpus": [gpu(memory=[15])]}))
    assert await answers(service, "one")
    assert await answers(service, "two")  # loaded while the GPU is away
    lost = service.shelf.hardware()
    assert (lost.mode, lost.gpus[0].state, lost.gpus[0].free_bytes) == ("cpu", "lost", 0)
    assert "NVML 15" in lost.reason
    file.write_text(json.dumps({"gpus": [gpu(memory=[[8 * GIB, 5 * GIB]])]}))
    back = service.shelf.hardware()
    assert (back.mode, back.gpus[0].state, back.gpus[0].free_bytes) == ("gpu", "ok", 5 * GIB)
    await service.unload("two")
    looks = [[8 * GIB, free * GIB] for free in (5, 4, 3, 2, 1)]
    file.write_text(json.dumps({"gpus": [gpu(memory=looks)]}))
    assert await answers(service, "two")
    (after,) = json.loads(file.read_text())["gpus"]
    assert len(after["memory"]) < len(looks)  # loading has looked anew
