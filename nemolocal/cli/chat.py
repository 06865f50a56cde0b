"""`nemolocal chat`: a conversation in the terminal, or one answer on stdout.

Answers go to stdout as plain text while they are written; everything else goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from nemolocal.cli import options, output
from nemolocal.config import Config
from nemolocal.errors import NemoLocalError, UsageError

if TYPE_CHECKING:
    from nemolocal.service import Service
    from nemolocal.types import Finish, GenerationParams, Message, TextModel

_HELP = """\
/system TEXT  set the system prompt and start over; /system alone shows it
/reset        forget the conversation
/quit         leave, as Ctrl-D does
Ctrl-C stops an answer. A text of several lines begins and ends with three double quotes."""

_COMMAND = re.compile(r"/(\w+)(?:\s+(.*))?", re.DOTALL)


@options.takes_settings(
    *options.LOADING, *options.PLANNING, *options.SAMPLING, *options.NETWORK, *options.MACHINE
)
def chat(
    config: Config,
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="The model; default: the configured one.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "-p", "--prompt", metavar="TEXT", help="Answer this once on stdout; - reads it from stdin."
        ),
    ] = None,
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="The system prompt.")] = "",
) -> None:
    """Chat with a model in the terminal."""
    from nemolocal.cli.hardware import tell_warnings
    from nemolocal.cli.pull import ensure_local
    from nemolocal.service import Service
    from nemolocal.types import GenerationParams

    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = sys.stdin.read()
    if prompt is not None and not prompt.strip():
        raise UsageError("The prompt is empty.", hint="Give the text after -p, or pipe it in.")
    tell_warnings(config)
    with asyncio.Runner() as runner:
        service = Service(config)
        try:
            model = ensure_local(service, ref)
            runner.run(_load(service, model.id))
            talk = Conversation(model, GenerationParams(service.sampling_defaults(model.id)), system)
            if prompt is not None:
                _end_answer(talk, runner.run(talk.ask(prompt, _write)), is_brief=True)
            else:
                _converse(runner, talk, service)
        finally:
            runner.run(service.close())


@dataclass
class Conversation:
    """A conversation with its history: each question is sent with all that was said before. `answer` is
    the last answer, as far as it has come."""

    model: TextModel
    params: GenerationParams
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    answer: str = ""

    async def ask(self, text: str, write: Callable[[str], None]) -> Finish:
        """Send one more message; the answer goes to `write` as it comes.

        Where the answer is broken off, what had come stays in the history; where nothing had come, the
        question is forgotten too, since templates want the turns to alternate.
        """
        from nemolocal.types import Delta, Finish, Message

        self.answer = ""
        self.turns.append(Message("user", text))
        head = [Message("system", self.system)] if self.system else []
        stream = self.model.chat([*head, *self.turns], self.params)
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    if isinstance(item, Delta):
                        self.answer += item.text
                        write(item.text)
                    elif isinstance(item, Finish):
                        return item
            raise AssertionError("a stream ended without its last item")
        finally:
            if self.answer:
                self.turns.append(Message("assistant", self.answer))
            else:
                self.turns.pop()


async def _load(service: Service, model_id: str) -> None:
    """Load the model, with a bar on stderr where a person is looking."""
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("Loading {task.description}"), BarColumn())
    console = output.console(sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task(model_id, total=1.0)
        loading = asyncio.ensure_future(service.load(model_id))
        try:
            while not loading.done():
                await asyncio.wait([loading], timeout=0.1)
                progress.update(bar, completed=service.status().progress)
        finally:
            loading.cancel()
    await loading


def _converse(runner: asyncio.Runner, talk: Conversation, service: Service) -> None:
    """The loop of questions and answers, until the person leaves."""
    status = service.status()
    output.note(
        f"{status.model} on {status.device}, context {status.n_ctx} tokens. /help lists the commands."
    )
    while True:
        try:
            text = _read_message()
        except EOFError:
            output.note("")
            return
        except KeyboardInterrupt:  # an unfinished line is dropped, as a shell does
            output.note("")
            continue
        if (command := _COMMAND.fullmatch(text)) is not None:
            if not _obey(talk, command[1], (command[2] or "").strip()):
                return
        elif text:
            _answer(runner, talk, text)


def _answer(runner: asyncio.Runner, talk: Conversation, text: str) -> None:
    try:
        _end_answer(talk, runner.run(talk.ask(text, _write)))
    except KeyboardInterrupt:
        output.note("\n(stopped)")
    except NemoLocalError as error:
        sys.stdout.flush()
        output.error(str(error))


def _read_message() -> str:
    """One line, or the lines between three double quotes."""
    with contextlib.suppress(ImportError):  # line editing; Windows' console has its own
        import readline  # noqa: F401

    fence = '"""'
    text = input(">>> ").strip()
    if not text.startswith(fence):
        return text
    text = text.removeprefix(fence)
    while fence not in text:
        text += "\n" + input("... ")
    return text.replace(fence, "", 1).strip()


def _obey(talk: Conversation, name: str, rest: str) -> bool:
    """Carry out a command of the conversation; false means leave."""
    match name:
        case "quit" | "exit" | "bye":
            return False
        case "help":
            output.note(_HELP)
        case "reset":
            talk.turns.clear()
            output.note("The conversation starts over.")
        case "system" if rest:
            talk.system = rest
            talk.turns.clear()
            output.note("The system prompt is set; the conversation starts over.")
        case "system":
            output.note(talk.system or "There is no system prompt.")
        case _:
            output.note(f"There is no command /{name}; /help lists them.")
    return True


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _end_answer(talk: Conversation, finish: Finish, *, is_brief: bool = False) -> None:
    """End the answer's last line, and say what a person should know of it."""
    if not talk.answer.endswith("\n"):
        _write("\n")
    n_tokens, seconds = finish.usage.completion_tokens, finish.timings.decode_s
    if finish.reason == "length":
        output.note(
            f"The answer was cut off after {n_tokens} tokens: the context is full. /reset empties it."
        )
    elif not is_brief and seconds > 0:
        output.note(f"({n_tokens} tokens, {n_tokens / seconds:.1f} a second)")
