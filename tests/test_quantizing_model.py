"""Quantizing with the real library: the dry run is what the file becomes, and nothing is left half done."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from nemolocal import quantizing
from nemolocal.errors import EngineDiedError, EngineError, NoSpaceError, UsageError
from nemolocal.models import disk, gguf
from tests import synthetic

pytestmark = pytest.mark.model

WIDE = replace(synthetic.TINY["llama"], n_embd=256, n_ff=320)  # the rows of ffn_down are no multiple of 256


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return synthetic.write(tmp_path / "tiny-F16.gguf", WIDE, type_name="F16")


@pytest.mark.parametrize("quant", ["Q8_0", "q4_k_m", "Q6_K", "IQ4_XS"])
def test_the_file_is_what_the_dry_run_said(source: Path, quant: str) -> None:
    info = gguf.read(source)
    said = quantizing.dry_run(info, quant)
    target = source.with_name("out.gguf")
    seen: list[tuple[int, int]] = []
    done = quantizing.quantize(info, quant, target, progress=lambda *at: seen.append(at))
    written = gguf.read(target)

    assert done == said
    assert written.quant == said.quant == quant.upper()
    assert said.types == Counter(tensor.type_name for tensor in written.tensors)
    assert said.after_bytes == sum(tensor.n_bytes for tensor in written.tensors)
    assert said.before_bytes == sum(tensor.n_bytes for tensor in info.tensors)
    assert seen[-1] == (said.before_bytes, said.before_bytes)
    assert seen == sorted(seen)
    planned = quantizing.candidate(info, said)
    assert planned.size_bytes == pytest.approx(target.stat().st_size, abs=4096)
    assert not planned.is_local


def test_odd_rows_are_named(source: Path) -> None:
    odd = quantizing.dry_run(gguf.read(source), "Q4_K_M").odd
    assert odd == [f"blk.{il}.ffn_down.weight" for il in range(WIDE.layers)]
    assert quantizing.dry_run(gguf.read(source), "Q8_0").odd == []


def test_a_split_model_becomes_one_file(tmp_path: Path) -> None:
    first = synthetic.write(tmp_path / "tiny.gguf", WIDE, type_name="F16", n_tensors_per_part=15)
    info = gguf.read(first)
    assert len(info.parts) > 1
    quantizing.quantize(info, "Q8_0", tmp_path / "out.gguf")
    written = gguf.read(tmp_path / "out.gguf")
    assert {t.name for t in written.tensors} == {t.name for t in info.tensors}


def test_what_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = gguf.read(source)
    target = source.with_name("out.gguf")
    with pytest.raises(UsageError, match="no quantization"):
        quantizing.quantize(info, "Q9_X", target)
    with pytest.raises(UsageError, match="onto itself"):
        quantizing.quantize(info, "Q8_0", source, may_replace=True)
    with pytest.raises(EngineError, match="importance matrix"):
        quantizing.quantize(info, "IQ2_XXS", target)
    quantizing.quantize(info, "Q8_0", target)
    before = target.read_bytes()
    with pytest.raises(UsageError, match="there already"):
        quantizing.quantize(info, "Q4_0", target)
    with pytest.raises(UsageError, match="would lose twice"):
        quantizing.quantize(gguf.read(target), "Q4_0", source.with_name("twice.gguf"))
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
    with pytest.raises(NoSpaceError):
        quantizing.quantize(info, "Q4_0", target, may_replace=True)
    assert target.read_bytes() == before
    assert sorted(path.name for path in source.parent.glob("*.gguf*")) == ["out.gguf", "tiny-F16.gguf"]


def test_an_interrupt_leaves_the_old_file(source: Path) -> None:
    target = source.with_name("out.gguf")
    target.write_bytes(b"old")

    def interrupt(done: int, total: int) -> None:
        if done > total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantizing.quantize(gguf.read(source), "Q8_0", target, may_replace=True, progress=interrupt)
    assert target.read_bytes() == b"old"
    assert not list(source.parent.glob("*.part"))


def test_a_damaged_file_is_one_line(source: Path) -> None:
    info = gguf.read(source)
    with source.open("r+b") as file:
        file.truncate(info.size_bytes // 2)
    with pytest.raises(EngineError, match="could not quantize") as caught:
        quantizing.quantize(info, "Q8_0", source.with_name("out.gguf"))
    assert "\n" not in str(caught.value)
    assert not source.with_name("out.gguf").exists()


def test_a_process_that_dies_is_told_and_leaves_nothing(source: Path) -> None:
    def kill(done: int, total: int) -> None:
        for child in multiprocessing.active_children():
            if child.name == "nemolocal-quantizer":
                child.kill()
                child.join()

    with pytest.raises(EngineDiedError):
        quantizing.quantize(gguf.read(source), "Q8_0", source.with_name("out.gguf"), progress=kill)
    assert [path.name for path in source.parent.glob("*.gguf*")] == [source.name]
