"""`nemolocal config`: every value and its source, and no secret."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from nemolocal.config import Settings
from tests.cli.conftest import Cli


def test_values_and_sources(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    (home / "config.toml").write_text('ctx = 4096\ngpu = ["GPU-1"]')
    monkeypatch.setenv("NEMOLOCAL_SLOTS", "4")
    found = json.loads(cli("config", "--port", "7000", "--offline", "--json").out)
    settings = found["settings"]
    assert set(settings) == {field.name for field in fields(Settings)}
    assert settings["ctx"] == {"value": 4096, "source": "file"}
    assert settings["gpu"] == {"value": ["GPU-1"], "source": "file"}
    assert settings["slots"] == {"value": 4, "source": "env"}
    assert settings["port"] == {"value": 7000, "source": "flag"}
    assert settings["offline"] == {"value": True, "source": "flag"}
    assert settings["kv"] == {"value": "f16", "source": "default"}
    assert found["paths"]["config_file"] == str(home / "config.toml")
    assert found["paths"]["models"] == str(home / "data" / "models")


def test_a_switch_that_is_not_given_leaves_the_environment_alone(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMOLOCAL_OFFLINE", "1")
    found = json.loads(cli("config", "--json").out)["settings"]["offline"]
    assert found == {"value": True, "source": "env"}


def test_a_list_may_be_given_in_one_flag_or_in_several(cli: Cli) -> None:
    given = ("--lora", "a.gguf,b.gguf:0.5", "--lora", "c.gguf", "--gpu", "1")
    settings = json.loads(cli("config", *given, "--json").out)["settings"]
    assert settings["lora"] == {"value": ["a.gguf", "b.gguf:0.5", "c.gguf"], "source": "flag"}
    assert settings["gpu"] == {"value": ["1"], "source": "flag"}
    assert settings["allow_origin"]["source"] == "default"


def test_secrets_are_masked(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMOLOCAL_API_KEY", "sesame-4711")
    table, data = cli("config"), cli("config", "--json")
    assert "sesame" not in table.out + table.err + data.out + data.err
    assert json.loads(data.out)["settings"]["api_key"] == {"value": "********", "source": "env"}


def test_table(cli: Cli, home: Path) -> None:
    result = cli("config", "--host", "[::1]")
    assert (result.code, result.err) == (0, "")
    rows = {line.split()[0]: line.split() for line in result.out.splitlines() if line.strip()}
    assert rows["host"] == ["host", "[::1]", "flag", "NEMOLOCAL_HOST"]
    assert rows["kv"] == ["kv", "f16", "default", "NEMOLOCAL_KV"]
    assert str(home / "config.toml") in result.out


def test_a_variable_that_is_no_setting_is_told_in_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMOLOCAL_PROT", "7000")
    result = cli("config", "--json")
    assert (result.code, len(result.err.splitlines())) == (0, 1)
    assert "NEMOLOCAL_PROT" in result.err
    assert "NEMOLOCAL_PORT?" in result.err
    assert json.loads(result.out)["settings"]["port"]["source"] == "default"
    monkeypatch.setenv("NEMOLOCAL_NONSENSE", "1")
    assert len(cli("config").err.splitlines()) == 1
