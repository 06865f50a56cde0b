"""The parent's side when the child dies, hangs or is not wanted any more; on children without a model."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from nemolocal.engine import child, client, worker
from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import LoadSpec, Ready
from nemolocal.errors import EngineDiedError, EngineError, OutOfMemoryError
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
    child.redirect_stderr(str(tmp_path / "file" / "log"))


async def test_child_that_hangs_is_ended_with_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "main", children.hangs_at_the_first_request)
    engine = await EngineClient.start(SPEC, tmp_path / "log", watchdog_s=0.4)
    await asyncio.sleep(0.6)  # idle for longer than that is no fault
    assert engine.is_alive
    results = await asyncio.wait_for(
        asyncio.gather(*(read(engine) for _ in range(3)), return_exceptions=True), 30
    )
    assert [type(result) for result in results] == [EngineDiedError] * 3
    assert all("no sign of life" in str(result) for result in results)
    assert (engine.is_alive, engine.n_active) == (False, 0)
    assert "no sign of life" in str(engine.death)
    with pytest.raises(EngineDiedError, match="no sign of life"):
        await read(engine)
    await asyncio.wait_for(engine.close(), 5)
    assert not engine._process.is_alive()


async def test_slow_child_is_not_taken_for_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "main", children.reads_for_long)
    engine = await EngineClient.start(SPEC, tmp_path / "log", watchdog_s=1.0)
    await read(engine)
    await asyncio.sleep(1.2)
    await read(engine)
    assert engine.is_alive
    await engine.close()


async def test_watchdog_that_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker, "main", children.hangs_at_the_first_request)
    monkeypatch.setattr(client, "CLOSE_S", 0.1)
    engine = await EngineClient.start(SPEC, tmp_path / "log")
    reading = asyncio.create_task(read(engine))
    await asyncio.sleep(0.6)
    assert not reading.done()
    await engine.close()
    with pytest.raises(EngineDiedError):
        await reading


async def test_load_that_shows_no_progress_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker, "main", children.hangs_in_load)
    monkeypatch.setattr(client, "LOAD_SILENCE_S", 2.0)  # importing the package counts too
    shares: list[float] = []
    start = EngineClient.start(SPEC, tmp_path / "log", shares.append, watchdog_s=0.1)
    with pytest.raises(EngineDiedError, match="no sign of life for 2 s while it loaded"):
        await asyncio.wait_for(start, 30)
    assert shares[-1] == 0.7


async def test_want_of_memory_is_told_from_other_faults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "main", children.runs_out_of_memory_in_load)
    with pytest.raises(EngineError, match="could not make a context") as caught:
        await asyncio.wait_for(EngineClient.start(SPEC, tmp_path / "log"), 30)
    assert caught.value.is_out_of_memory
    monkeypatch.setattr(worker, "main", children.lacks_memory_for_its_cache)
    with pytest.raises(OutOfMemoryError, match="No context") as lacking:
        await asyncio.wait_for(EngineClient.start(SPEC, tmp_path / "log"), 30)
    error = lacking.value
    assert (error.device, error.wanted_bytes, error.free_bytes, error.held_bytes) == ("GPU-1", 800, 700, 1024)
    assert (error.is_out_of_memory, error.hint) == (True, "Use less.")
    monkeypatch.setattr(worker, "main", children.runs_out_of_memory_at_the_first_request)
    engine = await EngineClient.start(SPEC, tmp_path / "log")
    with pytest.raises(EngineDiedError, match="llama_decode failed"):
        await read(engine)
    await asyncio.wait_for(engine._gone.wait(), 10)
    assert engine.death is not None
    assert engine.death.is_out_of_memory
    assert "llama_decode failed" in engine.death.message
    await engine.close()
    monkeypatch.setattr(worker, "main", children.dies_in_load)
    with pytest.raises(EngineDiedError) as died:
        await asyncio.wait_for(EngineClient.start(SPEC, tmp_path / "other"), 30)
    assert not died.value.is_out_of_memory


async def test_process_that_cannot_be_ended_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one that waits inside a driver: not even a kill ends it."""
    monkeypatch.setattr(worker, "main", children.hangs_at_the_first_request)
    monkeypatch.setattr(client, "CLOSE_S", 0.2)
    engine = await EngineClient.start(SPEC, tmp_path / "log", watchdog_s=0.2)
    kill = engine._process.kill
    monkeypatch.setattr(engine._process, "kill", lambda: None)
    with pytest.raises(EngineDiedError, match="no sign of life"):
        await asyncio.wait_for(read(engine), 30)
    await asyncio.wait_for(engine.close(), 5)
    kill()
