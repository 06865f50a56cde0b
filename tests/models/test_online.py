"""Is the catalogue still right about the hub? Every row is asked about."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from nemolocal import config
from nemolocal.errors import HubError, OfflineError
from nemolocal.models import catalog, download, online, upkeep
from nemolocal.models import hub as model_hub
from nemolocal.models.catalog import Catalog
from tests import synthetic
from tests.fake_hub import FakeHub

REPO = "acme/Demo-GGUF"

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


@pytest.fixture
def known(tmp_path: Path) -> Catalog:
    (tmp_path / "models.toml").write_text(ROWS)
    return catalog.load(tmp_path / "models.toml")


def test_every_row_is_asked_about(hub: FakeHub, known: Catalog) -> None:
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
    hub.requests.clear()
    with pytest.raises(OfflineError):
        online.check(None, config.load({"offline": True}), known=known)
    assert hub.requests == []


def test_what_the_hub_has_now_is_told_for_the_next_catalogue(hub: FakeHub, known: Catalog) -> None:
    hub.add(REPO, {f"q4/Demo-Q4_0-0000{i}-of-00002.gguf": bytes(i) for i in (1, 2)})
    row = online.check("demo-1b", config.load(), known=known)[0]
    assert (row.state, row.bytes) == ("changed", 3)
    assert row.names == tuple(f"q4/Demo-Q4_0-0000{i}-of-00002.gguf" for i in (1, 2))
    assert row.sha256 == tuple(hashlib.sha256(bytes(i)).hexdigest() for i in (1, 2))


def test_the_same_size_with_other_bytes_has_changed(hub: FakeHub, tmp_path: Path) -> None:
    right = hashlib.sha256(b"four").hexdigest()
    (tmp_path / "models.toml").write_text(ROWS.replace("bytes = 4", f'bytes = 4, sha256 = "{right}"'))
    known = catalog.load(tmp_path / "models.toml")
    hub.add(REPO, {"Demo-Q4_0.gguf": b"four"})
    assert online.check(None, config.load(), known=known)[0].state == "ok"
    hub.add(REPO, {"Demo-Q4_0.gguf": b"fore"})
    row = online.check(None, config.load(), known=known)[0]
    assert (row.state, "sha256" in row.detail) == ("changed", True)


def test_another_repository_that_is_gone_is_told_of(hub: FakeHub, known: Catalog) -> None:
    hub.add(REPO, {"Demo-Q4_0.gguf": b"four"})
    last = online.check(None, config.load(), known=known)[-1]
    assert (last.ref, last.repo, last.state) == ("demo-1b", "beta/Demo-GGUF", "gone")


def test_a_hub_that_wants_no_more_questions_gets_no_more(
    hub: FakeHub, known: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "N_AT_ONCE", 1)
    hub.status, hub.reset_after = 429, 55
    rows = online.check(None, config.load(), known=known)
    assert {row.state for row in rows} == {"unknown"}
    assert all("Wait 55 seconds" in row.detail for row in rows)
    assert len(hub.requests) == 1


def test_a_hub_that_cannot_be_reached_is_one_error_soon(
    known: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    fetch = model_hub.fetch_repo
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(online, "N_AT_ONCE", 1)
    monkeypatch.setattr(model_hub, "fetch_repo", lambda repo, c: asked.append(repo) or fetch(repo, c))
    with pytest.raises(OfflineError, match="cannot be reached"):
        online.check(None, config.load(), known=known)
    assert len(asked) == 1


def test_a_model_is_taken_from_its_next_repository_where_the_first_is_gone(
    hub: FakeHub, known: Catalog, tmp_path: Path
) -> None:
    data = synthetic.write_tiny(tmp_path / "tiny.gguf").read_bytes()
    hub.add("beta/Demo-GGUF", {"Other-Q8_0.gguf": data})
    notes: list[str] = []
    model = download.pull("demo-1b:Q8_0", config.load(), known=known, note=notes.append)
    assert model.repo == "beta/Demo-GGUF"
    assert any("Taking it from beta/Demo-GGUF" in note for note in notes)


def test_a_model_is_taken_from_where_nobody_has_to_ask(
    hub: FakeHub, known: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = synthetic.write_tiny(tmp_path / "tiny.gguf").read_bytes()
    hub.add(REPO, {"Demo-Q8_0.gguf": data}, is_gated=True)
    with pytest.raises(HubError, match="terms have to be accepted"):
        download.pull("demo-1b:Q8_0", config.load(), known=known)
    hub.add("beta/Demo-GGUF", {"Other-Q8_0.gguf": data})
    notes: list[str] = []
    model = download.pull("demo-1b:Q8_0", config.load(), known=known, note=notes.append)
    assert (model.repo, notes) == (
        "beta/Demo-GGUF",
        [f"{REPO} wants its terms accepted. Taking it from beta/Demo-GGUF."],
    )
    upkeep.remove("demo-1b:Q8_0", config.load(), known)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert download.pull("demo-1b:Q8_0", config.load(), known=known).repo == REPO
