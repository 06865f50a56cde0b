"""The models folder: what is found, what a reference means, and what is changed there."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from nemolocal import config
from nemolocal.errors import (
    BeingFetchedError,
    ModelFileError,
    ModelNotFoundError,
    NemoLocalError,
    OfflineError,
    UsageError,
)
from nemolocal.models import (
    catalog,
    download,
    gguf,
    headers,
    overview,
    receipt,
    store,
    transfer,
    upkeep,
)
from nemolocal.models import hub as model_hub
from tests import synthetic
from tests.models.test_hub import dead_ends

STARTER = "HuggingFaceTB/SmolLM2-135M-Instruct"
STARTER_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def root() -> Path:
    """The models folder."""
    folder = config.load().models_dir
    folder.mkdir(parents=True)
    return folder


def put(path: Path, model: str = "llama", **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return synthetic.write_tiny(path, model, **options)


def catalog_rows(model_id: str) -> tuple[catalog.CatalogFile, ...]:
    """The rows of a model of the catalogue."""
    model = catalog.load().get(model_id)
    assert model is not None
    return model.files


def listed() -> dict[str, store.LocalModel]:
    return {model.ref: model for model in store.list_models(config.load())}


# Listing ------------------------------------------------------------------------------------------


def test_an_empty_or_missing_folder(root: Path) -> None:
    assert listed() == {}
    root.rmdir()
    assert listed() == {}


def test_models_are_found_wherever_a_person_puts_them(root: Path) -> None:
    put(root / STARTER / STARTER_FILE)
    put(root / "acme/Demo-GGUF/Demo-Q8_0.gguf")
    put(root / "acme/Demo-GGUF/UD/Demo-UD-Q4_K_XL.gguf")
    put(root / "best-of-breed.gguf")
    put(root / "mine/deep/er/Q4_0/thing.gguf", "qwen3")
    put(root / ".hidden/secret.gguf")
    models = listed()
    assert {ref: model.id for ref, model in models.items()} == {
        "starter:Q4_1": "starter",
        "hf:acme/Demo-GGUF:Q8_0": "hf:acme/Demo-GGUF",
        "hf:acme/Demo-GGUF:UD-Q4_K_XL": "hf:acme/Demo-GGUF",
        "best-of-breed": "best-of-breed",
        "hf:mine/deep:Q4_0": "hf:mine/deep",
    }
    loose = models["best-of-breed"]
    assert loose.path == root / "best-of-breed.gguf"
    assert loose.quant == "F32"  # from the header, as the name says nothing
    assert loose.bytes == loose.path.stat().st_size
    assert (loose.architecture, loose.n_ctx_train) == ("llama", 1024)
    assert loose.n_params == loose.info.n_params > 0
    assert all(store.resolve(ref, config.load()) == model for ref, model in models.items())


def test_the_parts_of_a_split_model_are_one_entry(root: Path, tmp_path: Path) -> None:
    put(tmp_path / "Demo.gguf", n_tensors_per_part=14)
    parts = sorted(tmp_path.glob("Demo-*.gguf"))
    assert len(parts) >= 3
    folder = root / "Q4_K_M"
    folder.mkdir()
    for part in reversed(parts):
        part.rename(folder / part.name)
    (root / "Q8_0").mkdir()
    put(root / "Q8_0" / "Demo-00002-of-00002.gguf")
    for name in ("big.gguf.part1of2", "big.gguf.part2of2"):
        (root / name).write_bytes(b"GGUF and so on")
    put(root / "best-of-breed.gguf")

    models = listed()
    assert set(models) == {
        "Q4_K_M/Demo",
        "Q8_0/Demo",
        "best-of-breed",
        "big.gguf.part1of2",
        "big.gguf.part2of2",
    }
    whole = models["Q4_K_M/Demo"]
    assert whole.path.name == parts[0].name
    assert whole.path.name.startswith("Demo-00001-of-")
    assert whole.bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert whole.is_usable
    assert "Demo-00001-of-00002.gguf" in models["Q8_0/Demo"].problem
    with pytest.raises(ModelFileError, match=r"Demo-00001-of-00002\.gguf"):
        store.resolve("Q8_0/Demo", config.load())
    for name in ("big.gguf.part1of2", "big.gguf.part2of2"):
        with pytest.raises(ModelFileError, match="Join the files first"):
            store.resolve(name, config.load())
        assert "Join" in models[name].problem


def test_broken_files_are_marked_each_with_its_reason_and_the_good_one_stays(root: Path) -> None:
    good = put(root / "good.gguf").read_bytes()
    bad = {
        "empty": b"",
        "cut-1000": good[:1000],
        "cut-half": good[: len(good) // 2],
        "cut-last": good[:-1],
        "login": b"<!DOCTYPE html><html><body>Log in</body></html>",
        "ptr": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 98362432\n",
        "old": b"ggml" + bytes(100),
        "words": b"just some words, and a few more of them",
    }
    for name, data in bad.items():
        (root / f"{name}.gguf").write_bytes(data)
    synthetic.write_tiny(root / "flux.gguf", overrides={"general.architecture": "flux"})
    synthetic.write_tiny(root / "eyes.gguf", overrides={"general.architecture": "clip"})

    started = time.monotonic()
    models = listed()
    assert time.monotonic() - started < 2
    assert [model.ref for model in models.values() if model.is_usable] == ["good"]
    assert {ref: model.fault for ref, model in models.items() if model.fault} == {
        "empty": "empty",
        "cut-1000": "truncated",
        "cut-half": "truncated",
        "cut-last": "truncated",
        "login": "web_page",
        "ptr": "lfs_pointer",
        "old": "old_format",
        "words": "not_gguf",
        "flux": "unsupported",
        "eyes": "projector",
    }
    assert models["eyes"].kind == "projector"
    assert len({model.problem for model in models.values()}) == len(models)
    for ref in (*bad, "flux", "eyes"):
        with pytest.raises(ModelFileError) as caught:
            store.resolve(ref, config.load())
        assert "\n" not in str(caught.value)
        assert f"{ref}.gguf" in str(caught.value)


def test_projectors_statistics_and_drafts_are_no_models(root: Path) -> None:
    put(root / "acme/Demo-GGUF/Demo-Q4_0.gguf")
    put(root / "acme/Demo-GGUF/mtp-Demo-Q4_0.gguf")
    put(root / "acme/Demo-GGUF/mmproj-Demo-F16.gguf", overrides={"general.architecture": "clip"})
    (root / "acme/Demo-GGUF/Demo.imatrix.gguf").write_bytes(b"GGUF")
    kinds = {model.path.name: model.kind for model in listed().values()}
    assert kinds == {
        "Demo-Q4_0.gguf": "model",
        "mtp-Demo-Q4_0.gguf": "draft",
        "mmproj-Demo-F16.gguf": "projector",
        "Demo.imatrix.gguf": "imatrix",
    }
    assert store.resolve("hf:acme/Demo-GGUF", config.load()).path.name == "Demo-Q4_0.gguf"
    assert [m.id for m in overview.build(config.load())][-1] == "hf:acme/Demo-GGUF"
    assert len(overview.build(config.load())[-1].files) == 1


def test_headers_are_read_once_for_each_version_of_a_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(3):
        put(root / f"model-{i}.gguf")
    before = listed()
    asked: list[str] = []
    read = gguf.read
    monkeypatch.setattr(headers.gguf, "read", lambda path: (asked.append(path.name), read(path))[1])
    assert listed() == before
    assert asked == []
    put(root / "model-1.gguf", "qwen3")
    assert listed()["model-1"].architecture == "qwen3"
    assert asked == ["model-1.gguf"]
    (config.load().paths.cache / store.CACHE_FILE).write_text("[broken")
    assert set(listed()) == set(before)


def test_names_that_would_mean_two_files_become_longer(root: Path) -> None:
    put(root / "acme/Demo-GGUF/a/Demo-Q4_0.gguf")
    put(root / "acme/Demo-GGUF/b/Demo-Q4_0.gguf")
    put(root / "unsloth/NVIDIA-Nemotron-3-Nano-4B-GGUF/x-Q4_K_M.gguf")
    put(root / "nvidia/NVIDIA-Nemotron-3-Nano-4B-GGUF/y-Q4_K_M.gguf")
    assert set(listed()) == {
        "hf:acme/Demo-GGUF:a/Demo-Q4_0.gguf",
        "hf:acme/Demo-GGUF:b/Demo-Q4_0.gguf",
        "hf:unsloth/NVIDIA-Nemotron-3-Nano-4B-GGUF:Q4_K_M",
        "hf:nvidia/NVIDIA-Nemotron-3-Nano-4B-GGUF:Q4_K_M",
    }
    for ref, model in listed().items():
        assert store.resolve(ref, config.load()) == model
    assert len(store.find(store.NamedRef("nemotron-3-nano-4b"), config.load())) == 2


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.skipif(os.name == "nt", reason="such names cannot be there")
def test_a_file_whose_name_reads_like_something_else_can_be_named_all_the_same(
    root: Path, tmp_path: Path
) -> None:
    for name in ("we ird:name", "~til", "hf:a/x", "back\\slash", "two\nlines", " spaced "):
        put(root / f"{name}.gguf")
    models = listed()
    assert set(models) == {"we ird_name", "_til", "hf_a/x", "back_slash", "two_lines", "_spaced_"}
    for ref, model in models.items():
        assert store.resolve(ref, config.load()) == model
    assert upkeep.import_path(put(tmp_path / "..far:off.gguf"), config.load()).ref == "_far_off"


def test_linked_folders_are_followed_but_never_round_and_round(root: Path, tmp_path: Path) -> None:
    put(tmp_path / "disk/far.gguf")
    (root / "more").symlink_to(tmp_path / "disk", target_is_directory=True)
    (tmp_path / "disk/back").symlink_to(root, target_is_directory=True)
    (root / "nowhere.gguf").symlink_to(tmp_path / "gone.gguf")
    models = listed()
    assert set(models) == {"more/far", "nowhere"}
    assert models["nowhere"].fault == "missing"


# Finding ------------------------------------------------------------------------------------------


def test_every_way_to_name_a_model(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(root / STARTER / STARTER_FILE)
    outside = put(tmp_path / "elsewhere/Mine-Q8_0.gguf")
    monkeypatch.chdir(outside.parent)
    for ref in (
        "starter",
        "STARTER:q4_1",
        f"hf:{STARTER}",
        f"hf:{STARTER.lower()}:Q4_1",
        f"hf:{STARTER}:{STARTER_FILE}",
        str(path),
        f"{STARTER}/{STARTER_FILE}",
    ):
        assert store.resolve(ref, config.load()).ref == "starter:Q4_1", ref
    for ref in ("Mine-Q8_0.gguf", str(outside), "../elsewhere/Mine-Q8_0.gguf"):
        model = store.resolve(ref, config.load())
        assert (model.id, model.quant, model.path) == ("Mine-Q8_0", "Q8_0", outside)
        assert model.ref == str(outside)
        assert model.is_usable


def test_without_a_quantization_all_are_candidates_and_the_largest_is_first(root: Path) -> None:
    small = put(root / "acme/Demo-GGUF/Demo-Q4_0.gguf")
    large = put(root / "acme/Demo-GGUF/Demo-Q8_0.gguf")
    with large.open("ab") as stream:
        stream.write(bytes(100))
    found = store.find(store.HubRef("acme/Demo-GGUF"), config.load())
    assert [model.path for model in found] == [large, small]
    assert store.resolve("hf:acme/Demo-GGUF", config.load()).path == large
    assert store.resolve("hf:acme/Demo-GGUF:Q4_0", config.load()).path == small


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("starter", "Get it with `nemolocal models pull starter`"),
        ("nemotron-3-nano-4b:Q4_K_M", "models pull nemotron-3-nano-4b:Q4_K_M"),
        ("nemotron-3-nano-4b:Q9", "It has IQ4_XS"),
        ("hf:acme/Demo-GGUF:Q4_0", "models pull hf:acme/Demo-GGUF:Q4_0"),
        ("sarter", "Did you mean starter"),
        ("god", "Did you mean good"),
        ("acme/Demo", "hf:acme/Demo"),
    ],
)
def test_what_is_not_here_says_how_to_get_it(root: Path, ref: str, says: str) -> None:
    put(root / "good.gguf")
    with pytest.raises(ModelNotFoundError) as caught:
        store.resolve(ref, config.load())
    assert says in str(caught.value)


@pytest.mark.parametrize("ref", ["no/such/file.gguf", "~/no-such-file.gguf"])
def test_a_path_that_leads_nowhere(root: Path, ref: str) -> None:
    with pytest.raises(ModelFileError, match="no such file") as caught:
        store.resolve(ref, config.load())
    assert caught.value.kind == "missing"


def test_a_folder_is_no_model_file(root: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelFileError, match="folder"):
        store.resolve(str(tmp_path / "folder.gguf"), config.load())


# Without a network --------------------------------------------------------------------------------


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever connects or looks up a name fails the test."""

    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("kind", ["refuses", "silent", "nameless"])
