"""Summaries that are made beside the page: each in a task of its own, so that it goes on when the page is
closed, until it is done or stopped. Knows neither gradio nor how they are shown."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nemolocal.documents.library import Row
from nemolocal.documents.summarise import Options, Progress
from nemolocal.errors import NemoLocalError
from nemolocal.papers import Papers
from nemolocal.ui.problems import as_problem
from nemolocal.ui.rooms import Room, Summing


class Summaries:
    """Those of all tabs, one a tab at a time. To be used from one event loop."""

    def __init__(self, papers: Papers) -> None:
        self.papers = papers
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds them weakly

    def begin(self, room: Room, rows: Sequence[Row], options: Options, ref: str | None) -> None:
        """Summarise each of the documents, and all of them together where they are several. Nothing happens
        while the tab has a summary that is being made."""
        if room.summing and room.summing.state == "running":
            return
        summing = Summing(tuple((row.id, row.name) for row in rows), options)
        room.summing = summing
        room.touch("summary")
        task = asyncio.create_task(self._run(room, summing, ref))
        summing.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self, room: Room) -> None:
        """End it; what is done of it stays, and a later one goes on from there."""
        summing = room.summing
        if summing is None or summing.task is None or summing.state != "running":
            return
        summing.task.cancel()
        await asyncio.gather(summing.task, return_exceptions=True)
        # One that had not begun never ran, so it could not say so itself.
        _end(room, summing, "stopped")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, room: Room, summing: Summing, ref: str | None) -> None:
        def on_progress(progress: Progress) -> None:
            summing.progress = progress
            room.touch("summary")

        try:
            for id, name in summing.documents:
                summing.progress = None
                room.touch("summary")
                try:
                    made = await self.papers.summarise(
                        id, ref=ref, options=summing.options, on_progress=on_progress
                    )
                except NemoLocalError as error:
                    summing.lost.append(f"{name}: {as_problem(error)}")
                else:
                    summing.made.append((id, made))
            if len(summing.made) > 1:
                summing.is_joining = True
                room.touch("summary")
                made_of = [each for _, each in summing.made]
                summing.overall = await self.papers.overall(made_of, ref=ref, options=summing.options)
        except asyncio.CancelledError:
            _end(room, summing, "stopped")
            raise
        except Exception as error:  # the page's border
            summing.problem = as_problem(error)
            _end(room, summing, "failed")
        else:
            _end(room, summing, "done" if summing.made else "failed")


def _end(room: Room, summing: Summing, state: str) -> None:
    if summing.state == "running":
        summing.state = state  # type: ignore[assignment]
        summing.is_joining = False
        room.touch("summary")
