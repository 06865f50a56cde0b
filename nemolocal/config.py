"""Settings and folders: the only reader of environment variables, configuration files and OS paths.

Each setting comes from its default, then `config.toml`, then its `NEMOLOCAL_…` variable, then its flag;
the last one given wins, and `Config.sources` says which it was. Knows nothing of models or servers.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import platformdirs

from nemolocal.errors import ConfigError, UsageError

APP = "nemolocal"
PREFIX = "NEMOLOCAL_"
_FOREIGN = ("NEMOLOCAL_HOME", "NEMOLOCAL_DEBUG", "NEMOLOCAL_TEST_")  # no settings, but read by others
DEFAULT_PORT = 6366


@dataclass(frozen=True, slots=True)
class Paths:
    """The folders that NemoLocal writes to, each made on first use."""

    data: Path
    cache: Path
    config: Path
    logs: Path

    @property
    def config_file(self) -> Path:
        return self.config / "config.toml"


def _setting(
    default: Any,
    help_: str,
    *,
    secret: bool = False,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    metadata = {"help": help_, "secret": secret, "choices": choices, "least": least, "most": most}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting. The field's name is the key in config.toml; the variable is NEMOLOCAL_ and the name
    in capitals; the flag is the name with dashes."""

    host: str = _setting("127.0.0.1", "address to listen on; anything but loopback needs an API key")
    port: int = _setting(DEFAULT_PORT, "port to listen on; 0 takes any free one", least=0, most=65535)
    api_key: str = _setting("", "key that clients must send", secret=True)
    allow_origin: tuple[str, ...] = _setting((), "web origins or host names that may call the port")
    model: str = _setting("", "model that is used when a request or command names none")
    models_dir: str = _setting("", "folder of model files (default: models, below the data folder)")
    offline: bool = _setting(False, "make no network call at all")
    hardware: str = _setting("", "hardware profile (TOML) in place of detection")
    ctx: int = _setting(0, "context in tokens; 0 lets the plan choose", least=0)
    slots: int = _setting(0, "answers written at the same time; 0 lets the plan choose", least=0, most=32)
    kv: str = _setting(
        "f16",
        "type of the KV cache; without it f16, or what the plan has to take",
        choices=("f16", "q8_0", "q4_0"),
    )
    kv_layout: str = _setting(
        "auto", "whether slots share the context or have one each", choices=("auto", "shared", "split")
    )
    ubatch: int = _setting(0, "prompt tokens computed at a time; 0 lets the plan choose", least=0, most=4096)
    gpu: tuple[str, ...] = _setting((), "GPUs to use, by UUID or index; empty means all")
    split: str = _setting("auto", "how layers are split over GPUs", choices=("auto", "layer", "tensor"))
    aim: str = _setting(
        "balanced",
        "what a plan prefers: balanced, quality or speed",
        choices=("balanced", "quality", "speed"),
    )
    gpu_layers: int = _setting(-1, "layers on the GPUs; -1 lets the plan choose", least=-1)
    lora: tuple[str, ...] = _setting((), "LoRA adapters to load with a model, PATH or PATH:SCALE")
    draft: str = _setting(
        "ngram", "what guesses tokens ahead: ngram (the text itself), off, or a small model"
    )
    state_mib: int = _setting(
        4096, "MiB of RAM for the states of conversations that do not run; 0 keeps none", least=0
    )
    threads: int = _setting(0, "CPU threads; 0 means the physical cores", least=0, most=512)
    margin_mib: int = _setting(1024, "MiB that a plan leaves free on each GPU", least=0)
    warm_cache_mib: int = _setting(
        20480,
        "MiB on disk for what models have read, so that it outlives a restart; 0 keeps nothing",
        least=0,
    )
    queue: int = _setting(512, "requests that may wait for a slot before new ones get 429", least=1)
    keep_alive_s: float = _setting(
        900.0, "seconds that an idle model stays loaded; -1 means always", least=-1
    )
    max_models: int = _setting(0, "models loaded at the same time; 0 means as many as fit", least=0)
    watchdog_s: float = _setting(
        120.0, "seconds without a sign of life after which an engine is ended; 0: never", least=0
    )
    temperature: float = _setting(
        0.8,
        "sampling temperature where a request names none; without it what the model's makers advise, or 0.8",
        least=0,
    )
    top_p: float = _setting(
        0.95,
        "nucleus sampling where a request names none; without it what the model's makers advise, or 0.95",
        least=0,
        most=1,
    )
    top_k: int = _setting(40, "top-k sampling where a request names none", least=0)
    min_p: float = _setting(0.05, "min-p sampling where a request names none", least=0, most=1)
    log_level: str = _setting("info", "detail of the log file", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, slots=True)
class Config:
    """The effective settings, where each came from, and the folders.

    `sources` maps a setting's name to "default", "file", "env" or "flag", and for a single model also to what
    else has set it (`with_values`). `cuda_visible_devices` is the user's CUDA_VISIBLE_DEVICES, None when
    unset, and `cuda_device_order` CUDA_DEVICE_ORDER. `hub_endpoint` is HF_ENDPOINT, the address of the model
    hub, "" for the public one.
    """

    settings: Settings
    sources: Mapping[str, str]
    paths: Paths
    cuda_visible_devices: str | None = None
    cuda_device_order: str = ""
    hub_endpoint: str = ""

    @property
    def models_dir(self) -> Path:
        chosen = self.settings.models_dir
        return expand(chosen) if chosen else self.paths.data / "models"