def test_a_model_that_is_here_needs_no_hub(root: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = put(root / STARTER / STARTER_FILE)
    monkeypatch.setattr(model_hub, "REQUEST_TIMEOUT_S", 0.3)
    with dead_ends() as addresses:
        monkeypatch.setenv("HF_ENDPOINT", addresses[kind])
        started = time.monotonic()
        assert store.resolve(f"hf:{STARTER}", config.load()).path == path
        assert download.pull(f"hf:{STARTER}", config.load()).path == path
        assert set(listed()) == {"starter:Q4_1"}
        assert time.monotonic() - started < 5
        with pytest.raises(OfflineError, match="cannot be reached"):
            download.pull("hf:acme/Unknown", config.load())
        assert time.monotonic() - started < 20


def test_with_the_hub_switched_off_no_connection_is_attempted(
    root: Path, monkeypatch: pytest.MonkeyPatch, no_sockets: None
) -> None:
    path = put(root / STARTER / STARTER_FILE)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert store.resolve(f"hf:{STARTER}", config.load()).path == path
    assert download.pull("starter", config.load()).path == path
    assert set(listed()) == {"starter:Q4_1"}
    for ref in ("hf:acme/Unknown", "nemotron-3-nano-4b"):
        with pytest.raises(OfflineError, match="offline"):
            download.pull(ref, config.load())


def test_resolving_and_listing_never_use_the_network(root: Path, no_sockets: None) -> None:
    path = put(root / STARTER / STARTER_FILE)
    assert store.resolve(f"hf:{STARTER}", config.load()).path == path
    assert overview.build(config.load())
    with pytest.raises(ModelNotFoundError):
        store.resolve("hf:acme/Unknown", config.load())


# The catalogue beside the folder ------------------------------------------------------------------


def test_overview_shows_what_is_remote_begun_and_here(root: Path) -> None:
    put(root / STARTER / STARTER_FILE)
    put(root / "bartowski/nvidia_Nemotron-3-Nano-4B-GGUF/z-Q6_K.gguf")
    put(root / "mine.gguf")
    begun = root / "unsloth/NVIDIA-Nemotron-3-Nano-4B-GGUF"
    begun.mkdir(parents=True)
    (begun / "NVIDIA-Nemotron-3-Nano-4B-Q4_K_M.gguf.0123456789abcdef.partial").write_bytes(bytes(10))
    models = {model.id: model for model in overview.build(config.load())}
    (starter,) = models["starter"].files
    assert (starter.state, starter.ref, starter.row is not None) == ("local", "starter:Q4_1", True)
    nano = {file.quant: file for file in models["nemotron-3-nano-4b"].files}
    assert (nano["Q4_K_M"].state, nano["Q4_K_M"].done_bytes) == ("partial", 10)
    assert (nano["Q8_0"].state, nano["Q8_0"].bytes) == ("remote", 4_230_000_000)
    assert (nano["Q6_K"].state, nano["Q6_K"].row) == ("local", None)
    assert models["mine"].listed is None
    assert models["mine"].files[0].state == "local"


# Adding, removing, checking -----------------------------------------------------------------------


def test_an_imported_model_stays_where_it_lies(root: Path, tmp_path: Path) -> None:
    path = put(tmp_path / "disk/Mine-Q8_0.gguf")
    model = upkeep.import_path(path, config.load())
    assert (model.ref, model.path) == ("Mine-Q8_0", path)
    assert not list(root.rglob("*.gguf"))
    assert store.resolve("mine-q8_0", config.load()).path == path
    assert store.resolve(str(path), config.load()).ref == "Mine-Q8_0"
    assert upkeep.import_path(path, config.load()) == model

    other = put(tmp_path / "other/Mine-Q8_0.gguf")
    assert upkeep.import_path(other, config.load()).ref == "Mine-Q8_0-2"
    assert upkeep.import_path(put(tmp_path / "starter.gguf"), config.load()).ref == "starter-2"

    removed = upkeep.remove("Mine-Q8_0", config.load())
    assert removed.is_forgotten
    assert path.exists()
    assert set(listed()) == {"Mine-Q8_0-2", "starter-2"}
    other.unlink()
    assert listed()["Mine-Q8_0-2"].fault == "missing"
    assert upkeep.remove("Mine-Q8_0-2", config.load()).is_forgotten


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_an_imported_link_keeps_its_name(root: Path, tmp_path: Path) -> None:
    """Other programs keep the bytes under their hash and link to them."""
    blob = put(tmp_path / "blobs/0123abcd.gguf").rename(tmp_path / "blobs/0123abcd")
    (tmp_path / "Linked-Q8_0.gguf").symlink_to(blob)
    model = upkeep.import_path(tmp_path / "Linked-Q8_0.gguf", config.load())
    assert (model.ref, model.quant) == ("Linked-Q8_0", "Q8_0")


def test_a_split_model_is_imported_by_any_part(root: Path, tmp_path: Path) -> None:
    put(tmp_path / "Demo.gguf", n_tensors_per_part=20)
    parts = sorted(tmp_path.glob("Demo-*.gguf"))
    model = upkeep.import_path(parts[-1], config.load())
    assert (model.id, model.parts) == ("Demo", tuple(parts))


def test_importing_what_is_no_model(root: Path, tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_bytes(b"<html></html>")
    with pytest.raises(ModelFileError):
        upkeep.import_path(tmp_path / "page.gguf", config.load())
    assert listed() == {}


def test_importing_what_is_in_the_folder_already(root: Path) -> None:
    path = put(root / "mine.gguf")
    assert upkeep.import_path(path, config.load()).ref == "mine"
    assert not (root / receipt.IMPORTED).exists()


def test_removing_takes_all_files_of_a_model_and_no_other(root: Path, tmp_path: Path) -> None:
    put(tmp_path / "Demo.gguf", n_tensors_per_part=20)
    folder = root / "acme/Demo-GGUF"
    (folder / "Q4_K_M").mkdir(parents=True)
    for part in tmp_path.glob("Demo-*.gguf"):
        part.rename(folder / "Q4_K_M" / part.name)
    keep = put(folder / "Demo-Q8_0.gguf")
    first = folder / "Q4_K_M" / min((folder / "Q4_K_M").iterdir()).name
    receipt.write(first, receipt.Receipt("hub", "acme/Demo-GGUF", "1", "", ()))
    with pytest.raises(UsageError, match=r"hf:acme/Demo-GGUF:Q8_0 or hf:acme/Demo-GGUF:Q4_K_M"):
        upkeep.remove("hf:acme/Demo-GGUF", config.load())
    removed = upkeep.remove("hf:acme/Demo-GGUF:Q4_K_M", config.load())
    assert removed.bytes > 0
    assert [path for path in folder.rglob("*") if path.is_file()] == [keep]
    assert not (folder / "Q4_K_M").exists()
    upkeep.remove(str(keep), config.load())
    assert [path.name for path in root.iterdir()] == [transfer.LOCKS]


def test_what_is_being_fetched_is_not_removed(root: Path) -> None:
    names = [f"Demo-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    first, second = (root / "acme/Demo-GGUF" / name for name in names)
    first.parent.mkdir(parents=True)
    partial = second.with_name(f"{second.name}.0123abcd.partial")
    partial.write_bytes(b"x")
    with transfer.locked(first, root, note=print, stop=threading.Event()):  # the lock is that of part 1
        for ref in ("hf:acme/Demo-GGUF:Q8_0", "hf:acme/Demo-GGUF"):
            with pytest.raises(BeingFetchedError, match="is being fetched"):
                upkeep.remove(ref, config.load())
    assert partial.exists()
    whole = put(root / "acme/Other-GGUF/Other-Q8_0.gguf")
    with (
        transfer.locked(whole, root, note=print, stop=threading.Event()),
        pytest.raises(BeingFetchedError),
    ):
        upkeep.remove("hf:acme/Other-GGUF:Q8_0", config.load())
    assert whole.exists()
    upkeep.remove("hf:acme/Demo-GGUF", config.load())
    assert not partial.exists()


def test_a_repository_alone_does_not_mean_all_that_was_begun_of_it(root: Path) -> None:
    folder = root / "acme/Demo-GGUF"
    folder.mkdir(parents=True)
    for quant in ("Q4_0", "Q8_0"):
        (folder / f"Demo-{quant}.gguf.0123abcd.partial").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"hf:acme/Demo-GGUF:Q4_0 or hf:acme/Demo-GGUF:Q8_0"):
        upkeep.remove("hf:acme/Demo-GGUF", config.load())
    assert len(store.partials(root, "acme/Demo-GGUF")) == 2
    upkeep.remove("hf:acme/Demo-GGUF:Q4_0", config.load())
    assert [path.name[:9] for path in store.partials(root, "acme/Demo-GGUF")] == ["Demo-Q8_0"]


def test_what_has_arrived_of_a_download_can_be_removed(root: Path) -> None:
    begun = root / "unsloth/NVIDIA-Nemotron-3-Nano-4B-GGUF"
    begun.mkdir(parents=True)
    for quant in ("Q4_K_M", "Q8_0"):
        (begun / f"NVIDIA-Nemotron-3-Nano-4B-{quant}.gguf.0123456789abcdef.partial").write_bytes(bytes(10))
    assert upkeep.remove("nemotron-3-nano-4b:Q4_K_M", config.load()).bytes == 10
    assert upkeep.remove("hf:unsloth/NVIDIA-Nemotron-3-Nano-4B-GGUF:Q8_0", config.load()).bytes == 10
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        upkeep.remove("nemotron-3-nano-4b:Q4_K_M", config.load())


def test_only_what_was_named_of_a_download_is_removed(root: Path) -> None:
    """The letters of one quantization stand in the names of others, and in those of folders."""
    folder = root / "acme/Q4_K-Models"
    (folder / "Q8_0").mkdir(parents=True)
    names = ["Demo-Q4_K_M.gguf", "Demo-Q4_K_S.gguf", "mmproj-Demo-F16.gguf"]
    names += [f"Q8_0/Demo-0000{i}-of-00002.gguf" for i in (1, 2)]
    for name in names:
        (folder / f"{name}.0123456789abcdef.partial").write_bytes(bytes(10))
    for ref in ("hf:acme/Q4_K-Models:Q4_K", "hf:acme/Q4_K-Models:F16", "hf:acme/Q4_K-Models:Demo.gguf"):
        with pytest.raises(ModelNotFoundError, match="not on this machine"):
            upkeep.remove(ref, config.load())
    removed = upkeep.remove("hf:acme/Q4_K-Models:Q8_0/Demo-00001-of-00002.gguf", config.load())
    assert len(removed.files) == 2
    assert upkeep.remove("hf:acme/Q4_K-Models:Q4_K_S", config.load()).bytes == 10
    either = r"hf:acme/Q4_K-Models:Q4_K_M or hf:acme/Q4_K-Models:mmproj-Demo-F16.gguf"
    with pytest.raises(UsageError, match=either):
        upkeep.remove("hf:acme/Q4_K-Models", config.load())
    assert upkeep.remove("hf:acme/Q4_K-Models:mmproj-Demo-F16.gguf", config.load()).bytes == 10
    assert upkeep.remove("hf:acme/Q4_K-Models", config.load()).bytes == 10


def test_a_download_whose_names_the_catalogue_lacks_is_found_by_its_quantization(root: Path) -> None:
    (row,) = [r for r in catalog_rows("nemotron-3-super-120b-a12b") if r.quant == "Q4_K_S"]
    assert not row.names
    begun = root / row.repo / "Q4_K_S"
    begun.mkdir(parents=True)
    (begun / "Super-Q4_K_S-00001-of-00003.gguf.0123456789abcdef.partial").write_bytes(bytes(10))
    models = {model.id: model for model in overview.build(config.load())}
    files = {file.quant: file for file in models["nemotron-3-super-120b-a12b"].files}
    assert (files["Q4_K_S"].state, files["Q4_K_S"].done_bytes) == ("partial", 10)
    assert upkeep.remove("nemotron-3-super-120b-a12b:Q4_K_S", config.load()).bytes == 10


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_what_has_arrived_outside_the_folder_is_left_there(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "disk"
    outside.mkdir()
    begun = outside / "Demo-Q4_0.gguf.0123456789abcdef.partial"
    begun.write_bytes(bytes(10))
    (root / "acme").mkdir()
    (root / "acme/Demo").symlink_to(outside, target_is_directory=True)
    with pytest.raises(UsageError, match="outside the models folder"):
        upkeep.remove("hf:acme/Demo", config.load())
    assert begun.exists()


def test_nothing_outside_the_folder_is_removed(root: Path, tmp_path: Path) -> None:
    outside = put(tmp_path / "disk/far.gguf")
    with pytest.raises(UsageError, match="outside the models folder"):
        upkeep.remove(str(outside), config.load())
    if os.name != "nt":
        (root / "more").symlink_to(tmp_path / "disk", target_is_directory=True)
        with pytest.raises(UsageError, match="outside the models folder"):
            upkeep.remove("more/far", config.load())
        (root / "link.gguf").symlink_to(outside)
        upkeep.remove("link", config.load())
        assert not (root / "link.gguf").is_symlink()
    assert outside.exists()
    for ref in ("nothing", "hf:acme/Demo", "no/file.gguf"):
        with pytest.raises(ModelNotFoundError):
            upkeep.remove(ref, config.load())


def test_broken_models_can_be_removed(root: Path) -> None:
    (root / "login.gguf").write_bytes(b"<html></html>")
    upkeep.remove("login", config.load())
    assert listed() == {}


def test_a_file_that_cannot_be_removed_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where a model that is loaded is held fast."""
    put(root / "mine.gguf")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(NemoLocalError, match=r"Cannot remove .*mine\.gguf: Permission denied"):
        upkeep.remove("mine", config.load())


def test_verify_tells_whole_damaged_and_unknown_apart(root: Path) -> None:
    path = put(root / "acme/Demo-GGUF/Demo-Q4_0.gguf")
    put(root / "loose.gguf")
    wrong_starter = put(root / STARTER / STARTER_FILE)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    file = receipt.ReceiptFile(path.name, path.stat().st_size, digest)
    receipt.write(path, receipt.Receipt("hub", "acme/Demo-GGUF", "1", "", (file,)))
    seen: list[tuple[int, int]] = []
    checks = upkeep.verify(None, config.load(), progress=lambda done, total: seen.append((done, total)))
    assert {check.path: check.state for check in checks} == {
        path: "ok",
        root / "loose.gguf": "unknown",
        wrong_starter: "damaged",  # by the catalogue's hash, as there is no receipt
    }
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(model.bytes for model in listed().values())

    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 1)
    (check,) = upkeep.verify("hf:acme/Demo-GGUF:Q4_0", config.load())
    assert (check.state, check.expected) == ("damaged", digest)
    with pytest.raises(ModelNotFoundError):
        upkeep.verify("starter:Q4_0", config.load())


def test_a_receipt_that_somebody_else_wrote_is_no_receipt(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for text in ("", "[]", "{}", '{"files": 3}', '{"files": [{"name": "x"}]}', "\x00"):
        receipt.receipt_path(path).write_text(text)
        assert receipt.read(path) is None
