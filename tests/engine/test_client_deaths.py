"""The parent's side when the child dies, hangs or is not wanted any more; on children without a model."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from nemolocal.engine import client, worker
from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import LoadSpec, Ready
from nemolocal.errors import EngineDiedError
from nemolocal.types import GenerationParams, Segment
from tests.engine import children

pytestmark = pytest.mark.anyio

SPEC = LoadSpec("none.gguf", 64, 1)
HI = (Segment("Hi"),)


async def read(engine: EngineClient) -> None:
    async for _ in engine.generate(HI, GenerationParams()):
        pass


async def test_load_that_nobody_waits_for_is_ended_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "main", children.loads_forever)
    is_loading = asyncio.Event()
    start = EngineClient.start(SPEC, tmp_path / "log", lambda share: is_loading.set())
    starting = asyncio.create_task(start)
    await asyncio.wait_for(is_loading.wait(), 30)
    before = time.monotonic()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert time.monotonic() - before < client.CLOSE_S / 2


async def test_child_that_is_ready_for_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker, "main", children.loads_forever)
    engine = EngineClient(SPEC, tmp_path / "log")
    engine._ready.cancel()
    engine._dispatch([Ready(children.INFO)])
    await asyncio.wait_for(_kill(engine), 30)


async def _kill(engine: EngineClient) -> None:
    engine._process.kill()
    await engine.close()


async def test_death_in_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker, "main", children.dies_in_load)
    with pytest.raises(EngineDiedError, match="exit code 3"):
        await asyncio.wait_for(EngineClient.start(SPEC, tmp_path / "log"), 30)


@pytest.mark.skipif(sys.platform == "win32", reason="the name of the function is found another way there")
async def test_abort_in_native_code_leaves_its_reason_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "main", children.aborts_in_native_code)
    with pytest.raises(EngineDiedError, match=r"signal 6.*GGML_ASSERT\(sense\) failed"):
        await asyncio.wait_for(EngineClient.start(SPEC, tmp_path / "log"), 30)
    assert capfd.readouterr().out == ""
    assert (tmp_path / "log").read_text().splitlines() == ["file.cpp:1: GGML_ASSERT(sense) failed"]


async def test_death_answers_every_stream_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker, "main", children.dies_at_the_first_request)
    engine = await EngineClient.start(SPEC, tmp_path / "log")
    results = await asyncio.gather(*(read(engine) for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [EngineDiedError] * 5
    assert (engine.is_alive, engine.n_active) == (False, 0)
    await engine.close()
    await engine.close()


async def test_child_that_hangs_after_its_pipe_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "main", children.hangs_after_its_pipe)
    monkeypatch.setattr(client, "CLOSE_S", 0.3)
    engine = await EngineClient.start(SPEC, tmp_path / "log")
    with pytest.raises(EngineDiedError):
        await asyncio.wait_for(read(engine), 30)
    await asyncio.wait_for(engine.close(), 5)


async def test_log_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(worker, "main", children.dies_in_load)
    with pytest.raises(EngineDiedError):
        await asyncio.wait_for(EngineClient.start(SPEC, tmp_path / "file" / "log"), 30)
    worker._redirect_stderr(str(tmp_path / "file" / "log"))
