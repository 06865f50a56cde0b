"""Experts that stay in RAM: which tensors llama.cpp is told to move, and that it does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nemolocal.engine.llama import overrides
from nemolocal.engine.llama.library import Log, load_library, load_model
from nemolocal.engine.messages import LoadSpec
from nemolocal.models.shape import LayerKind, layer_kinds
from tests import synthetic

pytestmark = pytest.mark.model


class Lines(Log):
    """Keeps every line as well."""

    def __init__(self, library: Any) -> None:
        self.lines: list[str] = []
        make = library.llama_log_callback

        def listening(listen: Any) -> Any:
            def both(level: int, text: bytes, user: Any) -> None:
                self.lines.append(text.decode())
                listen(level, text, user)

            return make(both) if listen else make(0)

        library.llama_log_callback = listening
        super().__init__(library)
        library.llama_log_callback = make


def moved(path: Path, blocks: tuple[int, ...]) -> list[str]:
    spec = LoadSpec(str(path), n_ctx=64, n_slots=1, n_threads=1, host_experts=blocks)
    library = load_library(spec)
    log = Lines(library)
    try:
        model = load_model(library, spec, log, lambda share: None)
        library.llama_model_free(model)
    finally:
        log.close()
    return [m[1] for line in log.lines if (m := re.match(r"tensor (\S+) .*buffer type overridden", line))]


@pytest.mark.parametrize(
    ("model", "per_block"),
    [("qwen3moe", ("gate", "up", "down")), ("nemotron_h_moe", ("up", "down"))],
)
def test_experts_of_these_blocks_and_nothing_else(
    tmp_path: Path, model: str, per_block: tuple[str, ...]
) -> None:
    path = synthetic.write_tiny(tmp_path / "model.gguf", model)
    shape = synthetic.TINY[model]
    sparse = [i for i, kind in enumerate(layer_kinds(shape)) if LayerKind.MOE in kind]
    chosen = (sparse[-1],)
    expected = {f"blk.{i}.ffn_{part}_exps.weight" for i in chosen for part in per_block}
    assert set(moved(path, chosen)) == expected
    assert moved(path, ()) == []


def test_block_numbers_are_not_mistaken_for_others() -> None:
    pattern = overrides.EXPERTS.format("1|12")
    assert re.search(pattern, "blk.12.ffn_down_exps.weight")
    assert re.search(pattern, "blk.1.ffn_gate_up_exps.weight")
    for other in ("blk.11.ffn_down_exps.weight", "blk.2.ffn_up_exps.weight", "blk.1.ffn_down_shexp.weight"):
        assert not re.search(pattern, other)
