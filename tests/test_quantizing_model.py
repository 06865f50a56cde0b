"""Quantizing with the real library: the preview is what the file becomes, and nothing is left half done."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import psutil
import pytest

from nemolocal import config, quantizing
from nemolocal.engine import quantizer
from nemolocal.engine.messages import QuantizeSpec, TensorDone
from nemolocal.errors import (
    DownloadError,
    EngineDiedError,
    EngineError,
    ModelFileError,
    NoSpaceError,
    UsageError,
)
from nemolocal.models import disk, gguf, importance
from nemolocal.quantizing import Job, Preview
from tests import synthetic

pytestmark = pytest.mark.model

WIDE = replace(synthetic.TINY["llama"], n_embd=256, n_ff=320)  # the rows of ffn_down are no multiple of 256
BROAD = replace(WIDE, n_ff=512)  # all rows are


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return synthetic.write(tmp_path / "tiny-F16.gguf", WIDE, type_name="F16")


def preview(source: Path, quant: str, *, target: str = "out.gguf", **options: Any) -> Preview:
    job = Job(gguf.read(source), quant, n_threads=2, **options)
    return quantizing.preview(job, source.parent / target, config.load())


def quantize(made: Preview, **options: Any) -> gguf.GgufInfo:
    return quantizing.quantize(made, config.load(), **options)


def files_beside(source: Path) -> list[str]:
    return sorted(path.name for path in source.parent.iterdir() if path.is_file())


# The preview --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "quant"),
    [
        ("wide", "Q4_K_M"),
        ("wide", "Q8_0"),
        ("llama-moe", "Q4_0"),
        ("gemma3", "Q3_K_L"),
        ("deci", "Q5_1"),
        ("nemotron_h", "Q4_K_M"),
        ("nemotron_h_moe-mtp", "Q2_K"),
        ("nemotron", "F32"),
    ],
)
def test_the_file_is_what_the_preview_said_to_the_byte(tmp_path: Path, model: str, quant: str) -> None:
    shapes = {"wide": WIDE, "broad": BROAD, **synthetic.TINY}
    keys = {"general.file_type": 1, "general.quantization_version": 2} if quant.startswith("Q4") else {}
    path = synthetic.write(tmp_path / "tiny.gguf", shapes[model], type_name="F16", keys=keys)
    made = preview(path, quant)
    assert not made.result.path.exists()
    seen: list[tuple[int, int]] = []
    written = quantize(made, progress=lambda *at: seen.append(at))

    assert made.result.size_bytes == made.result.path.stat().st_size == written.size_bytes
    assert written.quant == made.result.quant == quant
    assert written.shape == made.result.shape
    assert {t.name: (t.type_name, t.n_bytes) for t in written.tensors} == {
        t.name: (t.type_name, t.n_bytes) for t in made.result.tensors
    }
    total = sum(tensor.n_bytes for tensor in made.job.source.tensors)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert len(seen) == len(made.job.source.tensors)


def test_a_split_model_becomes_one_file(tmp_path: Path) -> None:
    first = synthetic.write(tmp_path / "tiny.gguf", WIDE, type_name="F16", n_tensors_per_part=15)
    made = preview(first.with_name(first.name.replace("-00001-", "-00002-")), "Q8_0")
    assert len(made.job.source.parts) > 1
    written = quantize(made)
    assert written.parts == (tmp_path / "out.gguf",)
    assert written.size_bytes == made.result.size_bytes
    assert {t.name for t in written.tensors} == {t.name for t in made.job.source.tensors}


def test_tensors_that_cannot_have_their_type_are_told(source: Path) -> None:
    made = preview(source, "Q4_K_M")
    found = {(x.becomes, x.wanted, x.names, x.row): x.n_tensors for x in made.fallbacks}
    assert set(found) == {
        ("Q5_0", ("Q4_K",), ("ffn_down.weight",), 320),
        ("Q8_0", ("Q6_K",), ("ffn_down.weight",), 320),
    }
    assert sum(found.values()) == WIDE.layers
    assert preview(source, "Q8_0").fallbacks == ()


def test_what_is_quantized_already_is_refused_without_leave(source: Path) -> None:
    written = quantize(preview(source, "Q8_0"))
    with pytest.raises(UsageError, match=r"quantized already \(Q8_0") as refused:
        preview(written.path, "Q4_0", target="twice.gguf")
    assert "--allow-requantize" in str(refused.value)
    twice = quantize(preview(written.path, "Q4_0", target="twice.gguf", may_requantize=True))
    assert twice.quant == "Q4_0"
    with pytest.raises(UsageError, match="is Q8_0 already; nothing of it would change"):
        preview(written.path, "Q8_0", target="same.gguf")


def test_names_of_quantizations() -> None:
    assert quantizing.quant_named("q4_k_m") == quantizing.quant_named("Q4_K") == "Q4_K_M"
    for wrong in ("Q9_X", "", "NVFP4", "15"):
        with pytest.raises(UsageError, match="no quantization") as refused:
            quantizing.quant_named(wrong)
        assert "Q4_K_M" in str(refused.value)


@pytest.mark.parametrize("quant", ["Q1_0", "TQ2_0", "MXFP4_MOE", "IQ3_XS", "IQ1_M"])
def test_rare_types_are_known_to_the_library(tmp_path: Path, quant: str) -> None:
    made = preview(synthetic.write(tmp_path / "tiny.gguf", BROAD, type_name="F16"), quant)
    assert made.needs_importance == (quant in ("IQ3_XS", "IQ1_M"))


def test_a_file_that_the_quantizer_would_spoil_is_refused(source: Path) -> None:
    reader = gguf_package.GGUFReader(source)
    writer = gguf_package.GGUFWriter(source.with_name("aligned.gguf"), "llama")
    writer.add_custom_alignment(64)
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            synthetic.add_key(writer, name, field.contents())
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    synthetic.save(writer, source.with_name("aligned.gguf"), weights="random")
    with pytest.raises(ModelFileError, match="64 bytes"):
        preview(source.with_name("aligned.gguf"), "Q8_0")


# Importance matrices ------------------------------------------------------------------------------


def write_importance(path: Path, info: gguf.GgufInfo, *, n_columns: int = 0) -> Path:
    """A matrix for all of a model's matrices, in the format of the file's suffix."""
    rng = np.random.default_rng(1)
    matrices = [tensor for tensor in info.tensors if len(tensor.dims) > 1]
    entries = {t.name: rng.uniform(0.5, 2.0, n_columns or t.dims[0]).astype("<f4") for t in matrices}
    if path.suffix == ".dat":
        data = struct.pack("<i", len(entries))
        for name, values in entries.items():
            data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 4, len(values))
            data += (values * 4).tobytes()
        path.write_bytes(data)
        return path
    writer = gguf_package.GGUFWriter(path, "")
    writer.add_type("imatrix")
    for name, values in entries.items():
        writer.add_tensor(f"{name}.in_sum2", (values * 4)[None])
        writer.add_tensor(f"{name}.counts", np.full((1, 1), 4, np.float32))
    synthetic.save(writer, path, weights="random")
    return path


def test_the_smallest_quantizations_need_an_importance_matrix(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "tiny.gguf", BROAD, type_name="F16")
    info = gguf.read(path)
    made = preview(path, "Q2_K_S")
    assert made.needs_importance
    with pytest.raises(UsageError, match="importance matrix"):
        quantize(made)
    by_format = [importance.read(write_importance(tmp_path / name, info)) for name in ("m.gguf", "m.dat")]
    assert by_format[0].keys() == by_format[1].keys()
    for name, values in by_format[0].items():
        assert np.allclose(np.frombuffer(values, "<f4"), np.frombuffer(by_format[1][name], "<f4"), rtol=1e-6)
    with_it = preview(path, "Q2_K_S", importance=by_format[0])
    assert (with_it.needs_importance, with_it.n_lacking) == (False, 0)
    assert quantize(with_it).size_bytes == with_it.result.size_bytes == made.result.size_bytes


def test_the_matrix_changes_what_is_written(source: Path, tmp_path: Path) -> None:
    matrix = importance.read(write_importance(tmp_path / "m.dat", gguf.read(source)))
    plain, weighed = (
        quantize(preview(source, "Q4_0", target=f"{name}.gguf", importance=given)).path.read_bytes()
        for name, given in (("plain", {}), ("weighed", matrix))
    )
    assert plain != weighed


def test_the_matrix_of_another_model_is_refused_at_once(source: Path, tmp_path: Path) -> None:
    info = gguf.read(source)
    other = importance.read(write_importance(tmp_path / "m.dat", info, n_columns=96))
    with pytest.raises(ModelFileError, match="another model: it has 96 columns"):
        preview(source, "IQ3_S", importance=other)
    lacking = {name: values for name, values in other.items() if "token_embd" in name}
    assert preview(source, "IQ3_S", importance=lacking).n_lacking > 0
    made = preview(source, "Q2_K_S", importance=lacking)
    with pytest.raises(UsageError, match="importance matrix"):
        quantize(made)
    assert files_beside(source) == ["m.dat", source.name]


@pytest.mark.parametrize("cut", [0, 3, 4, 40, 4000, -40])
@pytest.mark.parametrize("name", ["m.gguf", "m.dat"])
def test_a_damaged_matrix_is_one_line(source: Path, tmp_path: Path, name: str, cut: int) -> None:
    path = write_importance(tmp_path / name, gguf.read(source))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelFileError, match="no importance matrix") as refused:
        importance.read(path)
    assert "\n" not in str(refused.value)


def test_other_files_are_no_matrices(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.dat").write_text("Not a matrix, but a text of some length.")
    for path in (source, tmp_path / "text.dat", tmp_path / "missing.dat"):
        with pytest.raises(ModelFileError):
            importance.read(path)


# The work -----------------------------------------------------------------------------------------


def test_targets_that_are_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, words in (
        (source.name, "onto itself"),
        ("out.bin", "does not end in .gguf"),
        ("out-00001-of-00002.gguf", "part of a split"),
    ):
        with pytest.raises(UsageError, match=words):
            quantize(preview(source, "Q8_0", target=target), may_replace=True)
    made = preview(source, "Q8_0")
    before = quantize(made).path.read_bytes()
    with pytest.raises(UsageError, match="there already"):
        quantize(made)
    assert quantize(made, may_replace=True).path.read_bytes() == before
    with pytest.raises(DownloadError, match="Cannot write"):
        quantize(preview(source, "Q8_0", target="nowhere/at/all.gguf"))
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
    with pytest.raises(NoSpaceError):
        quantize(preview(source, "Q4_0"), may_replace=True)
    assert (tmp_path / "out.gguf").read_bytes() == before
    assert files_beside(source) == ["out.gguf", source.name]


def test_a_file_that_appears_meanwhile_stays(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = preview(source, "Q8_0")
    target = made.result.path

    def appear(done_bytes: int, total_bytes: int) -> None:
        target.write_bytes(b"another's")

    with pytest.raises(UsageError, match="has appeared meanwhile"):
        quantize(made, progress=appear)
    assert target.read_bytes() == b"another's"
    assert files_beside(source) == ["out.gguf", source.name]
    assert quantize(made, may_replace=True, progress=appear).size_bytes == target.stat().st_size
    target.unlink()

    def fail(part: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(DownloadError, match="Permission denied"):
        quantize(made)
    assert files_beside(source) == [source.name]


def test_an_interrupt_leaves_the_old_file(source: Path) -> None:
    target = source.with_name("out.gguf")
    target.write_bytes(b"old")

    def interrupt(done: int, total: int) -> None:
        if done > total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(preview(source, "Q8_0"), may_replace=True, progress=interrupt)
    assert target.read_bytes() == b"old"
    assert files_beside(source) == ["out.gguf", source.name]
    assert not [child for child in multiprocessing.active_children() if "quantizer" in child.name]


def test_names_and_folders_in_other_letters(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source.parent / "Größe [1] 模型"
    folder.mkdir()
    (folder / "ein-F16.gguf").write_bytes(source.read_bytes())
    monkeypatch.chdir(folder)
    job = Job(gguf.read("ein-F16.gguf"), "Q8_0")
    made = quantizing.preview(job, Path("zwei ü [2].gguf"), config.load())
    assert quantize(made).size_bytes == (folder / "zwei ü [2].gguf").stat().st_size
    assert files_beside(folder / "x") == ["ein-F16.gguf", "zwei ü [2].gguf"]


def test_a_source_that_is_damaged_meanwhile_is_one_line(source: Path) -> None:
    made = preview(source, "Q8_0")
    os.truncate(source, made.job.source.size_bytes // 2)
    with pytest.raises(EngineError, match="could not quantize") as caught:
        quantize(made)
    assert "\n" not in str(caught.value)
    assert files_beside(source) == [source.name]


def test_a_process_that_dies_is_told_and_leaves_nothing(source: Path) -> None:
    def kill(done: int, total: int) -> None:
        for child in multiprocessing.active_children():
            if child.name == "nemolocal-quantizer":
                child.kill()
                child.join()

    with pytest.raises(EngineDiedError, match="signal 9" if os.name == "posix" else "ended"):
        quantize(preview(source, "Q8_0"), progress=kill)
    assert files_beside(source) == [source.name]


@pytest.mark.skipif(os.name != "posix", reason="an abort has another form there")
def test_the_last_words_of_a_native_abort_are_told(source: Path) -> None:
    """With a type number that llama.cpp knows and cannot make, as a stand-in for whatever aborts."""
    spec = QuantizeSpec(str(source), str(source.with_name("out.gguf")), 15)
    log_path = config.load().paths.logs / "words.log"
    running = quantizer.run(spec, log_path)
    next(running)
    child = next(c for c in multiprocessing.active_children() if c.name == "nemolocal-quantizer")
    assert child.pid
    log_path.write_text("ggml.c:1: GGML_ASSERT(rows > 0) failed\n")
    os.kill(child.pid, signal.SIGABRT)
    with pytest.raises(EngineDiedError, match=r"signal 6.*GGML_ASSERT.rows > 0. failed"):
        for _ in running:
            pass


Fake = Callable[[QuantizeSpec, Path], Iterator[TensorDone]]


def stopping_short(share: float) -> Fake:
    """A library that writes a part of the file and says that all went well, as on a full disk."""
    real = quantizer.run

    def run(spec: QuantizeSpec, log_path: Path) -> Iterator[TensorDone]:
        yield from real(spec, log_path)
        if not spec.is_dry:
            os.truncate(spec.target, round(Path(spec.target).stat().st_size * share))

    return run


@pytest.mark.parametrize(("free_bytes", "error"), [(0, NoSpaceError), (1 << 40, EngineError)])
def test_a_file_that_was_cut_without_a_word_gets_no_name(
    source: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, error: type[Exception]
) -> None:
    made = preview(source, "Q8_0")
    left = iter([1 << 40])  # room enough before it begins
    monkeypatch.setattr(disk, "free_bytes", lambda folder: next(left, free_bytes))
    monkeypatch.setattr(quantizer, "run", stopping_short(0.6))
    with pytest.raises(error):
        quantize(made)
    assert files_beside(source) == [source.name]


def test_what_a_killed_run_has_left_is_removed(source: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (gone.pid, os.getppid()):  # the second still runs
        source.with_name(f"nemolocal-{pid}-1.part").touch()
    quantize(preview(source, "Q8_0"))
    assert files_beside(source) == [f"nemolocal-{os.getppid()}-1.part", "out.gguf", source.name]


def test_the_work_ends_with_the_program(source: Path) -> None:
    """Even one that had no time to say goodbye: the library alone would go on for as long as it takes."""
    script = (
        "import multiprocessing, sys, time\n"
        "from pathlib import Path\n"
        "from nemolocal.engine import quantizer\n"
        "from nemolocal.engine.messages import QuantizeSpec\n"
        "if __name__ == '__main__':\n"
        "    spec = QuantizeSpec(sys.argv[1], sys.argv[2], 7, n_threads=1)\n"
        "    running = quantizer.run(spec, Path(sys.argv[2] + '.log'))\n"
        "    next(running)\n"
        "    print(multiprocessing.active_children()[0].pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    large = synthetic.write(
        source.with_name("large.gguf"),
        replace(BROAD, n_embd=512, layers=60, n_ff=8192),
        type_name="F16",
        weights="none",
    )
    path = source.with_name("script.py")
    path.write_text(script)
    parent = subprocess.Popen(
        [sys.executable, path, large, source.with_name("out.gguf")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    with contextlib.suppress(psutil.NoSuchProcess):
        until = time.monotonic() + 20
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, "the quantizer outlives its parent"
            time.sleep(0.05)
