"""The fingerprint of a model file: what it tells apart, what it does not look at, and broken files."""

from __future__ import annotations

import os
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from nemolocal.errors import ModelFileError
from nemolocal.models import gguf_header
from nemolocal.models.fingerprint import MAX_SPACED_SAMPLES, SAMPLE_EVERY_BYTES, _sample_offsets, fingerprint
from nemolocal.models.gguf_header import Header, TensorInfo
from tests import synthetic


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synthetic.write_tiny(tmp_path / "tiny.gguf")


def header_of(path: Path) -> Header:
    with path.open("rb") as stream:
        return gguf_header.parse(stream)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def test_it_depends_on_the_content_alone(model: Path, tmp_path: Path) -> None:
    found = fingerprint(model)
    assert re.fullmatch("[0-9a-f]{64}", found)
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "another name.gguf"
    shutil.copyfile(model, copy)
    os.utime(copy, (1, 1))
    assert fingerprint(copy) == found
    assert fingerprint(str(model)) == found


def test_the_same_dimensions_with_other_weights_are_another_model(model: Path) -> None:
    """As when a file is exchanged for a fine-tune of the same size under the same name."""
    found = fingerprint(model)
    header = header_of(model)
    content = bytearray(model.read_bytes())
    for tensor in header.tensors:
        changed = bytearray(content)
        begin = header.data_offset + tensor.offset
        changed[begin : begin + tensor.n_bytes] = bytes(
            255 - b for b in changed[begin : begin + tensor.n_bytes]
        )
        model.write_bytes(changed)
        assert fingerprint(model) != found, tensor.name


def test_every_byte_of_the_header_counts(model: Path) -> None:
    found = fingerprint(model)
    at = model.read_bytes().index(b"<|im_start|>' + message")  # within the chat template
    flip(model, at)
    assert fingerprint(model) != found


def test_a_change_of_the_size_alone_counts(model: Path) -> None:
    found = fingerprint(model)
    with model.open("ab") as stream:
        stream.write(bytes(32))
    assert fingerprint(model) != found


def test_all_parts_of_a_split_model_count_whichever_is_named(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    synthetic.write_tiny(parts[0])
    synthetic.write_tiny(parts[1], "qwen2")
    found = fingerprint(parts[0])
    assert fingerprint(parts[1]) == found
    shutil.copyfile(parts[0], tmp_path / "alone.gguf")
    assert fingerprint(tmp_path / "alone.gguf") != found
    tensor = header_of(parts[1]).tensors[0]
    flip(parts[1], header_of(parts[1]).data_offset + tensor.offset + tensor.n_bytes // 2)
    assert fingerprint(parts[0]) != found
    parts[1].unlink()
    with pytest.raises(ModelFileError, match=r"m-00002-of-00002\.gguf: The file cannot be read") as error:
        fingerprint(parts[0])
    assert error.value.kind == "missing"


def test_a_huge_model_is_sampled_in_few_places_in_every_tensor() -> None:
    n_bytes = 3 << 30
    tensors = tuple(TensorInfo(f"t{i}", (1,), "F32", i * n_bytes, n_bytes) for i in range(50))
    small = TensorInfo("small", (1,), "F32", 50 * n_bytes, 128)
    offsets = list(_sample_offsets(Header(3, {}, (*tensors, small), 1000)))
    assert len(tensors) < len(offsets) <= MAX_SPACED_SAMPLES + len(tensors) + 1
    for tensor in tensors:
        inside = [o for o in offsets if tensor.offset < o - 1000 < tensor.offset + n_bytes]
        gaps = {b - a for a, b in pairwise(inside)}
        assert len(inside) >= 5
        assert max(gaps) - min(gaps) <= 1
    assert offsets[-1] == 1000 + small.offset


def test_a_usual_model_is_sampled_at_least_every_so_many_bytes() -> None:
    tensors = (TensorInfo("t", (1,), "F32", 0, 1 << 30),)
    offsets = list(_sample_offsets(Header(3, {}, tensors, 0)))
    assert max(b - a for a, b in pairwise(offsets)) <= SAMPLE_EVERY_BYTES


@pytest.mark.parametrize(
    ("n_bytes", "kind"), [(0, "truncated"), (3, "truncated"), (200, "truncated"), (-1, "not_gguf")]
)
def test_a_broken_file_is_one_clear_error(model: Path, n_bytes: int, kind: str) -> None:
    content = model.read_bytes()
    model.write_bytes(b"no model at all" if n_bytes < 0 else content[:n_bytes])
    with pytest.raises(ModelFileError, match=r"^tiny\.gguf: ") as error:
        fingerprint(model)
    assert error.value.kind == kind


def test_a_file_that_is_not_there_and_a_folder_are_clear_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelFileError, match="cannot be read"):
            fingerprint(path)
