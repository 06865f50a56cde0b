"""Models on the hub before they are downloaded: their headers, plans made from them, and whether the
catalogue is still right about them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from nemolocal import config
from nemolocal.errors import DoesNotFitError, HubError, ModelFileError, ModelNotFoundError, OfflineError
from nemolocal.models import catalog, download, gguf, online, planning, remote
from nemolocal.models import hub as model_hub
from nemolocal.models.plans import Plan
from tests import synthetic
from tests.fake_hub import FakeFile, FakeHub
from tests.profiles import machine

REPO = "acme/Demo-GGUF"
DESK = machine(("NVIDIA GeForce RTX 3060", 12))


def header_of(tmp_path: Path, *, model: str = "llama", type_name: str = "Q8_0", **options: object) -> bytes:
    """A model without its weights' bytes, which the fake hub announces but nobody asks for."""
    shape = replace(synthetic.TINY[model], n_vocab=90_000)  # its vocabulary does not fit the first request
    path = tmp_path / f"{model}-{type_name}.gguf"
    synthetic.write(path, shape, weights="none", type_name=type_name, **options)  # type: ignore[arg-type]
    return path.read_bytes()


@pytest.fixture
def demo(hub: FakeHub, tmp_path: Path) -> FakeHub:
    files = {
        "Demo-Q8_0.gguf": header_of(tmp_path, type_name="Q8_0"),
        "q4/Demo-UD-Q4_0.gguf": header_of(tmp_path, type_name="Q4_0"),
        "mmproj-Demo-F16.gguf": b"eyes",
        "README.md": b"#",
    }
    hub.add(REPO, files)
    return hub


def plan(ref: str) -> Plan:
    return planning.plan(ref, config.load(), DESK)


def fetched_bytes(hub: FakeHub) -> int:
    asked = [request.headers.get("Range", "") for request in hub.transfers()]
    ranges = (text.removeprefix("bytes=").split("-") for text in asked)
    return sum(int(end) - int(start) + 1 for start, end in ranges)


def test_a_header_is_read_in_ranges_and_once(demo: FakeHub, tmp_path: Path) -> None:
    repo = model_hub.fetch_repo(REPO, config.load())
    model = repo.choose(quant="Q8_0")
    found = remote.read_header(repo, model, config.load())
    (tmp_path / "whole.gguf").write_bytes(demo.repos[REPO].files["Demo-Q8_0.gguf"].data)
    info = gguf.read(tmp_path / "whole.gguf")
    assert found.shape == info.shape
    assert found.facts["architecture"] == "llama"
    assert all("Range" in request.headers for request in demo.transfers())
    assert 1 < len(demo.transfers()) < 6
    n_before = len(demo.requests)
    assert remote.read_header(repo, model, config.load({"offline": True})) == found  # from the disk
    assert len(demo.requests) == n_before


@pytest.mark.parametrize("fault", ["ignores_range", "short", "stalls"])
def test_servers_that_do_not_do_as_asked(demo: FakeHub, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_hub, "REQUEST_TIMEOUT_S", 0.3)
    if fault == "ignores_range":
        demo.ignores_range = True
        assert plan(f"hf:{REPO}").candidate.quant == "Q8_0"
        return
    demo.cut_after = 1000 if fault == "short" else None
    demo.stall_after = 1000 if fault == "stalls" else None
    with pytest.raises((HubError, OfflineError)) as caught:
        plan(f"hf:{REPO}")
    assert "\n" not in str(caught.value)


def test_a_repository_is_planned_before_anything_is_downloaded(demo: FakeHub, tmp_path: Path) -> None:
    made = plan(f"hf:{REPO}")
    assert made.candidate.quant == "Q8_0"
    assert made.candidate.file == f"hf:{REPO}:Demo-Q8_0.gguf"
    assert not made.candidate.is_local
    assert made.placement.is_whole
    (tmp_path / "whole.gguf").write_bytes(demo.repos[REPO].files["Demo-Q8_0.gguf"].data)
    assert made.candidate.shape == gguf.read(tmp_path / "whole.gguf").shape  # the chosen one's is exact
    assert plan(f"hf:{REPO}:UD-Q4_0").candidate.quant == "UD-Q4_0"
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
    with pytest.raises(ModelNotFoundError, match="no GGUF files"):
        planning.plan(f"hf:{REPO}", config.load(), DESK)


def test_an_unknown_architecture_is_refused_by_name(hub: FakeHub, tmp_path: Path) -> None:
    header = header_of(tmp_path, overrides={"general.architecture": "tomorrow"})
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
    hub.add("bartowski/acme_Demo-GGUF", {"Demo-Q4_K_M.gguf": b"1"})
    with pytest.raises(ModelNotFoundError, match=r"hf:bartowski/acme_Demo-GGUF") as caught:
        plan("hf:acme/Demo")
    assert "hf:acme/Demo," not in str(caught.value)


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


# Is the catalogue still right? ----------------------------------------------------------------------

ROWS = """
[demo-1b]
name = "Demo"
maker = "Acme"
family = "demo"
tags = ["chat"]
languages = ["en"]
licence = "MIT"
repo = "acme/Demo-GGUF"
other_repos = ["beta/Demo-GGUF"]
released = "2026"
n_params = 1_000
n_active_params = 1_000
n_ctx = 4096
files = [
  { quant = "Q4_0", name = "Demo-Q4_0.gguf", bytes = 4 },
  { quant = "Q5_0", bytes_about = 100 },
  { quant = "Q6_K", bytes_about = 100 },
  { quant = "Q8_0", bytes = 5 },
  { quant = "F16", bytes = 5 },
]
"""


def test_every_row_is_asked_about(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(ROWS)
    known = catalog.load.__wrapped__(tmp_path / "models.toml")
    hub.add(REPO, {"Demo-Q4_0.gguf": b"four", "Demo-Q5_0.gguf": bytes(102), "Demo-Q6_K.gguf": bytes(120)})
    hub.add("beta/Demo-GGUF", {"Demo-Q8_0.gguf": b"12345"})
    seen: list[tuple[int, int]] = []
    found = online.check(None, config.load(), known=known, progress=lambda n, of: seen.append((n, of)))
    assert [row.state for row in found] == ["ok", "ok", "changed", "elsewhere", "gone"]
    assert found[3].repo == "beta/Demo-GGUF"
    assert "120" in found[2].detail
    assert seen == [(1, 2), (2, 2)]
    hub.repos[REPO].is_gated = True
    assert online.check("demo-1b", config.load(), known=known)[0].state == "gated"
    del hub.repos[REPO]
    assert [r.state for r in online.check(None, config.load(), known=known)] == [
        "gone", "gone", "gone", "elsewhere", "gone",
    ]  # fmt: skip
    hub.status = 503
    assert {row.state for row in online.check(None, config.load(), known=known)} == {"unknown"}
    with pytest.raises(OfflineError):
        online.check(None, config.load({"offline": True}), known=known)


def test_a_model_is_taken_from_its_next_repository_where_the_first_is_gone(
    hub: FakeHub, tmp_path: Path
) -> None:
    (tmp_path / "models.toml").write_text(ROWS)
    known = catalog.load.__wrapped__(tmp_path / "models.toml")
    data = synthetic.write_tiny(tmp_path / "tiny.gguf").read_bytes()
    hub.add("beta/Demo-GGUF", {"Other-Q8_0.gguf": data})
    notes: list[str] = []
    model = download.pull("demo-1b:Q8_0", config.load(), known=known, note=notes.append)
    assert model.repo == "beta/Demo-GGUF"
    assert any("Taking it from beta/Demo-GGUF" in note for note in notes)
