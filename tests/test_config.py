"""Where settings come from, which one wins, and what is refused."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from nemolocal import config
from nemolocal.errors import ConfigError, UsageError


def write(home: Path, text: str) -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(text, encoding="utf-8")


def test_defaults(home: Path) -> None:
    loaded = config.load(env={"NEMOLOCAL_HOME": str(home)})
    assert loaded.settings == config.Settings()
    assert set(loaded.sources.values()) == {"default"}
    assert loaded.paths.data == home / "data"
    assert loaded.models_dir == home / "data" / "models"
    assert not home.exists()  # reading makes nothing


def test_the_last_source_wins(home: Path) -> None:
    write(home, 'port = 1\nctx = 1\nslots = 1\nhost = "::1"')
    env = {"NEMOLOCAL_HOME": str(home), "NEMOLOCAL_CTX": "2", "NEMOLOCAL_SLOTS": "2"}
    loaded = config.load({"slots": "3", "host": None}, env=env)
    chosen = loaded.settings
    assert (chosen.port, chosen.ctx, chosen.slots, chosen.host) == (1, 2, 3, "::1")
    assert [loaded.sources[n] for n in ("port", "ctx", "slots", "host", "kv")] == [
        "file",
        "env",
        "flag",
        "file",
        "default",
    ]


def test_each_kind_from_text_and_from_toml(home: Path) -> None:
    write(home, 'gpu = ["GPU-1", "GPU-2"]\noffline = true\ntemperature = 1\nkv = "q8_0"')
    env = {"NEMOLOCAL_HOME": str(home)}
    from_file = config.load(env=env).settings
    assert (from_file.gpu, from_file.offline, from_file.temperature) == (("GPU-1", "GPU-2"), True, 1.0)
    assert from_file.kv == "q8_0"
    env |= {"NEMOLOCAL_GPU": "0, 1,", "NEMOLOCAL_OFFLINE": "off", "NEMOLOCAL_TEMPERATURE": "0.5"}
    from_env = config.load(env=env).settings
    assert (from_env.gpu, from_env.offline, from_env.temperature) == (("0", "1"), False, 0.5)


def test_offline_follows_the_hub_library(home: Path) -> None:
    env = {"NEMOLOCAL_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    assert config.load(env=env).settings.offline
    assert not config.load(env=env | {"NEMOLOCAL_OFFLINE": "0"}).settings.offline


def test_empty_variables_count_as_unset(home: Path) -> None:
    loaded = config.load(env={"NEMOLOCAL_HOME": str(home), "NEMOLOCAL_PORT": ""})
    assert (loaded.settings.port, loaded.sources["port"]) == (config.DEFAULT_PORT, "default")


def test_cuda_visible_devices_is_kept_as_it_is(home: Path) -> None:
    env = {"NEMOLOCAL_HOME": str(home)}
    assert config.load(env=env).cuda_visible_devices is None
    assert config.load(env=env | {"CUDA_VISIBLE_DEVICES": ""}).cuda_visible_devices == ""


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("port", "abc", "'abc' is not a whole number"),
        ("port", "70000", "70000 is more than 65535"),
        ("port", "-1", "-1 is less than 0"),
        ("ctx", "-5", "-5 is less than 0"),
        ("ctx", "8k", "not a whole number"),
        ("gpu_layers", "-2", "less than -1"),
        ("queue", "0", "less than 1"),
        ("slots", "33", "33 is more than 32"),
        ("threads", "100000", "100000 is more than 512"),
        ("kv", "q2", "'q2' is not one of f16, q8_0, q4_0"),
        ("split", "row", "not one of auto, layer, tensor"),
        ("offline", "maybe", "'maybe' is not true or false"),
        ("temperature", "hot", "'hot' is not a number"),
        ("temperature", "nan", "'nan' is not a number"),
        ("temperature", "inf", "'inf' is not a number"),
        ("top_p", "1.5", "1.5 is more than 1"),
    ],
)
def test_wrong_values_name_their_source(home: Path, key: str, value: str, words: str) -> None:
    variable = f"NEMOLOCAL_{key.upper()}"
    env = {"NEMOLOCAL_HOME": str(home)}
    with pytest.raises(ConfigError) as caught:
        config.load(env=env | {variable: value})
    assert str(caught.value).startswith(f"{variable}: ")
    assert words in str(caught.value)
    with pytest.raises(ConfigError, match=f"--{key.replace('_', '-')}: "):
        config.load({key: value}, env=env)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "unknown key 'prot'. Known are host, port,"),
        ('port = "x"', "config.toml: port: 'x' is not a whole number"),
        ("port = 6366.5", "is not a whole number"),
        ("port = true", "is not a whole number"),
        ("host = 1", "is not text"),
        ("gpu = 0", "is not a list"),
        (f"temperature = 1{'0' * 400}", "is not a number"),
        ("port = ", "Cannot read"),
        ("host = '\udcff'", "Cannot read"),
    ],
)
def test_wrong_files(home: Path, text: str, words: str) -> None:
    home.mkdir()
    (home / "config.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        config.load(env={"NEMOLOCAL_HOME": str(home)})
    assert words in str(caught.value)
    assert "config.toml" in str(caught.value)


def test_debug_switch() -> None:
    assert [config.wants_debug({"NEMOLOCAL_DEBUG": v}) for v in ("", "0", "1", "yes")] == [
        False,
        False,
        True,
        True,
    ]
    assert not config.wants_debug({})


@pytest.mark.skipif(os.name == "nt", reason="Windows says that there is no such file")
def test_a_home_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Cannot read .*config.toml: .*NEMOLOCAL_HOME") as refused:
        config.load(env={"NEMOLOCAL_HOME": str(tmp_path / "file")})
    assert "Errno" not in str(refused.value)


def test_variables_that_are_no_settings_are_found() -> None:
    env = {
        "NEMOLOCAL_PROT": "1",
        "NEMOLOCAL_XYZZY": "",
        "NEMOLOCAL_PORT": "1",
        "NEMOLOCAL_HOME": "/x",
        "NEMOLOCAL_DEBUG": "1",
        "NEMO": "",
    }
    assert config.unknown_variables(env) == {"NEMOLOCAL_PROT": "NEMOLOCAL_PORT", "NEMOLOCAL_XYZZY": ""}
    assert (
        config.unknown_variables({"NEMOLOCAL_" + f.name.upper(): "" for f in fields(config.Settings)}) == {}
    )


def test_resources_are_found_in_a_clone() -> None:
    assert config.resource("models.toml").is_file()


def test_a_home_folder_that_nobody_has() -> None:
    with pytest.raises(UsageError, match="whole path"):
        _ = config.load({"models_dir": "~no-such-user/models"}).models_dir
    with pytest.raises(UsageError, match="whole path"):
        config.load(env={"NEMOLOCAL_HOME": "~no-such-user"})
