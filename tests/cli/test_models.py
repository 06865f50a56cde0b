"""`nemolocal models …`, over a fake hub and small files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from nemolocal import config
from nemolocal.cli import pull
from nemolocal.errors import ModelNotFoundError
from nemolocal.models import catalog, reference, store
from nemolocal.models.reference import NamedRef
from nemolocal.service import Service
from tests import fake_hub, synthetic
from tests.cli.conftest import Cli, is_one_error

REPO = "acme/Tiny-GGUF"


@pytest.fixture
def models_dir() -> Path:
    return config.load().models_dir


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return synthetic.write_tiny(tmp_path / "Tiny-Q8_0.gguf")


@pytest.fixture
def published(hub: fake_hub.FakeHub, tiny: Path) -> fake_hub.FakeHub:
    """A hub that has one model in two files."""
    data = tiny.read_bytes()
    hub.add(REPO, {"Tiny-Q8_0.gguf": data, "Tiny-Q4_K_M.gguf": data + bytes(32), "README.md": b"# Tiny"})
    return hub


# Listing ----------------------------------------------------------------------------------------


def test_list_of_a_bare_machine(cli: Cli) -> None:
    found = json.loads(cli("models", "list", "--json").out)
    assert {"id", "name", "files"} <= set(found[0])
    assert all({"quant", "bytes", "state"} <= set(file) for model in found for file in model["files"])
    assert {file["state"] for model in found for file in model["files"]} == {"remote"}
    shown = cli("models", "list")
    assert "nemotron-3-nano-4b" in shown.out
    assert "On this machine" not in shown.out
    assert "nemolocal models pull starter" in shown.err


@pytest.mark.parametrize("flags", [(), ("--fit",)])
@pytest.mark.parametrize("width", [50, 80])
def test_list_in_a_narrow_window_keeps_the_ids_whole(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, width: int, flags: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = cli("models", "list", *flags).out
    assert max(map(len, shown.splitlines())) <= width
    assert {model.id for model in catalog.load().models} <= set(shown.split())


def test_list_by_what_a_model_is_for_and_by_family(cli: Cli) -> None:
    found = json.loads(cli("models", "list", "--tag", "embedding", "--json").out)
    assert found
    assert all("embedding" in model["tags"] for model in found)
    both = ("models", "list", "--tag", "reasoning", "--family", "nemotron-3")
    ids = {model["id"] for model in json.loads(cli(*both, "--json").out)}
    assert "nemotron-3-nano-4b" in ids
    assert not any(model_id.startswith("qwen") for model_id in ids)
    assert ids <= set(cli(*both).out.split())
    for flag, value, known in (("--tag", "poetry", "reasoning"), ("--family", "nemo", "nemotron-3")):
        refused = cli("models", "list", flag, value)
        assert refused.code == 2
        assert value in refused.err
        assert known in refused.err


def test_list_shows_what_is_here_and_what_is_broken(cli: Cli, models_dir: Path, tiny: Path) -> None:
    models_dir.mkdir(parents=True)
    (models_dir / "good-Q8_0.gguf").write_bytes(tiny.read_bytes())
    (models_dir / "text.gguf").write_text("This is a text file that someone gave the wrong name.")
    shown = cli("models", "list")
    rows = {line.split()[0]: line for line in shown.out.splitlines() if line.strip()}
    assert "ready" in rows["good-Q8_0"]
    assert "unusable: " in rows["text"]
    data = {model["id"]: model["files"][0] for model in json.loads(cli("models", "list", "--json").out)}
    assert data["good-Q8_0"]["state"] == "local"
    assert data["good-Q8_0"]["problem"] is None
    assert data["text"]["problem"]


def test_list_with_fit(cli: Cli, models_dir: Path, tiny: Path, tmp_path: Path) -> None:
    models_dir.mkdir(parents=True)
    (models_dir / "own.gguf").write_bytes(tiny.read_bytes())
    (models_dir / "text.gguf").write_text("This is a text file that someone gave the wrong name.")
    card = f'[[gpu]]\nname = "RTX 4060"\ntotal_bytes = {8 << 30}\n'
    rest = f"[ram]\ntotal_bytes = {16 << 30}\n[cpu]\nphysical_cores = 8\n"
    (tmp_path / "desk.toml").write_text(card + rest)
    flags = ("models", "list", "--fit", "--hardware", tmp_path / "desk.toml")
    found = {model["id"]: model for model in json.loads(cli(*flags, "--json").out)}
    fits = {model_id: model.get("fit") for model_id, model in found.items()}
    assert fits["nemotron-3-nano-4b"]["grade"] == "green"
    assert fits["nemotron-3-nano-4b"]["quant"] in {f["quant"] for f in found["nemotron-3-nano-4b"]["files"]}
    assert fits["nemotron-3-super-120b-a12b"]["grade"] == "red"
    assert fits["nemotron-3-super-120b-a12b"]["quant"] is None
    assert fits["own"]["grade"] == "green"
    assert fits["text"] is None
    assert all(fit["why"] for fit in fits.values() if fit)
    rows = {line.split()[0]: line for line in cli(*flags).out.splitlines() if line.strip()}
    assert "Q5_K_M, 128k" in rows["nemotron-3-nano-4b"]
    assert "does not fit" in rows["nemotron-3-super-120b-a12b"]
    (tmp_path / "desk.toml").write_text(rest)
    found = {model["id"]: model for model in json.loads(cli(*flags, "--json").out)}
    assert found["nemotron-3-nano-4b"]["fit"]["grade"] == "amber"


def test_list_with_fit_of_a_broken_file_and_of_a_wish_that_not_every_model_can_meet(
    cli: Cli, models_dir: Path, tmp_path: Path
) -> None:
    (row,) = catalog.load().models[0].files
    broken = store.target_path(models_dir, row.repo, row.names[0])
    broken.parent.mkdir(parents=True)
    broken.write_text("<html></html>")
    cards = f'[[gpu]]\nname = "RTX 4090"\ntotal_bytes = {24 << 30}\n' * 2
    (tmp_path / "desk.toml").write_text(f"{cards}[ram]\ntotal_bytes = {16 << 30}\n")
    config.load().paths.config_file.write_text('split = "tensor"\n')  # hybrids cannot be split so
    flags = ("models", "list", "--fit", "--hardware", tmp_path / "desk.toml")
    fits = {model["id"]: model.get("fit") for model in json.loads(cli(*flags, "--json").out)}
    assert fits[catalog.STARTER] is None
    assert fits["llama-3.1-nemotron-nano-8b"]["grade"] == "green"
    assert fits["nemotron-3-nano-4b"]["grade"] == "red"
    assert "--split layer" in fits["nemotron-3-nano-4b"]["why"]
    rows = {line.split()[0]: line for line in cli(*flags).out.splitlines() if line.strip()}
    assert "unusable" in rows[catalog.STARTER]
    assert pull.fitting("nemotron-3-nano-4b", config.load({"hardware": str(tmp_path / "desk.toml")}))


def test_search(cli: Cli, published: fake_hub.FakeHub) -> None:
    found = json.loads(cli("models", "search", "tiny", "--json").out)
    assert found == [
        {
            "ref": f"hf:{REPO}",
            "downloads": 5,
            "likes": 1,
            "gated": False,
            "updated": "2026-08-03",
            "quants": ["Q4_K_M", "Q8_0"],
        }
    ]
    assert f"hf:{REPO}" in cli("models", "search", "tiny").out
    nothing = cli("models", "search", "zzz")
    assert (nothing.code, nothing.out) == (0, "")
    assert "no GGUF models" in nothing.err


def test_offline_asks_nobody(cli: Cli, published: fake_hub.FakeHub) -> None:
    for command in (["search", "tiny"], ["show", f"hf:{REPO}"], ["pull", f"hf:{REPO}"]):
        result = cli("models", *command, "--offline")
        assert is_one_error(result, 1), result
        assert "offline" in result.err
    assert published.requests == []


# Showing ----------------------------------------------------------------------------------------


def test_show_a_model_of_the_catalogue(cli: Cli) -> None:
    found = json.loads(cli("models", "show", "nemotron-3-nano-4b", "--json").out)
    assert found["id"] == "nemotron-3-nano-4b"
    assert found["context"] == 262144
    assert "Q4_K_M" in {file["quant"] for file in found["files"]}
    shown = cli("models", "show", "Nemotron-3-Nano-4B:q4_k_m").out
    assert "262,144" in shown
    assert "Q8_0" not in shown


def test_show_a_file(cli: Cli, tiny: Path) -> None:
    found = json.loads(cli("models", "show", tiny, "--json").out)
    assert (found["architecture"], found["context"], found["layers"]) == ("llama", 1024, 4)
    assert found["has_chat_template"] is True
    assert [file["path"] for file in found["files"]] == [str(tiny)]
    assert "Has chat template  yes" in cli("models", "show", tiny).out


def test_show_a_repository(cli: Cli, published: fake_hub.FakeHub) -> None:
    found = json.loads(cli("models", "show", f"hf:{REPO}", "--json").out)
    assert (found["id"], found["licence"], found["gated"]) == (f"hf:{REPO}", "mit", False)
    assert [(f["ref"], f["state"]) for f in found["files"]] == [
        (f"hf:{REPO}:Q4_K_M", "remote"),
        (f"hf:{REPO}:Q8_0", "remote"),
    ]


@pytest.mark.parametrize(
    ("ref", "code", "words"),
    [
        ("nemotron-3-nano-4c", 1, "Did you mean nemotron-3-nano-4b"),
        ("nemotron-3-nano-4b:Q9", 1, "no Q9"),
        ("https://example.org/x.gguf", 2, "web address"),
        ("hf:acme", 2, "names no repository"),
        ("./model.bin", 2, "does not end in .gguf"),
        ("/no/such.gguf", 1, "/no/such.gguf"),
    ],
)
def test_wrong_references(cli: Cli, ref: str, code: int, words: str) -> None:
    result = cli("models", "show", ref)
    assert is_one_error(result, code), result
    assert words in result.err


def test_text_file_with_a_models_name(cli: Cli, tmp_path: Path) -> None:
    fake = tmp_path / "notes.gguf"
    fake.write_text("Not a model, but a text of some length.")
    for command in (["models", "show"], ["models", "import"], ["chat", "-p", "Hi"]):
        result = cli(*command, fake)
        assert is_one_error(result, 1), result
        assert "notes.gguf" in result.err


# Fetching ---------------------------------------------------------------------------------------


def test_pull_verify_rm(cli: Cli, published: fake_hub.FakeHub, models_dir: Path) -> None:
    ref = f"hf:{REPO}:Q8_0"
    pulled = cli("models", "pull", ref)
    assert pulled.code == 0
    target = models_dir / REPO / "Tiny-Q8_0.gguf"
    assert pulled.out == f"{ref} is ready: {target}\n"
    assert f"Fetching {ref}: " in pulled.err
    assert json.loads(cli("models", "pull", ref, "--json").out)["path"] == str(target)
    states = {
        f["ref"]: f["state"] for f in json.loads(cli("models", "show", f"hf:{REPO}", "--json").out)["files"]
    }
    assert states == {f"hf:{REPO}:Q4_K_M": "remote", ref: "local"}

    assert [file["state"] for file in json.loads(cli("models", "verify", "--json").out)] == ["ok"]
    target.write_bytes(target.read_bytes()[:-1] + b"\x01")
    damaged = cli("models", "verify", ref)
    assert (damaged.code, "DAMAGED" in damaged.out) == (1, True)

    removed = cli("models", "rm", ref, "--json")
    assert removed.code == 0
    assert str(target) in json.loads(removed.out)["files"]
    assert not target.exists()
    assert is_one_error(cli("models", "rm", ref), 1)


TERMS = "nemotron-3-nano-4b:Q4_K_M"


@pytest.fixture
def with_terms(hub: fake_hub.FakeHub, tiny: Path) -> fake_hub.FakeHub:
    """A hub that has a model whose licence has to be accepted."""
    row = catalog.load().find(NamedRef("nemotron-3-nano-4b", "Q4_K_M"))[1]
    assert row
    hub.add(row.repo, {row.names[0]: tiny.read_bytes()})
    return hub


def test_a_licence_is_asked_about_at_a_terminal(
    cli: Cli, with_terms: fake_hub.FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, questions = [False, True], []

    def confirm(text: str, **options: object) -> bool:
        questions.append(text)
        return answers.pop(0)

    monkeypatch.setattr(pull, "_can_ask", lambda: True)
    monkeypatch.setattr(typer, "confirm", confirm)
    refused = cli("models", "pull", TERMS)
    assert is_one_error(refused, 2), refused
    assert "was not accepted" in refused.err
    assert with_terms.transfers() == []
    assert cli("models", "pull", TERMS).code == 0
    assert all("NVIDIA" in question and with_terms.url in question for question in questions)
    assert cli("models", "pull", TERMS).code == 0  # it is here
    assert len(questions) == 2
    assert cli("models", "rm", TERMS).code == 0
    assert cli("models", "pull", TERMS, "--accept-licence").code == 0
    assert cli("models", "rm", TERMS).code == 0
    assert cli("models", "pull", TERMS, "--json").code == 0
    assert len(questions) == 2  # nor is a program asked


def test_a_path_is_not_pulled(cli: Cli) -> None:
    result = cli("models", "pull", "mine.gguf")
    assert is_one_error(result, 2), result
    assert "nemolocal models import" in result.err


def test_a_script_is_told_of_the_licence_and_goes_on(cli: Cli, with_terms: fake_hub.FakeHub) -> None:
    pulled = cli("models", "pull", "hf:unsloth/NVIDIA-Nemotron-3-Nano-4B-GGUF:Q4_K_M", "--json")
    assert pulled.code == 0
    assert "is to accept its licence: NVIDIA" in pulled.err
    assert json.loads(pulled.out)["quant"] == "Q4_K_M"
    assert "licence" not in cli("models", "pull", TERMS).err


def test_pull_that_breaks_off_and_goes_on(cli: Cli, published: fake_hub.FakeHub, tiny: Path) -> None:
    ref = f"hf:{REPO}:Q8_0"
    published.status = 503
    broken = cli("models", "pull", ref)
    assert is_one_error(broken, 1), broken
    published.status = 0
    assert cli("models", "pull", ref).code == 0


def test_ctrl_c_during_a_pull_says_how_to_go_on(
    cli: Cli, published: fake_hub.FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pull._Lines, "advance", interrupt)
    result = cli("models", "pull", f"hf:{REPO}:Q8_0")
    assert (result.code, result.out) == (130, "")
    assert f"nemolocal models pull hf:{REPO}:Q8_0" in result.err


def test_import_and_forget(cli: Cli, tiny: Path) -> None:
    assert cli("models", "import", tiny).out == f"Tiny-Q8_0 is ready: {tiny}\n"
    assert "Tiny-Q8_0" in cli("models", "list").out
    assert "its file stays" in cli("models", "rm", "Tiny-Q8_0").out
    assert tiny.exists()


def test_nothing_to_verify(cli: Cli) -> None:
    result = cli("models", "verify")
    assert (result.code, result.out, result.err) == (0, "", "There is no model on this machine.\n")


# The offer --------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions that were put to the person at the terminal, who says yes."""
    questions: list[str] = []

    def confirm(text: str, **options: object) -> bool:
        questions.append(text)
        return True

    monkeypatch.setattr(pull, "_can_ask", lambda: True)
    monkeypatch.setattr(typer, "confirm", confirm)
    return questions


