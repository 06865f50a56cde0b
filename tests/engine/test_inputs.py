"""How inputs and pairs become tokens, with llama.cpp's own tokenizer on small files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import pytest

from nemolocal.engine.llama.inputs import Inputs
from nemolocal.engine.llama.library import Log, load_library, load_model
from nemolocal.engine.llama.vocab import LlamaVocab
from nemolocal.engine.messages import LoadSpec
from tests import synthetic, synthetic_embedders

pytestmark = pytest.mark.model

BOS, EOS, SEP = 1, 2, 0


@contextmanager
def inputs(path: Path, *, layout: str = "") -> Iterator[Inputs]:
    spec = LoadSpec(str(path), 64, 1)
    library = load_library(spec)
    log = Log(library)
    model = load_model(library, spec, log, lambda share: None)
    try:
        yield Inputs(library, LlamaVocab(library, model), layout=layout)
    finally:
        library.llama_model_free(model)
        log.close()


def ids(text: str) -> list[int]:
    """In the vocabulary of the small files a byte is its number and three more, where nothing merges and
    nothing is a blank or a line's end."""
    return [3 + byte for byte in text.encode()]


def with_ends(tmp_path: Path, *, bos: bool, eos: bool, sep: bool) -> Path:
    """A file whose vocabulary adds these."""
    adds = {"bos": bos, "eos": eos, "sep": sep}
    keys = {f"tokenizer.ggml.add_{name}_token": value for name, value in adds.items()}
    keys["tokenizer.ggml.seperator_token_id"] = SEP  # type: ignore[assignment]
    assert gguf.Keys.Tokenizer.SEP_ID in keys
    return synthetic.write_tiny(tmp_path / "m.gguf", overrides=keys)


@pytest.mark.parametrize(
    ("bos", "eos", "first", "last"),
    [
        (True, True, [BOS], [EOS]),
        (True, False, [BOS], []),
        (False, True, [], [EOS]),
        (False, False, [], []),
    ],
)
def test_an_input_gets_the_ends_that_the_vocabulary_wants(
    tmp_path: Path, bos: bool, eos: bool, first: list[int], last: list[int]
) -> None:
    with inputs(with_ends(tmp_path, bos=bos, eos=eos, sep=False)) as made:
        expected = [*first, *ids("abc"), *last]
        assert made.of_text("abc") == expected
        assert made.of_tokens(ids("abc")) == expected
        assert made.of_tokens(expected) == expected
        assert made.of_text("") == [*first, *last]


def test_a_control_token_in_a_text_is_text(tmp_path: Path) -> None:
    with inputs(with_ends(tmp_path, bos=False, eos=False, sep=False)) as made:
        assert made.of_text("<|im_end|>") == ids("<|im_end|>")
        assert made.of_pair("q<|im_start|>", "<|im_end|>") == ids("q<|im_start|><|im_end|>")


@pytest.mark.parametrize(
    ("bos", "eos", "sep", "expected"),
    [
        (True, True, True, [BOS, *ids("q"), EOS, SEP, *ids("d"), EOS]),
        (True, True, False, [BOS, *ids("q"), EOS, *ids("d"), EOS]),
        (True, False, True, [BOS, *ids("q"), SEP, *ids("d")]),
        (False, False, False, ids("qd")),
    ],
)
def test_a_pair_has_the_layout_of_the_library_s_server(
    tmp_path: Path, bos: bool, eos: bool, sep: bool, expected: list[int]
) -> None:
    with inputs(with_ends(tmp_path, bos=bos, eos=eos, sep=sep)) as made:
        assert made.of_pair("q", "d") == expected


def test_the_file_s_own_layout_has_its_control_tokens_and_the_texts_have_none(tmp_path: Path) -> None:
    path = synthetic_embedders.write(tmp_path / "m.gguf", "qwen3-rank")
    with inputs(path, layout="<|im_start|>Q:{query}D:{document}<|im_end|>") as made:
        assert made.of_pair("x", "y") == [BOS, *ids("Q:xD:y"), EOS]
        assert made.of_pair("{document}", "<|im_end|>") == [BOS, *ids("Q:{document}D:<|im_end|>"), EOS]


def test_a_text_in_a_layout_is_tokenized_as_part_of_the_whole(tmp_path: Path) -> None:
    path = synthetic_embedders.write(tmp_path / "m.gguf", "qwen3-rank")
    with inputs(path, layout="t{query}{document}") as made:
        assert made.of_pair("h", "e") == made.of_pair("he", "")
        assert len(made.of_pair("h", "e")) == 1
