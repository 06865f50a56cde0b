"""Flags made from the settings: their names, kinds and help texts are written once, in config.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from nemolocal import log
from nemolocal.cli import output
from nemolocal.config import Settings, load, unknown_variables

NETWORK = ("offline",)
MACHINE = ("hardware", "models_dir", "log_level")
LOADING = ("ctx", "slots", "kv", "kv_layout", "ubatch", "gpu", "split", "gpu_layers", "aim", "lora", "draft")
PLANNING = ("threads", "margin_mib", "state_mib", "warm_cache_mib")
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
LISTENING = ("host", "port", "api_key", "allow_origin", "queue")
STAYING = ("keep_alive_s", "max_models", "watchdog_s")
ALL = tuple(field.name for field in fields(Settings))

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.", metavar="")]

_METAVARS = {
    "host": "HOST",
    "port": "PORT",
    "api_key": "KEY",
    "allow_origin": "ORIGIN,…",
    "model": "REF",
    "models_dir": "DIR",
    "hardware": "FILE",
    "gpu": "UUID|INDEX,…",
    "lora": "FILE[:SCALE],…",
    "draft": "REF|ngram|off",
}
_PANELS = (
    ("Loading the model", (*LOADING, *PLANNING, *STAYING)),
    ("Sampling", SAMPLING),
    ("Listening", LISTENING),
    ("This machine", (*NETWORK, *MACHINE)),
)


def takes_settings(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command a flag for each of these settings.

    The command's first parameter is then the Config that results from them; it also starts the log.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def run(**given: Any) -> Any:
            flags = {name: _joined(given.pop(name)) for name in names}
            # A switch that is not there says nothing; a file or a variable may have turned it on.
            config = load({name: value for name, value in flags.items() if value is not False})
            _tell_unknown_variables()
            log.start(config.paths.logs, config.settings.log_level)
            return command(config, **given)

        hints = get_type_hints(command, include_extras=True)
        own = list(inspect.signature(command).parameters.values())[1:]
        parameters = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in own]
        parameters += [_flag(name) for name in names]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _flag(name: str) -> inspect.Parameter:
    setting = next(field for field in fields(Settings) if field.name == name)
    is_switch = isinstance(setting.default, bool)
    choices = setting.metadata["choices"]
    metavar = "|".join(choices) if choices else _METAVARS.get(name, "N")
    text = setting.metadata["help"]
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=f"{text[0].upper()}{text[1:]}.{_default_words(setting)}",
        metavar="" if is_switch else metavar,
        show_default=False,
        rich_help_panel=next((panel for panel, names in _PANELS if name in names), None),
    )
    # Values are taken as text: the settings' own checks say what is wrong, wherever a value came from.
    one: Any = list[str] if isinstance(setting.default, tuple) else str
    kind: Any = bool if is_switch else one | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if is_switch else None,
        annotation=Annotated[kind, option],
    )


def _default_words(setting: Any) -> str:
    """What holds where nothing is set, for settings that do not say it themselves."""
    default = setting.default
    is_told = isinstance(default, bool) or default in ("", (), 0, -1, "auto")
    if is_told or "without it" in setting.metadata["help"]:
        return ""
    return f" Default: {default:g}." if isinstance(default, float) else f" Default: {default}."


def _tell_unknown_variables() -> None:
    unknown = unknown_variables()
    if not unknown:
        return
    meant = ", ".join(name for name in unknown.values() if name)
    hint = f"did you mean {meant}?" if meant else "`nemolocal config` lists the settings."
    is_one = len(unknown) == 1
    output.note(
        f"warning: {', '.join(unknown)} {'is no setting and is' if is_one else 'are no settings and are'} "
        f"ignored; {hint}"
    )


def _joined(given: Any) -> Any:
    """A flag that takes a list may be given several times; none of them is lost."""
    if isinstance(given, list):
        return ",".join(given) if given else None
    return given
