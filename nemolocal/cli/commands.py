"""The tree of commands. Each noun has its own file; what they need is imported when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from nemolocal.cli import ask, bench, chat, config, hardware, models, plan, serve, summarize, ui

app = typer.Typer(
    help="Run NVIDIA Nemotron models, and any other GGUF chat model, on this machine. "
    "Without a command it opens the app, as `nemolocal ui` does.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from nemolocal import __version__

        print(f"nemolocal {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", metavar="", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None: ...


app.command("ui")(ui.ui)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.add_typer(models.app, name="models")
app.command("plan")(plan.plan)
app.command("ask")(ask.ask)
app.command("summarize")(summarize.summarize)
app.command("bench")(bench.bench)
app.command("hardware")(hardware.hardware)
app.command("config")(config.config)
