"""One answer as it grows: asked of the service, drawn at a bounded pace, ended in one last frame.
Pure but for the service; must not know gradio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from nemolocal.service import Service
from nemolocal.types import Delta, Finish, Started, StreamItem
from nemolocal.ui import status
from nemolocal.ui.conversation import Chat, messages, with_answer
from nemolocal.ui.options import Options, to_params
from nemolocal.ui.pace import in_batches
from nemolocal.ui.problems import as_problem
from nemolocal.ui.status import Meter
from nemolocal.ui.tabs import STOPPED

DRAW_EVERY_S = 0.05
"""The page is drawn at most this often, however fast tokens come."""
BEAT_S = 0.5
"""While nothing comes, the page is still told this often what is going on; a page that has gone away is
noticed by it too, since gradio looks only between two updates."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One state of the page while an answer is written. The last one has `is_last`."""

    chat: Chat
    meter: Meter
    waiting: str = ""
    problem: str = ""
    is_last: bool = False


class Answer:
    """An answer as it grows: the text so far and its figures."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.text = ""
        self.meter = Meter("waiting")
        self.finish: Finish | None = None
        self._clock = clock
        self._began_s = self._first_s = clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the question was sent."""
        return self._clock() - self._began_s

    def take(self, item: StreamItem, n_ctx: int) -> None:
        """Add what came from the model; `n_ctx` is its context in tokens."""
        if isinstance(item, Started):
            self.meter = Meter("reading", prompt_tokens=item.prompt_tokens, n_ctx=n_ctx)
        elif isinstance(item, Delta):
            if not self.text:
                self._first_s = self._clock()
            self.text += item.text
            n_new, writing_s = self.meter.new_tokens + item.n_tokens, self._clock() - self._first_s
            # The first token ends the reading; the ones after it are the writing.
            speed = (n_new - 1) / writing_s if writing_s > 0 else 0.0
            self.meter = replace(self.meter, phase="writing", new_tokens=n_new, tokens_per_s=speed)
        else:
            self.finish = item
            n_new, decode_s = item.usage.completion_tokens, item.timings.decode_s
            speed = n_new / decode_s if decode_s > 0 else 0.0
            n_cached = item.usage.cached_tokens
            self.meter = replace(self.meter, new_tokens=n_new, tokens_per_s=speed, cached_tokens=n_cached)

    def note(self, problem: str) -> str:
        """Why the answer is not whole, in a few words; "" when it is."""
        if problem:
            return "Not finished." if self.text else "No answer."
        if self.finish is None:
            return STOPPED
        if self.finish.reason == "stop":
            return ""
        used = self.meter.prompt_tokens + self.meter.new_tokens
        return "The context is full." if used >= self.meter.n_ctx else "Ended at the longest answer allowed."


async def answer(
    service: Service,
    chat: Chat,
    options: Options,
    *,
    ref: str | None,
    stop: asyncio.Event,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[Frame, None]:
    """Answer the last question of `chat` with the model `ref`. Never raises: a problem is in the last frame.

    Closing the generator closes the model's stream, and so does setting `stop`, after which the text so
    far stays.
    """
    growing, problem = Answer(clock), ""

    def frame() -> Frame:
        now = with_answer(chat, growing.text)
        waiting = status.waiting_for(service.status(), growing.meter, growing.elapsed_s)
        return Frame(now, growing.meter, waiting)

    yield frame()
    try:
        model = service.find_model(ref)
        stream = model.chat(messages(chat, options.system), to_params(options))
        paced = in_batches(stream, every_s=DRAW_EVERY_S, beat_s=BEAT_S, stop=stop)
        async with aclosing(paced) as batches:
            async for batch in batches:
                for item in batch:
                    growing.take(item, model.n_ctx)
                yield frame()
    except Exception as error:  # the page's border
        problem = as_problem(error)
    figures = status.figures(growing.meter)
    chat = with_answer(chat, growing.text, growing.note(problem), figures=figures)
    yield Frame(chat, replace(growing.meter, phase="idle"), problem=problem, is_last=True)
