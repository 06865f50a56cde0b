"""`nemolocal config`: every setting, its value and where that comes from."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from nemolocal.cli import options, output
from nemolocal.config import PREFIX, Config

_MASK = "********"


@options.takes_settings(*options.ALL)
def config(config: Config, as_json: options.AsJson = False) -> None:
    """Show every setting with its value and where it comes from: default, file, env or flag."""
    values = {field.name: _value(config, field) for field in fields(config.settings)}
    if as_json:
        settings = {name: {"value": values[name], "source": config.sources[name]} for name in values}
        paths = {
            "config_file": config.paths.config_file,
            "data": config.paths.data,
            "cache": config.paths.cache,
            "logs": config.paths.logs,
            "models": config.models_dir,
        }
        output.print_json({"settings": settings, "paths": {key: str(path) for key, path in paths.items()}})
        return
    rows = output.table("Setting", "Value", "Source", "Variable")
    for name, value in values.items():
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        text = text.lower() if isinstance(value, bool) else text  # as one writes it
        rows.add_row(name, text, config.sources[name], PREFIX + name.upper())
    output.console().print(rows)
    for title, path in (
        ("Settings file", config.paths.config_file),
        ("Models", config.models_dir),
        ("Data", config.paths.data),
        ("Cache", config.paths.cache),
        ("Logs", config.paths.logs),
    ):
        print(f"{title:13}  {path}")


def _value(config: Config, field: Any) -> Any:
    value = getattr(config.settings, field.name)
    return _MASK if field.metadata["secret"] and value else value
