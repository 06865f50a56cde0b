"""What is told when llama.cpp fails is its own reason, not the last thing that it said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nemolocal.engine.backend import Batch, Row
from nemolocal.engine.llama.backend import LlamaBackend
from nemolocal.engine.llama.library import Log
from nemolocal.engine.messages import LoadSpec
from nemolocal.errors import EngineError
from tests import synthetic
from tests.engine.kinds import listening

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with listening() as log:
        yield log


def load(path: Path, log: Log, **more: object) -> LlamaBackend:
    spec = LoadSpec(str(path), n_ctx=64, n_slots=1, n_threads=1, **more)  # type: ignore[arg-type]
    return LlamaBackend(spec, lambda share: None, log=log)


def test_file_that_ends_early(tmp_path: Path, log: Log) -> None:
    whole = synthetic.write_tiny(tmp_path / "whole.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:-1000])
    with pytest.raises(EngineError, match="not within the file bounds"):
        load(cut, log)


def test_file_that_is_not_there(tmp_path: Path, log: Log) -> None:
    with pytest.raises(EngineError, match="No such file"):
        load(tmp_path / "none.gguf", log)


def test_cache_that_does_not_fit_the_model(tmp_path: Path, log: Log) -> None:
    path = synthetic.write_tiny(tmp_path / "model.gguf")  # heads of 16, blocks of 32
    with pytest.raises(EngineError, match="block size 32"):
        load(path, log, kv_type="q8_0")


def test_batch_that_leaves_a_position_out(tmp_path: Path, log: Log) -> None:
    backend = load(synthetic.write_tiny(tmp_path / "model.gguf"), log)
    try:
        backend.launch(Batch([Row(0, 0, [5, 6])]))
        backend.collect()
        with pytest.raises(EngineError, match="inconsistent sequence positions") as caught:
            backend.launch(Batch([Row(0, 9, [5, 6])]))
        assert "\n" not in caught.value.message
    finally:
        backend.close()
