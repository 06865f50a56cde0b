"""Models on the hub before they are downloaded: their headers, and plans made from them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from nemolocal import config
from nemolocal.errors import (
    DoesNotFitError,
    HubError,
    ModelFileError,
    ModelNotFoundError,
    OfflineError,
    UsageError,
)
from nemolocal.models import download, gguf, kept, offers, planning, remote
from nemolocal.models import hub as model_hub
from nemolocal.models.plans import Plan
from nemolocal.models.reference import HubRef
from tests import synthetic
from tests.fake_hub import FakeFile, FakeHub
from tests.profiles import machine

REPO = "acme/Demo-GGUF"
DESK = machine(("NVIDIA GeForce RTX 3060", 12))


def header_of(
    tmp_path: Path, *, model: str = "llama", type_name: str = "Q8_0", architecture: str = ""
) -> bytes:
    """A model whose weights are zeros and whose vocabulary does not fit the first request."""
    made = _made.get((model, type_name, architecture))
    if made is None:
        overrides = {"general.architecture": architecture} if architecture else {}
        shape = replace(synthetic.TINY[model], n_vocab=60_000)
        path = tmp_path / "made.gguf"
        synthetic.write(path, shape, weights="none", type_name=type_name, overrides=overrides)
        made = _made[model, type_name, architecture] = path.read_bytes()
    return made


_made: dict[tuple[str, str, str], bytes] = {}


@pytest.fixture
def demo(hub: FakeHub, tmp_path: Path) -> FakeHub:
    files = {
        "Demo-Q5_0.gguf": header_of(tmp_path, type_name="Q5_0"),
        "q4/Demo-UD-Q4_0.gguf": header_of(tmp_path, type_name="Q4_0"),
        "mmproj-Demo-F16.gguf": b"eyes",
        "README.md": b"#",
    }
    hub.add(REPO, files)
    return hub


def plan(ref: str) -> Plan:
    return planning.plan(ref, config.load(), DESK)


def whole(hub: FakeHub, tmp_path: Path) -> gguf.GgufInfo:
    """The file that is planned with, read from a disk."""
    path = tmp_path / "whole.gguf"
    path.write_bytes(hub.repos[REPO].files["Demo-Q5_0.gguf"].data)
    return gguf.read(path)


def fetched_bytes(hub: FakeHub) -> int:
    asked = [request.headers.get("Range", "") for request in hub.transfers()]
    ranges = (text.removeprefix("bytes=").split("-") for text in asked)
    return sum(int(end) - int(start) + 1 for start, end in ranges)


def test_a_header_is_read_in_ranges_and_once(demo: FakeHub, tmp_path: Path) -> None:
    repo = model_hub.fetch_repo(REPO, config.load())
    model = repo.choose(quant="Q5_0")
    found = remote.read_header(repo, model, config.load())
    assert found.shape == whole(demo, tmp_path).shape
    assert (found.summary.architecture, found.summary.quant) == ("llama", "Q5_0")
    assert all("Range" in request.headers for request in demo.transfers())
    assert 1 < len(demo.transfers()) < 6
    assert fetched_bytes(demo) < model.bytes / 2
    n_before = len(demo.requests)
    assert remote.read_header(repo, model, config.load({"offline": True})) == found  # from the disk
    assert len(demo.requests) == n_before


def test_a_server_that_ignores_ranges_is_read_no_further_than_needed(hub: FakeHub, tmp_path: Path) -> None:
    large = header_of(tmp_path) + bytes(64 << 20)
    hub.add(REPO, {"Demo-Q8_0.gguf": large})
    hub.ignores_range = True
    assert plan(f"hf:{REPO}").candidate.quant == "Q8_0"
    assert hub.n_sent_bytes < 24 << 20


def test_an_address_that_expires_is_asked_for_anew(demo: FakeHub) -> None:
    demo.n_expired = 1
    assert plan(f"hf:{REPO}").candidate.quant == "Q5_0"
    demo.n_expired = 100
    repo = model_hub.fetch_repo(REPO, config.load())
    with pytest.raises(HubError, match=r"storage refused mmproj-Demo-F16\.gguf \(status 403\)"):
        remote.read_header(repo, repo.choose(file="mmproj-Demo-F16.gguf"), config.load())


def test_the_token_stays_with_the_hub(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, {"Demo-Q8_0.gguf": header_of(tmp_path)}, is_gated=True)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert plan(f"hf:{REPO}").candidate.quant == "Q8_0"
    assert hub.transfers()
    assert all("Authorization" not in request.headers for request in hub.transfers())


@pytest.mark.parametrize("fault", ["short", "stalls"])
def test_servers_that_do_not_do_as_asked(demo: FakeHub, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_hub, "REQUEST_TIMEOUT_S", 0.3)
    demo.cut_after = 1000 if fault == "short" else None
    demo.stall_after = 1000 if fault == "stalls" else None
    with pytest.raises((HubError, OfflineError)) as caught:
        plan(f"hf:{REPO}")
    assert "\n" not in str(caught.value)


def test_a_repository_is_planned_before_anything_is_downloaded(demo: FakeHub, tmp_path: Path) -> None:
    made = plan(f"hf:{REPO}")
    assert made.candidate.quant == "Q5_0"
    assert made.candidate.file == f"hf:{REPO}:Demo-Q5_0.gguf"
    assert not made.candidate.is_local
    assert made.placement.is_whole
    assert made.candidate.shape == whole(demo, tmp_path).shape  # the chosen one's is exact
    assert plan(f"hf:{REPO}:ud.q4-0").candidate.quant == "UD-Q4_0"
    assert not list(config.load().models_dir.rglob("*.gguf"))


def test_other_quantizations_are_estimated_from_one_header(tmp_path: Path) -> None:
    shapes, sizes = {}, {}
    for type_name in ("Q4_0", "Q8_0"):
        data = header_of(tmp_path, type_name=type_name)
        shapes[type_name] = gguf.read_streams([("m", io.BytesIO(data), len(data))]).shape
        sizes[type_name] = len(data)
    made = remote.scaled(shapes["Q4_0"], from_bytes=sizes["Q4_0"], to_bytes=sizes["Q8_0"])
    exact = shapes["Q8_0"]
    assert made.repeating_bytes == pytest.approx(exact.repeating_bytes, rel=0.3)  # a tiny file is half header
    assert [layer.n_embd_k_gqa for layer in made.layers] == [layer.n_embd_k_gqa for layer in exact.layers]


def test_a_split_model_is_read_part_by_part(hub: FakeHub, tmp_path: Path) -> None:
    first = synthetic.write_tiny(tmp_path / "Demo.gguf", n_tensors_per_part=12)
    parts = {path.name: path.read_bytes() for path in sorted(tmp_path.glob("Demo-0*.gguf"))}
    assert len(parts) > 2
    hub.add(REPO, parts)
    made = planning.plan(f"hf:{REPO}", config.load({"ctx": 512}), DESK)
    assert made.candidate.shape == gguf.read(first).shape
    del hub.repos[REPO].files[sorted(parts)[1]]
    with pytest.raises(HubError, match=rf"lacks a part of its only model: {sorted(parts)[1]}"):
        planning.plan(f"hf:{REPO}", config.load(), DESK)


def test_of_later_parts_little_is_read(hub: FakeHub, tmp_path: Path) -> None:
    shape = replace(synthetic.TINY["llama"], n_vocab=60_000)
    synthetic.write(tmp_path / "Demo.gguf", shape, n_tensors_per_part=12)
    parts = {path.name: path.read_bytes() for path in sorted(tmp_path.glob("Demo-0*.gguf"))}
    hub.add(REPO, parts)
    repo = model_hub.fetch_repo(REPO, config.load())
    remote.read_header(repo, repo.models[0], config.load())
    later = [request for request in hub.transfers() if "-00001-of-" not in request.path]
    assert len(later) == len(parts) - 1 > 1
    ends = [int(request.headers["Range"].removeprefix("bytes=0-")) for request in later]
    assert max(ends) < remote.FIRST_BYTES_OF_PART


# What is known of a repository ----------------------------------------------------------------------


def test_a_second_plan_asks_for_no_header_and_needs_no_network(
    demo: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = plan(f"hf:{REPO}")
    demo.requests.clear()
    assert plan(f"hf:{REPO}") == first
    assert demo.transfers() == []
    demo.requests.clear()
    offline = planning.plan(f"hf:{REPO}", config.load({"offline": True}), DESK)
    assert offline.candidate == first.candidate
    assert "offline" in offline.reasons[-1]
    assert f"This is what {REPO} held on 20" in offline.reasons[-1]
    assert demo.requests == []
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in plan(f"hf:{REPO}").reasons[-1]


def test_what_another_version_kept_is_asked_for_again(demo: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(f"hf:{REPO}")
    monkeypatch.setattr("nemolocal.__version__", "0.0.0")
    with pytest.raises(OfflineError):
        planning.plan(f"hf:{REPO}", config.load({"offline": True}), DESK)


def test_no_more_is_kept_than_is_of_use(demo: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "N_MOST", 2)
    plan(f"hf:{REPO}")  # two headers and the repository
    assert len(list((config.load().paths.cache / "hub").iterdir())) == 2


def test_a_new_commit_is_read_anew(demo: FakeHub, tmp_path: Path) -> None:
    plan(f"hf:{REPO}")
    demo.requests.clear()
    demo.repos[REPO].files["Demo-Q5_0.gguf"] = FakeFile(header_of(tmp_path, type_name="Q5_1"))
    plan(f"hf:{REPO}")
    assert demo.transfers()


def test_different_models_in_one_repository_have_headers_of_their_own(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(
        REPO,
        {
            "Small-Q4_0.gguf": header_of(tmp_path, type_name="Q4_0"),
            "Small-Q8_0.gguf": header_of(tmp_path, type_name="Q8_0"),
            "Moe-Q8_0.gguf": header_of(tmp_path, model="llama-moe"),
        },
    )
    repo = model_hub.fetch_repo(REPO, config.load())
    found = {o.model.first: o for o in offers.all_of(repo, repo.chat_models, config.load())}
    assert {name: (o.shape.n_expert, o.is_exact) for name, o in found.items()} == {
        "Small-Q4_0.gguf": (0, True),
        "Small-Q8_0.gguf": (0, False),
        "Moe-Q8_0.gguf": (4, True),
    }
    files = {candidate.file for candidate in offers.candidates(HubRef(REPO), config.load())}
    assert files == {f"hf:{REPO}:{name}" for name in found}


def test_a_collection_is_not_looked_through(hub: FakeHub) -> None:
    hub.add(REPO, {f"Model{i}-Q4_0.gguf": b"x" for i in range(9)})
    with pytest.raises(UsageError, match=r"9 different models.*Name one file: hf:acme/Demo-GGUF:Model0-Q4_0"):
        plan(f"hf:{REPO}")
    assert hub.transfers() == []


def test_a_quantization_that_cannot_be_loaded_is_passed_over(
    demo: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(demo.repos[REPO].files["Demo-Q5_0.gguf"].data)
    at = data.rindex(b".weight", 0, 4_000_000)  # the last tensor: its name, dimensions, then its type
    n_dims = int.from_bytes(data[at + 7 : at + 11], "little")
    place = at + 11 + 8 * n_dims
    data[place : place + 4] = (144).to_bytes(4, "little")
    demo.repos[REPO].files["Demo-Q5_0.gguf"] = FakeFile(bytes(data))
    assert plan(f"hf:{REPO}").candidate.quant == "UD-Q4_0"
    with pytest.raises(ModelFileError, match=r"Demo-Q5_0\.gguf: .*144"):
        plan(f"hf:{REPO}:Q5_0")


def test_an_unknown_architecture_is_refused_by_name(hub: FakeHub, tmp_path: Path) -> None:
    header = header_of(tmp_path, architecture="tomorrow")
    large = header + bytes(download.WORTH_ASKING_BYTES)
    hub.add(REPO, {"Demo-Q8_0.gguf": large})
    for act in (plan, lambda ref: download.pull(ref, config.load())):
        with pytest.raises(ModelFileError, match="tomorrow") as caught:
            act(f"hf:{REPO}")
        assert caught.value.kind == "unsupported"
    assert fetched_bytes(hub) < 8 << 20


def test_what_is_too_large_is_refused_with_sizes(hub: FakeHub, tmp_path: Path) -> None:
    shape = replace(synthetic.TINY["llama"], layers=32, n_embd=8192, n_ff=28672, n_head=64, n_head_kv=8)
    path = synthetic.write(tmp_path / "big.gguf", shape, weights="none", has_vocab=False)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(4 << 20)
    hub.add(REPO, {"Big-F32.gguf": FakeFile(head, announced_bytes=size)})
    with pytest.raises(DoesNotFitError, match="GiB"):
        planning.plan(f"hf:{REPO}", config.load(), machine(ram_gib=8))


def test_a_repository_without_gguf_names_those_who_converted_it(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("acme/Demo", {"model.safetensors": b"1"})
    hub.add("somebody/Demo-GGUF", {"Demo-Q4_K_M.gguf": b"1"}, n_downloads=900)
    hub.add("bartowski/acme_Demo-GGUF", {"Demo-Q4_K_M.gguf": b"1"}, n_downloads=20)
    hub.add("mradermacher/D3M0-GGUF", {"D.Q4_K_M.gguf": b"1"}, base="acme/Demo")
    hub.add("other/Demolition-BF16", {"model.safetensors": b"1"})
    with pytest.raises(ModelNotFoundError, match="no GGUF files") as caught:
        plan("hf:acme/Demo")
    named = "hf:bartowski/acme_Demo-GGUF, hf:mradermacher/D3M0-GGUF, hf:somebody/Demo-GGUF."
    assert caught.value.hint == f"The same model as GGUF: {named}"


@pytest.mark.parametrize(
    ("repo", "conversion"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "unsloth/Nemotron-3-Nano-30B-A3B-GGUF"),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1_5-FP8", "unsloth/Llama-3_3-Nemotron-Super-49B-v1_5-GGUF"),
        ("acme/Demo-GGUF", "ggml-org/Demo-GGUF"),
    ],
)
def test_names_of_conversions_leave_out_what_was_converted(hub: FakeHub, repo: str, conversion: str) -> None:
    hub.add(repo, {"imatrix.gguf": b"1"})
    hub.add(conversion, {"x-Q4_K_M.gguf": b"1"})
    with pytest.raises(ModelNotFoundError, match=rf"no GGUF models, only imatrix\.gguf.*hf:{conversion}"):
        plan(f"hf:{repo}")


def test_pieces_are_said(hub: FakeHub) -> None:
    hub.add(REPO, {f"Demo.Q8_0.gguf.part{i}of2": b"1" for i in (1, 2)})
    for ref in (f"hf:{REPO}", f"hf:{REPO}:Q8_0"):
        with pytest.raises(HubError, match=r"in pieces.*Q8_0\.gguf\.part1of2.*join"):
            plan(ref)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"is_gated": True}, 0, "terms"),
        ({"is_private": True}, 0, "private"),
        ({}, 429, "rate limit"),
        ({}, 503, "in trouble"),
    ],
)
def test_each_refusal_has_its_own_line(
    hub: FakeHub, tmp_path: Path, options: dict[str, bool], status: int, words: str
) -> None:
    hub.add(REPO, {"Demo-Q8_0.gguf": header_of(tmp_path)}, **options)
    hub.status = status
    with pytest.raises(HubError, match=words) as caught:
        plan(f"hf:{REPO}")
    assert caught.value.hint