def test_a_model_that_can_be_had_is_offered(asked: list[str], published: fake_hub.FakeHub) -> None:
    service = Service(config.load())
    ref = f"hf:{REPO}:Q8_0"
    assert pull.ensure_local(service, ref).id == ref
    (question,) = asked
    assert ref in question
    assert "kB" in question
    assert store.find(reference.parse(ref), service.config)


def test_the_offer_names_what_will_be_fetched(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that fits this machine, and no other."""
    (tmp_path / "desk.toml").write_text(f'[[gpu]]\nname = "RTX 4090"\ntotal_bytes = {24 << 30}\n')
    monkeypatch.setenv("NEMOLOCAL_HARDWARE", str(tmp_path / "desk.toml"))
    fetched: list[str] = []
    monkeypatch.setattr(pull, "fetch", lambda ref, config: fetched.append(ref))
    with pytest.raises(ModelNotFoundError):  # nothing was really fetched
        pull.ensure_local(Service(config.load()), "nemotron-3-nano-4b")
    assert fetched[0] in asked[0]
    assert "That accepts its licence: NVIDIA" in asked[0]
    assert fetched != ["nemotron-3-nano-4b:Q4_K_M"]  # what is usual where no plan is made


def test_no_is_respected(
    asked: list[str], published: fake_hub.FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typer, "confirm", lambda text, **options: False)
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        pull.ensure_local(Service(config.load()), f"hf:{REPO}:Q8_0")
    assert published.transfers() == []


@pytest.mark.parametrize(
    ("ref", "offered"),
    [
        (None, "starter"),
        ("nemotron-3-nano-4b:Q8_0", "nemotron-3-nano-4b:Q8_0"),
        ("hf:acme/Other", "hf:acme/Other"),
        ("no-such-model", ""),
        ("./missing.gguf", ""),
    ],
)
def test_what_is_offered(ref: str | None, offered: str) -> None:
    assert pull._to_offer(config.load(), ref) == offered
    assert pull._to_offer(config.load({"offline": True}), ref) == ""


def test_the_starter_is_not_offered_where_there_is_a_model(models_dir: Path) -> None:
    models_dir.mkdir(parents=True)
    synthetic.write_tiny(models_dir / "own.gguf")
    assert pull._to_offer(config.load(), None) == ""
