"""Load settings that are kept for one model: what they hold, and what is stronger than they are."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from nemolocal import config, database, load_settings
from nemolocal.errors import ConfigError

REF = "nano:Q4_K_M"


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("nemolocal")
    before, logger.propagate = logger.propagate, True
    yield caplog
    logger.propagate = before


def store(text: str) -> None:
    with database.session(config.load()) as connection:
        connection.execute("INSERT OR REPLACE INTO load_settings VALUES (?, ?)", (REF, text))


def test_what_is_put_is_found_until_it_is_forgotten() -> None:
    settings = config.load()
    values = {"ctx": 8192, "kv": "q8_0", "gpu": ("GPU-1", "GPU-2"), "lora": ["a.gguf:0.5"], "slots": None}
    load_settings.put(REF, values, settings)
    kept = {"ctx": 8192, "kv": "q8_0", "gpu": ("GPU-1", "GPU-2"), "lora": ("a.gguf:0.5",)}
    assert load_settings.get(REF, settings) == kept
    assert load_settings.get("nano:Q8_0", settings) == {}
    load_settings.put(REF, {"slots": "2"}, settings)
    assert load_settings.get(REF, settings) == {"slots": 2}
    load_settings.forget(REF, settings)
    assert load_settings.get(REF, settings) == {}


@pytest.mark.parametrize(
    "values", [{"ctx": -1}, {"ctx": "many"}, {"kv": "f32"}, {"slots": True}, {"port": 80}, {"cxt": 1}]
)
def test_what_is_no_load_setting_is_refused_and_nothing_changes(values: dict[str, Any]) -> None:
    settings = config.load()
    load_settings.put(REF, {"ctx": 4096}, settings)
    with pytest.raises(ConfigError, match=REF):
        load_settings.put(REF, values, settings)
    assert load_settings.get(REF, settings) == {"ctx": 4096}


def test_flag_and_environment_are_stronger_and_file_and_default_weaker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NEMOLOCAL_KV", "q4_0")
    path = config.load().paths.config_file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('aim = "quality"\nslots = 8\n', encoding="utf-8")
    settings = config.load({"ctx": 2048})
    load_settings.put(REF, {"ctx": 8192, "kv": "q8_0", "aim": "speed", "gpu_layers": 3}, settings)
    applied = load_settings.applied(settings, [REF])
    found = applied.settings
    assert (found.ctx, found.kv, found.aim, found.gpu_layers, found.slots) == (2048, "q4_0", "speed", 3, 8)
    sources = {name: applied.sources[name] for name in ("ctx", "kv", "aim", "gpu_layers", "slots")}
    assert sources == {"ctx": "flag", "kv": "env", "aim": "model", "gpu_layers": "model", "slots": "file"}
    assert settings.settings.aim == "quality"


def test_the_first_reference_that_has_any_decides() -> None:
    settings = config.load()
    load_settings.put("nano", {"ctx": 8192, "slots": 2}, settings)
    assert load_settings.applied(settings, [REF, "nano"]).settings.ctx == 8192
    load_settings.put(REF, {"ctx": 4096}, settings)
    applied = load_settings.applied(settings, [REF, "nano"]).settings
    assert (applied.ctx, applied.slots) == (4096, 0)
    assert load_settings.applied(settings, ["other"]) is settings


def test_stored_values_that_cannot_be_used_are_logged_and_left_out(heard: pytest.LogCaptureFixture) -> None:
    store(json.dumps({"ctx": 4096, "kv": "f99", "wings": 2, "slots": [1]}))
    assert load_settings.get(REF, config.load()) == {"ctx": 4096}
    assert load_settings.applied(config.load(), [REF]).settings.ctx == 4096
    assert all(word in heard.text for word in ("'f99'", "'wings'", "slots"))


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_stored_text_that_is_no_object_is_logged_and_left_out(
    text: str, heard: pytest.LogCaptureFixture
) -> None:
    store(text)
    assert load_settings.get(REF, config.load()) == {}
    assert f"kept for {REF} cannot be read" in heard.text


def test_a_database_that_cannot_be_read_is_logged_and_stops_nothing(heard: pytest.LogCaptureFixture) -> None:
    settings = config.load()
    settings.paths.data.mkdir(parents=True)
    (settings.paths.data / database.FILE).write_bytes(b"nonsense" * 100)
    assert load_settings.applied(settings, [REF]) is settings
    assert "cannot be used" in heard.text


def test_what_is_kept_for_a_model_holds_for_its_files_and_in_any_case() -> None:
    settings = config.load()
    load_settings.put("Nano", {"ctx": 8192}, settings)
    for refs in (["nano"], ["NANO:q4_k_m"], ["other", "nano:Q8_0"]):
        assert load_settings.applied(settings, refs).settings.ctx == 8192
    load_settings.put("nano:Q4_K_M", {"ctx": 4096}, settings)
    assert load_settings.applied(settings, ["nano:q4_k_m"]).settings.ctx == 4096
    assert load_settings.applied(settings, ["nano:Q8_0"]).settings.ctx == 8192
    load_settings.put("nano", {"ctx": 2048}, settings)
    assert load_settings.applied(settings, ["Nano"]).settings.ctx == 2048
    load_settings.forget("NANO", settings)
    assert load_settings.applied(settings, ["nano", "nano:Q8_0"]).settings.ctx == 0
