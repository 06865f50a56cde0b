"""What is done with models beside the page: loads, unloads and deletions, each in a task of its own, so that
they go on when the page is closed, and whoever opens it again sees them. Knows neither gradio nor models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Literal

from nemolocal.ui.problems import as_problem

What = Literal["load", "unload", "delete"]


@dataclass(frozen=True, slots=True)
class Work:
    """What is being done with the model of a reference, which is called `name`; or why it was not, in one
    line."""

    what: What
    ref: str
    name: str = ""
    problem: str = ""


class Works:
    """All of them, by reference; one that went well is forgotten, one that did not is kept until it is
    cleared or tried again. To be used from one event loop."""

    def __init__(self) -> None:
        self._works: dict[str, Work] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds them weakly

    def all(self) -> tuple[Work, ...]:
        return tuple(self._works.values())

    def begin(self, work: Work, job: Callable[[], Awaitable[object]]) -> None:
        """Do it; nothing happens where something is being done with this model already."""
        before = self._works.get(work.ref)
        if before and not before.problem:
            return
        self._works[work.ref] = work
        task = asyncio.create_task(self._do(work, job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def clear(self, ref: str) -> None:
        """Forget why something was not done."""
        work = self._works.get(ref)
        if work and work.problem:
            del self._works[ref]

    async def _do(self, work: Work, job: Callable[[], Awaitable[object]]) -> None:
        try:
            await job()
        except Exception as error:  # the page's border
            self._works[work.ref] = replace(work, problem=as_problem(error))
        else:
            del self._works[work.ref]
