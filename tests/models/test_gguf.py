"""Every kind of false or broken model file gets its own line, and a good one is described rightly."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemolocal.errors import ModelFileError
from nemolocal.models import architectures, gguf
from nemolocal.models.gguf_header import MAX_HEADER_BYTES, NeedMoreBytesError, SkippedArray, parse
from nemolocal.models.shape import LayerKind
from tests import synthetic


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synthetic.write_tiny(tmp_path / "good.gguf")


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def header(architecture: str, *, n_tensors: int = 0, n_keys: int = 1, version: int = 3) -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)
    return start + text("general.architecture") + struct.pack("<I", 8) + text(architecture)


def fault(path: Path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        gguf.read(path)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(path.name)
    return caught.value


# What a good file is ------------------------------------------------------------------------------


def test_a_good_file_is_described(model: Path) -> None:
    info = gguf.read(model)
    assert (info.path, info.parts, info.size_bytes) == (model, (model,), model.stat().st_size)
    assert (info.version, info.architecture, info.name) == (3, "llama", "Tiny llama")
    assert (info.quant, info.tokenizer) == ("F32", "gpt2")
    assert info.chat_template == synthetic.CHATML
    assert (info.n_ctx_train, info.shape.n_vocab, info.shape.n_embd) == (1024, 384, 64)
    assert info.can_chat
    # two embeddings, a norm, and in each of 4 blocks: q, k, v, output, gate, up, down and two norms
    assert info.n_params == 2 * 384 * 64 + 64 + 4 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64)


def test_the_weights_of_all_blocks_and_both_ends_make_up_the_file(model: Path) -> None:
    info = gguf.read(model)
    shape = info.shape
    assert shape.input_bytes == 384 * 64 * 4
    assert shape.output_bytes == (384 * 64 + 64) * 4
    assert not shape.is_tied
    total = shape.input_bytes + shape.output_bytes + shape.repeating_bytes
    assert total == sum(t.n_bytes for t in info.tensors)
    assert 0 < info.size_bytes - total < 20_000  # the header and padding


def test_tied_embeddings_count_again_as_the_output(tmp_path: Path) -> None:
    shape = gguf.read(synthetic.write_tiny(tmp_path / "tied.gguf", "llama-tied")).shape
    assert shape.is_tied
    assert shape.output_bytes == 384 * 64 * 4 + 64 * 4


@pytest.mark.parametrize("file_type", [15, 18, 38, 1024 + 15, None])
def test_the_quantization_is_named_as_users_know_it(tmp_path: Path, file_type: int | None) -> None:
    keys = {} if file_type is None else {"general.file_type": file_type}
    path = synthetic.write_tiny(tmp_path / "m.gguf", type_name="Q8_0", keys=keys)
    expected = {15: "Q4_K_M", 18: "Q6_K", 38: "MXFP4_MOE"}.get(file_type or 0, "Q8_0")
    assert gguf.read(path).quant == expected


def test_uneven_blocks_are_read_one_by_one(tmp_path: Path) -> None:
    shape = gguf.read(synthetic.write_tiny(tmp_path / "deci.gguf", "deci")).shape
    attention, mlp = LayerKind.ATTENTION, LayerKind.MLP
    assert [layer.kind for layer in shape.layers] == [attention | mlp, mlp, attention, mlp]
    assert [layer.n_embd_k_gqa for layer in shape.layers] == [32, 0, 32, 0]
    assert [layer.weights_bytes for layer in shape.layers] == [
        4 * (64 * 192 + 64 + 3 * 64 * 128 + 64),
        4 * (3 * 64 * 256 + 64),
        4 * (64 * 192 + 64),
        4 * (3 * 64 * 32 + 64),
    ]


def test_a_hybrid_keeps_state_or_keys_or_neither(tmp_path: Path) -> None:
    shape = gguf.read(synthetic.write_tiny(tmp_path / "hybrid.gguf", "nemotron_h_moe")).shape
    kinds = [LayerKind.RECURRENT, LayerKind.MOE, LayerKind.RECURRENT, LayerKind.ATTENTION, LayerKind.MOE]
    assert [layer.kind for layer in shape.layers] == kinds
    state_bytes = 4 * (3 * (64 + 2 * 2 * 16) + 64 * 16)
    assert [layer.state_bytes for layer in shape.layers] == [state_bytes, 0, state_bytes, 0, 0]
    assert [layer.n_embd_v_gqa for layer in shape.layers] == [0, 0, 0, 32, 0]
    assert shape.layers[1].expert_bytes == 4 * 2 * 64 * 64 * 4


def test_blocks_for_multi_token_prediction_are_set_apart(tmp_path: Path) -> None:
    plain = gguf.read(synthetic.write_tiny(tmp_path / "a.gguf", "nemotron_h_moe")).shape
    shape = gguf.read(synthetic.write_tiny(tmp_path / "b.gguf", "nemotron_h_moe-mtp")).shape
    assert (shape.n_layer, shape.n_layer_all, shape.n_extra_layers) == (5, 6, 1)
    assert shape.layers == plain.layers
    assert shape.extra_bytes > 0


def test_sliding_windows_are_found_by_the_architectures_pattern(tmp_path: Path) -> None:
    shape = gguf.read(synthetic.write_tiny(tmp_path / "gemma.gguf", "gemma3")).shape
    n = synthetic.N_SWA
    assert [layer.n_swa for layer in shape.layers] == [n, n, n, n, n, 0, n, n]


def test_an_encoder_is_read_but_cannot_chat(tmp_path: Path) -> None:
    assert "bert" in architectures.SUPPORTED
    path = tmp_path / "encoder.gguf"
    path.write_bytes(header("bert"))
    assert fault(path).kind == "corrupt"  # supported, so the complaint is of its missing weights


# What is no model at all --------------------------------------------------------------------------


def test_a_missing_file(tmp_path: Path) -> None:
    error = fault(tmp_path / "nowhere.gguf")
    assert error.kind == "missing"
    assert str((tmp_path / "nowhere.gguf").absolute()) in error.hint


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    assert "folder" in str(fault(tmp_path / "folder.gguf"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_named_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert fault(tmp_path / "pipe.gguf").kind == "missing"


PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Log in</title></head><body>Please log in</body></html>"
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 98362432\n"
)


@pytest.mark.parametrize(
    ("content", "kind", "word"),
    [
        (b"", "empty", "empty"),
        (PAGE, "web_page", "web page"),
        (b"\xef\xbb\xbf" + PAGE, "web_page", "web page"),
        (POINTER, "lfs_pointer", "98,362,432"),
        (b"ggml" + bytes(100), "old_format", "old ggml format"),
        (b"tjgg\x03\0\0\0" + bytes(100), "old_format", "old ggml format"),
        (header("llama", version=1), "old_format", "version 1"),
        (header("llama", version=9), "unsupported", "version 9"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(100), "unsupported", "big-endian"),
        (b"PK\x03\x04" + bytes(100), "not_gguf", "ZIP"),
        (struct.pack("<Q", 80) + b'{"__metadata__":{}}', "not_gguf", "safetensors"),
        (b"Invalid username or password.", "not_gguf", "Invalid username"),
        (bytes(range(256)) * 20, "not_gguf", "not a GGUF"),
        (header("flux"), "unsupported", "'flux'"),
        (header("clip"), "projector", "projector"),
        (header("llama"), "corrupt", "no weights"),
    ],
)
def test_each_kind_of_false_file_has_its_own_line(
    tmp_path: Path, content: bytes, kind: str, word: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    error = fault(path)
    assert error.kind == kind
    assert word in str(error)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    path = synthetic.write_tiny(tmp_path / "lora.gguf", keys={"general.type": "adapter"})
    error = fault(path)
    assert error.kind == "unsupported"
    assert "adapter" in str(error)


# What is cut off ----------------------------------------------------------------------------------


def test_a_download_that_broke_off_says_both_sizes(model: Path) -> None:
    whole = model.read_bytes()
    needed = parse(io.BytesIO(whole)).needed_bytes
    for size in (needed - 1, needed // 2):
        model.write_bytes(whole[:size])
        error = fault(model)
        assert error.kind == "truncated"
        assert f"{size:,}" in str(error)
        assert f"{needed:,}" in str(error)


def test_a_header_cut_anywhere_is_cut_off_and_never_worse(model: Path) -> None:
    whole = model.read_bytes()
    end = parse(io.BytesIO(whole)).data_offset
    for size in [*range(1, 200), *range(200, end, 97)]:
        model.write_bytes(whole[:size])
        assert fault(model).kind == "truncated", size


def test_a_growing_prefix_asks_for_more_until_it_is_enough(model: Path) -> None:
    """How a remote header is read: never more than a little beyond what is needed, and always onward."""
    whole = model.read_bytes()
    sizes, info = [64], None
    while info is None:
        try:
            info = gguf.read_streams([("far.gguf", io.BytesIO(whole[: sizes[-1]]), len(whole))])
        except NeedMoreBytesError as error:
            sizes.append(error.needed_bytes)
    assert info.shape == gguf.read(model).shape
    assert sizes == sorted(set(sizes))
    assert sizes[-1] <= parse(io.BytesIO(whole)).data_offset


# What is damaged ----------------------------------------------------------------------------------


def changed(model: Path, change: Callable[[bytearray], None]) -> ModelFileError:
    content = bytearray(model.read_bytes())
    change(content)
    model.write_bytes(content)
    return fault(model)


@pytest.mark.parametrize("offset", [8, 16])
def test_absurd_counts_are_refused_at_once(model: Path, offset: int) -> None:
    def change(content: bytearray) -> None:
        content[offset : offset + 8] = struct.pack("<Q", 1 << 62)

    started = time.monotonic()
    error = changed(model, change)
    assert error.kind == "corrupt"
    assert str(1 << 62) in str(error)
    assert time.monotonic() - started < 5


def test_an_absurd_length_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    start = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    path.write_bytes(start + struct.pack("<Q", 1 << 60) + bytes(1000))
    assert fault(path).kind == "corrupt"
    array = start + text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 1 << 29)
    path.write_bytes(array + bytes(1000))
    assert fault(path).kind == "corrupt"
    nested = start + text("a") + struct.pack("<IIQ", 9, 9, 1)
    path.write_bytes(nested + bytes(1000))
    assert fault(path).kind == "corrupt"
    assert MAX_HEADER_BYTES < 1 << 28


def test_a_tensor_that_lies_about_its_place_is_refused(model: Path) -> None:
    def change(content: bytearray) -> None:
        at = content.index(b"blk.1.attn_q.weight") + len("blk.1.attn_q.weight")
        content[at + 4 + 16 + 4 : at + 4 + 16 + 12] = struct.pack("<Q", 1 << 40)

    error = changed(model, change)
    assert error.kind == "corrupt"
    assert "blk.1.attn_q.weight" in str(error)


def test_an_unknown_tensor_type_asks_for_another_quantization(model: Path) -> None:
    def change(content: bytearray) -> None:
        at = content.index(b"output.weight") + len("output.weight")
        content[at + 4 + 16 : at + 4 + 16 + 4] = struct.pack("<I", 31)

    error = changed(model, change)
    assert error.kind == "unsupported"
    assert "31" in str(error)


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.block_count": 4000},
        {"llama.block_count": 2},
        {"llama.expert_count": 2000},
        {"llama.expert_used_count": 3},
        {"llama.attention.head_count_kv": [2, 2, 2]},
        {"llama.embedding_length": "wide"},
        {"llama.embedding_length": 0},
        {"llama.context_length": 0},
        {"general.alignment": 3},
    ],
)
def test_what_would_make_the_engine_abort_is_refused(tmp_path: Path, keys: dict[str, object]) -> None:
    path = synthetic.write_tiny(tmp_path / "m.gguf", overrides=keys)
    assert fault(path).kind == "corrupt"


def test_random_damage_never_escapes_as_another_error(model: Path) -> None:
    whole = model.read_bytes()
    end = parse(io.BytesIO(whole)).data_offset
    for at in range(4, end, 13):
        content = bytearray(whole)
        content[at] ^= 0xFF
        model.write_bytes(content)
        with contextlib.suppress(ModelFileError):
            gguf.read(model)


# Split models -------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    synthetic.write_tiny(tmp_path / "Demo.gguf", n_tensors_per_part=14)
    return sorted(tmp_path.glob("Demo-*.gguf"))


def test_any_part_stands_for_the_whole(split: list[Path], tmp_path: Path) -> None:
    assert [path.name for path in split] == [f"Demo-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    whole = gguf.read(synthetic.write_tiny(tmp_path / "whole.gguf"))
    for path in split:
        info = gguf.read(path)
        assert info.path == split[0]
        assert info.parts == tuple(split)
        assert info.size_bytes == sum(part.stat().st_size for part in split)
        assert info.shape == whole.shape


def test_a_missing_part_is_named(split: list[Path]) -> None:
    split[1].unlink()
    for path in (split[0], split[2]):
        error = fault(path)
        assert error.kind == "missing_part"
        assert split[1].name in str(error)


def test_a_lone_later_part_names_the_first(split: list[Path]) -> None:
    split[0].unlink()
    split[2].unlink()
    error = fault(split[1])
    assert error.kind == "missing_part"
    assert split[0].name in str(error)


def test_a_cut_part_is_named_with_its_sizes(split: list[Path]) -> None:
    content = split[2].read_bytes()
    split[2].write_bytes(content[:-100])
    error = fault(split[0])
    assert error.kind == "truncated"
    assert split[2].name in str(error)
    assert f"{len(content) - 100:,}" in str(error)


def test_a_part_of_another_model_is_refused(split: list[Path]) -> None:
    split[2].write_bytes(split[1].read_bytes())
    assert fault(split[0]).kind == "missing_part"


def test_a_renamed_part_is_not_taken_for_a_model(split: list[Path], tmp_path: Path) -> None:
    renamed = split[0].rename(tmp_path / "my-model.gguf")
    error = fault(renamed)
    assert error.kind == "missing_part"
    assert "00001-of-00003" in str(error)


@pytest.mark.parametrize("name", ["big.gguf.part1of2", "big.gguf.part2of2", "big.gguf-split-a"])
def test_pieces_cut_by_bytes_must_be_joined(tmp_path: Path, model: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(model.read_bytes())
    error = fault(path)
    assert error.kind == "joined_parts"
    assert "Join the files first" in str(error)


def test_a_name_with_of_in_it_is_a_plain_file(tmp_path: Path) -> None:
    path = synthetic.write_tiny(tmp_path / "best-of-breed.gguf")
    assert gguf.read(path).parts == (path,)
    assert gguf.parse_split_name("best-of-breed.gguf") is None
    assert gguf.parse_split_name("Demo-00004-of-00003.gguf") is None


# Speed and the real thing -------------------------------------------------------------------------


def test_a_large_vocabulary_is_passed_over_without_being_built(tmp_path: Path) -> None:
    """A quarter of a million tokens, as Nemotron-4 has; a list of them would be most of the time."""
    tokens = b"".join(text(f"token-{i}") for i in range(256_000))
    vocabulary = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 256_000) + tokens
    content = header("llama", n_keys=2) + vocabulary
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with path.open("rb") as stream:
        found = parse(stream)
    assert found.keys["tokenizer.ggml.tokens"] == SkippedArray(256_000)
    assert found.data_offset == -(-len(content) // 32) * 32


def test_the_list_of_architectures_is_the_librarys_own() -> None:
    """The names must be those of the pinned library: each is text inside its binary."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    files = [*folder.glob("libllama.so"), *folder.glob("libllama.dylib"), *folder.glob("llama.dll")]
    assert files
    binary = files[0].read_bytes()
    absent = [name for name in architectures.SUPPORTED if name.encode() + b"\0" not in binary]
    assert absent == []
