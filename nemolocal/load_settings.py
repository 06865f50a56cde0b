"""Load settings that a person keeps for one model: what it is loaded with, whoever asks for it.

They stand above the defaults and `config.toml`, and below the environment and flags. Knows neither models nor
how they are loaded; a model is the text by which it is kept.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from nemolocal import config as settings
from nemolocal import database
from nemolocal.config import Config
from nemolocal.errors import ConfigError, DatabaseError

log = logging.getLogger(__name__)

KEPT: Final = (
    "ctx",
    "slots",
    "kv",
    "kv_layout",
    "ubatch",
    "gpu",
    "split",
    "aim",
    "gpu_layers",
    "lora",
    "draft",
    "margin_mib",
)
"""The settings that can be kept for a model."""

SOURCE: Final = "model"
"""Where such a value comes from, in `Config.sources`."""

_WEAKER: Final = ("default", "file")

Kept = Mapping[str, Mapping[str, Any]]


def kept(config: Config) -> Kept:
    """What is kept for each model, in the settings' own types, by its reference in small letters. A value
    that cannot be used is logged and left out, and so is all of it where the database cannot be read."""
    try:
        with database.reading(config) as connection:
            rows = connection.execute("SELECT ref, settings_json FROM load_settings").fetchall()
    except DatabaseError as error:
        log.warning("the load settings kept for models are left out: %s", error)
        return {}
    return {ref.casefold(): _usable(ref, text, config) for ref, text in rows}


def get(ref: str, config: Config) -> dict[str, Any]:
    """What is kept for the model of this reference; {} where nothing is."""
    return dict(kept(config).get(ref.casefold(), {}))


def put(ref: str, values: Mapping[str, Any], config: Config) -> None:
    """Keep these values, and no others, for the model of this reference. A None stands for a value that is
    not kept. Raises ConfigError for values that cannot be kept, DatabaseError when they were not."""
    given = {key: value for key, value in values.items() if value is not None}
    where = f"The load settings of {ref}"
    for key in given:
        if key not in KEPT:
            raise ConfigError(f"{where} cannot hold '{key}'.", hint=f"They can hold {', '.join(KEPT)}.")
    checked = settings.with_values(config, given, source=SOURCE, where=where).settings
    text = json.dumps({key: getattr(checked, key) for key in given})
    with database.session(config) as connection:
        _forget(ref, connection)
        connection.execute("INSERT INTO load_settings VALUES (?, ?)", (ref, text))


def forget(ref: str, config: Config) -> None:
    """Keep nothing for this model any more. Raises DatabaseError."""
    with database.session(config) as connection:
        _forget(ref, connection)


def _forget(ref: str, connection: sqlite3.Connection) -> None:
    kept_as = [row[0] for row in connection.execute("SELECT ref FROM load_settings")]
    same = [(each,) for each in kept_as if each.casefold() == ref.casefold()]
    connection.executemany("DELETE FROM load_settings WHERE ref = ?", same)


def applied(config: Config, refs: Iterable[str], among: Kept | None = None) -> Config:
    """The configuration for the model that goes by these references, with what is kept for the first of them
    that has anything; what is kept for a model holds for each of its files (ID:QUANT), too. What a flag, the
    environment or the page says for this once is stronger. `among` is what `kept` said a moment ago."""
    found = kept(config) if among is None else among
    for name in (name for ref in refs for name in _names(ref)):
        if values := found.get(name.casefold()):
            weaker = {key: value for key, value in values.items() if config.sources[key] in _WEAKER}
            return settings.with_values(config, weaker, source=SOURCE, where=f"The load settings of {name}")
    return config


def _names(ref: str) -> tuple[str, ...]:
    """A reference, and without its quantization or file."""
    model, colon, _ = ref.rpartition(":")
    return (ref, model) if colon else (ref,)


def _usable(ref: str, text: str, config: Config) -> dict[str, Any]:
    """The values of a stored text that are what they should be."""
    stored: Any = None
    with suppress(ValueError):
        stored = json.loads(text)
    if not isinstance(stored, dict):
        log.warning("the load settings kept for %s cannot be read and are left out", ref)
        return {}
    found = {}
    for key, value in stored.items():
        if key not in KEPT:
            log.warning("'%s' among the load settings kept for %s is not known and is left out", key, ref)
            continue
        try:
            one = settings.with_values(config, {key: value}, source=SOURCE, where=f"Kept for {ref}")
        except ConfigError as error:
            log.warning("a load setting is left out: %s", error)
            continue
        found[key] = getattr(one.settings, key)
    return found
