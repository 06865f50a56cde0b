"""What commands show of the model hub, and what they say when it cannot be asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nemolocal import config
from nemolocal.models import catalog, store
from tests import fake_hub, synthetic
from tests.cli.conftest import Cli, is_one_error

REPO = "acme/Demo-GGUF"
DESK = '[[gpu]]\nname = "RTX 4090"\ntotal_bytes = 25757220864\n[ram]\ntotal_bytes = 68719476736\n'


@pytest.fixture
def demo(hub: fake_hub.FakeHub, tmp_path: Path) -> fake_hub.FakeHub:
    """A repository as they are: quantizations, one split, one that lacks a part, and what goes with them."""
    shape = replace(synthetic.TINY["llama"], n_ctx_train=8192)
    folder = tmp_path / "published"
    folder.mkdir()
    synthetic.write(folder / "Demo-UD-Q4_K_XL.gguf", shape, type_name="Q4_0")
    synthetic.write(folder / "Demo-Q8_0.gguf", shape, type_name="Q8_0")
    synthetic.write(folder / "Demo-BF16.gguf", shape, n_tensors_per_part=20)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if "BF16" not in path.name}
    files |= {f"BF16/{path.name}": path.read_bytes() for path in folder.glob("Demo-BF16-0*")}
    files |= {"Q6_K/Demo-00002-of-00002.gguf": b"half", "mmproj-F16.gguf": b"eyes", "imatrix.gguf": b"123"}
    hub.add(REPO, files)
    return hub


def test_show_a_repository(cli: Cli, demo: fake_hub.FakeHub) -> None:
    found = json.loads(cli("models", "show", f"hf:{REPO}", "--json").out)
    assert (found["architecture"], found["layers"], found["context"]) == ("llama", 4, 8192)
    rows = {row["ref"].rpartition(":")[2]: row for row in found["files"]}
    assert list(rows) == ["BF16", "Q8_0", "UD-Q4_K_XL", "Q6_K"]
    assert rows["BF16"]["parts"] > 1
    assert rows["BF16"]["bytes"] == sum(
        len(file.data) for name, file in demo.repos[REPO].files.items() if name.startswith("BF16/")
    )
    assert rows["Q6_K"]["problem"] == "Q6_K/Demo-00001-of-00002.gguf is missing"
    assert [(row["architecture"], row["layers"], row["context"]) for row in found["files"]] == [
        *[("llama", 4, 8192)] * 3,
        (None, None, None),
    ]
    assert [(row["ref"], row["kind"]) for row in found["companions"]] == [
        (f"hf:{REPO}:imatrix.gguf", "imatrix"),
        (f"hf:{REPO}:mmproj-F16.gguf", "projector"),
    ]
    shown = cli("models", "show", f"hf:{REPO}").out
    for words in ("llama", "8,192", "UD-Q4_K_XL", "is missing", "eyes or ears", f"pull hf:{REPO}"):
        assert words in shown
    assert not list(config.load().models_dir.rglob("*.gguf"))


def test_references_are_whole_in_a_narrow_window(
    cli: Cli, hub: fake_hub.FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    repo = "somebody-with-a-long-name/NVIDIA-Nemotron-3-Nano-30B-A3B-GGUF"
    quants = ("UD-Q4_K_XL", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS", "IQ3_XXS", "MXFP4_MOE", "BF16")
    hub.add(repo, {f"Nano-{quant}.gguf": b"1" for quant in quants}, is_gated=True)
    shown = cli("models", "search", "nano").out
    assert f"hf:{repo}\n" in shown
    assert all(quant in shown for quant in quants)
    assert "terms to be accepted" in " ".join(shown.split())
    assert max(len(line) for line in shown.splitlines() if not line.startswith("hf:")) <= 60
    listed = cli("models", "show", f"hf:{repo}").out
    assert {f" {quant} " in listed for quant in quants} == {True}


def test_show_what_cannot_be_loaded(cli: Cli, hub: fake_hub.FakeHub, tmp_path: Path) -> None:
    path = synthetic.write_tiny(tmp_path / "x.gguf", overrides={"general.architecture": "tomorrow"})
    hub.add(REPO, {"Demo-Q4_0.gguf": path.read_bytes()})
    result = cli("models", "show", f"hf:{REPO}")
    assert result.code == 0
    assert "tomorrow" in result.out


def test_show_again_without_a_network(cli: Cli, demo: fake_hub.FakeHub) -> None:
    first = json.loads(cli("models", "show", f"hf:{REPO}", "--json").out)
    demo.requests.clear()
    again = cli("models", "show", f"hf:{REPO}", "--json", "--offline")
    assert json.loads(again.out) == first
    assert "This is what acme/Demo-GGUF held on 20" in again.err
    assert demo.requests == []


def test_plan_and_pull_take_what_fits(cli: Cli, demo: fake_hub.FakeHub, tmp_path: Path) -> None:
    (tmp_path / "desk.toml").write_text(DESK)
    planned = json.loads(cli("plan", f"hf:{REPO}", "--hardware", tmp_path / "desk.toml", "--json").out)
    assert planned["file"].startswith(f"hf:{REPO}:Demo-")
    assert planned["fits"] is True
    pulled = cli("models", "pull", f"hf:{REPO}", "--hardware", tmp_path / "desk.toml", "--json")
    assert json.loads(pulled.out)["quant"] == planned["quant"]


# Is the catalogue still right? --------------------------------------------------------------------


def test_verify_online(cli: Cli, hub: fake_hub.FakeHub) -> None:
    model = next(model for model in catalog.load().models if model.id == "nemotron-3-nano-4b")
    row = model.files[0]
    name = row.names[0] if row.names else f"Demo-{row.quant}.gguf"
    hub.add(row.repo, {name: fake_hub.FakeFile(b"x", announced_bytes=row.bytes, is_lfs=False)})
    result = cli("models", "verify", model.id, "--online", "--json")
    rows = {row["ref"]: row for row in json.loads(result.out)}
    assert rows[f"{model.id}:{row.quant}"]["state"] == "ok"
    assert rows[f"{model.id}:{row.quant}"]["names"] == [name]
    assert "gone" in {row["state"] for row in rows.values()}
    assert result.code == 1
    shown = cli("models", "verify", model.id, "--online")
    assert "rows of the catalogue are as it says" in shown.out
    assert f"{model.id}:{row.quant} " not in shown.out
    assert is_one_error(cli("models", "verify", "./some.gguf", "--online"), 2)


# Without the hub ----------------------------------------------------------------------------------

ASKS_THE_HUB = (
    ("models", "search", "demo"),
    ("models", "show", "hf:acme/Unknown"),
    ("models", "pull", "hf:acme/Unknown:Q4_0"),
    ("models", "pull", "nemotron-3-nano-4b:Q4_K_M"),
    ("models", "verify", "--online"),
    ("plan", "hf:acme/Unknown"),
)


@pytest.mark.parametrize("command", ASKS_THE_HUB)
def test_what_needs_the_hub_is_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    result = cli(*command)
    assert is_one_error(result, 1), result
    assert "cannot be reached" in result.err
    assert "Models on this machine work without it" in result.err
    offline = cli(*command, "--offline")
    assert is_one_error(offline, 1), offline
    assert "is offline" in offline.err


def test_everything_else_works(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("nemolocal.models.hub._ask", fail)
    monkeypatch.setattr("nemolocal.models.streams.get", fail)
    here = store.target_path(config.load().models_dir, REPO, "Demo-Q8_0.gguf")
    here.parent.mkdir(parents=True)
    synthetic.write_tiny(here)
    (tmp_path / "desk.toml").write_text(DESK)
    for command in (
        ("models", "list"),
        ("models", "list", "--fit"),
        ("models", "show", "nemotron-3-nano-4b"),
        ("models", "show", str(here)),
        ("models", "pull", f"hf:{REPO}"),
        ("models", "verify"),
        ("plan", f"hf:{REPO}", "--ctx", "512"),
        ("plan", "nemotron-3-nano-4b", "--hardware", str(tmp_path / "desk.toml")),
        ("models", "rm", f"hf:{REPO}:Q8_0"),
    ):
        result = cli(*command)
        assert result.code == 0, (command, result.err)


def test_a_repository_that_is_not_there_is_told_from_a_hub_that_is_not(
    cli: Cli, hub: fake_hub.FakeHub
) -> None:
    result = cli("models", "show", "hf:acme/Nothing")
    assert is_one_error(result, 1)
    assert "no acme/Nothing, or it is private" in result.err
