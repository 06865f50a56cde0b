"""`nemolocal models quantize`: what is told before and after, where the file goes, and what is refused in one
line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemolocal import config
from nemolocal.models import gguf
from tests import synthetic
from tests.cli.conftest import Cli, is_one_error

pytestmark = pytest.mark.model

PROFILES = Path(__file__).parent.parent / "hardware_profiles"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    wide = replace(synthetic.TINY["llama"], n_embd=256, n_ff=320)
    return synthetic.write(tmp_path / "tiny-F16.gguf", wide, type_name="F16")


def quantize(cli: Cli, *arguments: str | Path) -> tuple[int, Any]:
    shown = cli("models", "quantize", *arguments, "--json")
    return shown.code, json.loads(shown.out)


def test_dry_run_tells_the_size_and_both_plans(cli: Cli, source: Path) -> None:
    flags = ("--dry-run", "--hardware", PROFILES / "rtx-3060-12gb.toml")
    shown = cli("models", "quantize", source, "q4_k", *flags)
    assert (shown.code, shown.err) == (0, "")
    _, facts = quantize(cli, source, "Q4_K_M", *flags)
    assert f"tiny-Q4_K_M.gguf: 1 MB ({facts['bytes']:,} bytes) in place of 4 MB" in shown.out
    assert "layers on GPUs" in shown.out
    assert (
        "in place of Q4_K, since their rows of 320 are no whole blocks of it: ffn_down.weight." in shown.out
    )
    assert facts["quant"] == "Q4_K_M"
    assert facts["from"] == {"path": str(source), "quant": "F16", "bytes": source.stat().st_size}
    before, after = (facts[plan]["devices"][0]["weights_bytes"] for plan in ("plan_before", "plan_after"))
    assert before > 2 * after > 0
    assert list(source.parent.glob("*.gguf*")) == [source]


def test_what_fits_only_afterwards(cli: Cli, tmp_path: Path) -> None:
    """The gain that people quantize for."""
    large = replace(synthetic.TINY["llama"], n_embd=4096, n_ff=14336, layers=16, n_vocab=128256, n_head=32)
    path = synthetic.write(tmp_path / "large-F16.gguf", large, weights="none", type_name="F16")
    (tmp_path / "small.toml").write_text(
        f"[ram]\ntotal_bytes = {8 << 30}\navailable_bytes = {5 << 30}\n[cpu]\nphysical_cores = 8\n"
    )
    flags = ("--dry-run", "--hardware", tmp_path / "small.toml")
    _, facts = quantize(cli, path, "Q4_K_M", *flags)
    assert facts["plan_before"] is None
    assert facts["plan_after"]["fits"] is True
    shown = cli("models", "quantize", path, "Q4_K_M", *flags).out
    assert next(line for line in shown.splitlines() if "memory" in line).count("does not fit") == 1


def test_the_file_is_written_and_answers(cli: Cli, source: Path, tmp_path: Path) -> None:
    shown = cli("models", "quantize", source, "Q8_0", "--threads", "2")
    target = source.with_name("tiny-Q8_0.gguf")
    assert shown.code == 0, shown.err
    assert f"{target} is ready" in shown.out
    assert f"nemolocal models import {target}" in shown.out
    assert "Quantizing to Q8_0" in shown.err
    assert gguf.read(target).quant == "Q8_0"
    answer = cli("chat", target, "-p", "Hi", "--ctx", "512")
    assert answer.code == 0, answer.err
    again = cli("models", "quantize", source, "Q8_0")
    assert is_one_error(again, 2)
    assert "--force" in again.err
    code, facts = quantize(cli, source, "Q8_0", "-o", tmp_path / "other.gguf")
    assert (code, facts["path"]) == (0, str(tmp_path / "other.gguf"))
    assert facts["bytes"] == (tmp_path / "other.gguf").stat().st_size


def test_of_a_models_files_the_whole_one_is_taken_and_the_new_one_is_listed(cli: Cli, source: Path) -> None:
    folder = config.load().models_dir
    repo = folder / "acme" / "Tiny-GGUF"
    repo.mkdir(parents=True)
    (repo / "Tiny-F16.gguf").write_bytes(source.read_bytes())
    assert cli("models", "quantize", source, "Q8_0", "-o", repo / "Tiny-Q8_0.gguf").code == 0
    shown = cli("models", "quantize", "hf:acme/Tiny-GGUF", "Q5_0")
    assert shown.code == 0, shown.err
    assert "models import" not in shown.out
    assert sorted(path.name for path in folder.glob("*.gguf")) == ["Tiny-Q5_0.gguf"]  # it is not the maker's
    assert "Tiny-Q5_0" in cli("models", "list").out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("IQ2_XXS",), 2, "--imatrix"),
        (("Q9",), 2, "There are BF16, F16"),
        (("Q8_0", "-o", "/nowhere/at/all/x.gguf"), 1, "/nowhere/at/all"),
        (("Q8_0", "-o", "x.bin"), 2, ".gguf"),
        (("Q8_0", "--imatrix", "missing.dat"), 1, "missing.dat"),
        (("Q8_0", "--threads", "many"), 2, "whole number"),
    ],
)
def test_refusals(cli: Cli, source: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    refused = cli("models", "quantize", source, *arguments)
    errors = [line for line in refused.err.splitlines() if line.startswith("error: ")]
    assert (refused.code, len(errors)) == (code, 1), refused
    assert words in errors[0]
    assert "Traceback" not in refused.err
    assert list(source.parent.glob("*.gguf*")) == [source]


def test_sources_that_are_refused(cli: Cli, source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("Not a model, but a text of some length.")
    quantized = synthetic.write_tiny(tmp_path / "small-Q8_0.gguf", type_name="Q8_0")
    for name, code, words in (
        (tmp_path / "text.gguf", 1, "not a GGUF file"),
        (tmp_path / "missing.gguf", 1, "no such file"),
        ("no-such-model", 1, "No model is called"),
        (quantized, 2, "--allow-requantize"),
    ):
        refused = cli("models", "quantize", name, "Q4_0")
        assert is_one_error(refused, code), refused
        assert words in refused.err
    assert cli("models", "quantize", quantized, "Q4_0", "--allow-requantize").code == 0


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C cannot be sent to one process there")
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    large = replace(synthetic.TINY["llama"], n_embd=512, n_ff=4096, layers=40)
    path = synthetic.write(tmp_path / "large-F16.gguf", large, weights="none", type_name="F16")
    command = [sys.executable, "-m", "nemolocal.cli.app", "models", "quantize", str(path), "Q5_1"]
    running = subprocess.Popen(
        [*command, "--threads", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert running.stderr
    assert "Quantizing" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "Traceback" not in err
    assert [file.name for file in tmp_path.glob("large*")] == [path.name]


def test_an_importance_matrix_is_read(cli: Cli, tmp_path: Path) -> None:
    broad = replace(synthetic.TINY["llama"], n_embd=256, n_ff=512)
    path = synthetic.write(tmp_path / "tiny-F16.gguf", broad, type_name="F16")
    info = gguf.read(path)
    data = b""
    matrices = [tensor for tensor in info.tensors if len(tensor.dims) > 1]
    for tensor in matrices:
        name = tensor.name.encode()
        ones = np.ones(tensor.dims[0], "<f4").tobytes()
        data += len(name).to_bytes(4, "little") + name + (1).to_bytes(4, "little")
        data += tensor.dims[0].to_bytes(4, "little") + ones
    (tmp_path / "m.dat").write_bytes(len(matrices).to_bytes(4, "little") + data)
    written = []
    for flags in ((), ("--imatrix", tmp_path / "m.dat")):
        shown = cli("models", "quantize", path, "Q4_0", "--force", *flags)
        assert shown.code == 0, shown.err
        written.append((tmp_path / "tiny-Q4_0.gguf").read_bytes())
    assert written[0] != written[1]