def load(flags: Mapping[str, Any] | None = None, *, env: Mapping[str, str] | None = None) -> Config:
    """Read the configuration.

    `flags` holds settings given on the command line; None values are treated as not given.
    Raises ConfigError for unknown keys and for values of the wrong type, naming the source.
    """
    environment = os.environ if env is None else env
    paths = find_paths(environment)
    known = {f.name: f for f in fields(Settings)}
    values: dict[str, Any] = {}
    sources = dict.fromkeys(known, "default")

    def take(name: str, raw: Any, source: str, where: str) -> None:
        values[name] = _convert(known[name], raw, where)
        sources[name] = source

    for key, raw in _read_file(paths.config_file).items():
        if key not in known:
            raise ConfigError(
                f"{paths.config_file} has an unknown key '{key}'.",
                hint=f"Known are {', '.join(known)}.",
            )
        take(key, raw, "file", f"{paths.config_file}: {key}")
    if environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        take("offline", True, "env", "HF_HUB_OFFLINE")
    for name in known:
        variable = PREFIX + name.upper()
        if environment.get(variable, "") != "":
            take(name, environment[variable], "env", variable)
    for name, raw in (flags or {}).items():
        if raw is not None:
            take(name, raw, "flag", f"--{name.replace('_', '-')}")
    return Config(
        settings=Settings(**values),
        sources=sources,
        paths=paths,
        cuda_visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
        cuda_device_order=environment.get("CUDA_DEVICE_ORDER", ""),
        hub_endpoint=environment.get("HF_ENDPOINT", "").strip().rstrip("/"),
    )


def wants_debug(env: Mapping[str, str] | None = None) -> bool:
    """Whether NEMOLOCAL_DEBUG asks for tracebacks. No setting: it must work where the settings do not."""
    return (os.environ if env is None else env).get(PREFIX + "DEBUG", "") not in ("", "0")


def unknown_variables(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that look like settings and are none, each with the one that may be meant, "" where none is
    near."""
    known = [PREFIX + f.name.upper() for f in fields(Settings)]
    found = {}
    for name in sorted(os.environ if env is None else env):
        if not name.startswith(PREFIX) or name in known or name.startswith(_FOREIGN):
            continue
        found[name] = next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.85)), "")
    return found


def find_paths(env: Mapping[str, str]) -> Paths:
    """The folders: all below NEMOLOCAL_HOME where it is set, else where the system keeps such things."""
    home = env.get(PREFIX + "HOME")
    if home:
        root = expand(home).absolute()
        return Paths(data=root / "data", cache=root / "cache", config=root, logs=root / "logs")
    dirs = platformdirs.PlatformDirs(APP, appauthor=False)
    return Paths(
        data=dirs.user_data_path,
        cache=dirs.user_cache_path,
        config=dirs.user_config_path,
        logs=dirs.user_log_path,
    )


def with_values(config: Config, values: Mapping[str, Any], *, source: str, where: str) -> Config:
    """The configuration with other values for some settings, which then come from `source`; `where` names it
    in errors. Raises ConfigError for an unknown key or a value of the wrong type."""
    known = {f.name: f for f in fields(Settings)}
    for key in values:
        if key not in known:
            raise ConfigError(f"{where} has an unknown key '{key}'.", hint=f"Known are {', '.join(known)}.")
    converted = {key: _convert(known[key], raw, f"{where}: {key}") for key, raw in values.items()}
    return replace(
        config,
        settings=replace(config.settings, **converted),
        sources={**config.sources, **dict.fromkeys(converted, source)},
    )


def expand(path: str | Path) -> Path:
    """The path with `~` or `~user` at its beginning as that home folder. Raises UsageError for a user whom
    the system does not know."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(
            f"'{path}' begins with a home folder that is not known.", hint="Write the whole path."
        ) from None


def resource(name: str) -> Path:
    """A file that ships with the package: beside the modules in a wheel, at the top of a clone."""
    package = Path(__file__).parent
    installed = package / name
    return installed if installed.exists() else package.parent / name


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.", hint="Check NEMOLOCAL_HOME.") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"Cannot read {path}: {error}.", hint="Mend or remove the file.") from None


def _convert(setting: Any, raw: Any, where: str) -> Any:
    """Turn a value from TOML, the environment or a flag into the setting's own type."""
    kind = type(setting.default)
    choices = setting.metadata["choices"]
    try:
        value = _parse(kind, raw)
    except (TypeError, ValueError, OverflowError):
        names = {
            bool: "true or false",
            int: "a whole number",
            float: "a number",
            tuple: "a list",
            str: "text",
        }
        raise ConfigError(f"{where}: {raw!r} is not {names[kind]}.") from None
    if choices and value not in choices:
        raise ConfigError(f"{where}: {value!r} is not one of {', '.join(choices)}.")
    _check_range(value, setting.metadata["least"], setting.metadata["most"], where)
    return value


def _check_range(value: Any, least: float | None, most: float | None, where: str) -> None:
    """Both ends belong to the range."""
    if least is not None and value < least:
        raise ConfigError(f"{where}: {value} is less than {least}.")
    if most is not None and value > most:
        raise ConfigError(f"{where}: {value} is more than {most}.")


_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _parse(kind: type, raw: Any) -> Any:
    """Raises ValueError or TypeError when `raw` is not of this kind."""
    if kind is tuple:
        items = raw.split(",") if isinstance(raw, str) else list(raw)
        return tuple(str(item).strip() for item in items if str(item).strip())
    if kind is bool and isinstance(raw, str):
        if raw.lower() not in _BOOLEANS:
            raise ValueError(raw)
        return _BOOLEANS[raw.lower()]
    if isinstance(raw, str) and kind is int:
        return int(raw)
    if kind is float and (isinstance(raw, str) or type(raw) in (int, float)):
        number = float(raw)
        if not math.isfinite(number):
            raise ValueError(raw)
        return number
    if type(raw) is not kind:
        raise TypeError(raw)
    return raw
