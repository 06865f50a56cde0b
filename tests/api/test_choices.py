"""Generations side by side: their start, what is waiting, and that closing leaves none running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from nemolocal.api.choices import N_WAITING, Choices
from nemolocal.errors import EngineDiedError
from nemolocal.types import Delta, Finish, GenerationParams, Started, StreamItem
from tests.fakes import FakeTextModel

pytestmark = pytest.mark.anyio


def choices(model: FakeTextModel, n: int) -> Choices:
    return Choices([model.complete("one", GenerationParams()) for _ in range(n)])


async def test_closing_ends_generations_wherever_they_are() -> None:
    full = FakeTextModel(["x"] * 10 * N_WAITING)  # waits until somebody takes what it gave
    busy = FakeTextModel(["x"])
    busy.delay_s = 30.0
    loading = FakeTextModel(["x"])
    loading.accept_delay_s = 30.0
    for model, is_started in ((full, True), (busy, True), (loading, False)):
        running = choices(model, 3)
        start = asyncio.create_task(running.start())
        await asyncio.sleep(0.01)
        assert start.done() == is_started
        await running.close()
        assert model.n_closed_early == 3
        start.cancel()


async def test_items_that_come_before_the_last_start_are_kept() -> None:
    quick, slow = FakeTextModel(["a", "b"]), FakeTextModel(["c"])
    slow.accept_delay_s = 0.02
    both = Choices([model.complete("one", GenerationParams()) for model in (quick, slow)])
    answers = await both.collect()
    assert [answer.text for answer in answers] == ["ab", "c"]


async def test_nothing_within_the_time_is_an_empty_list() -> None:
    model = FakeTextModel(["a"])
    model.read_delay_s = 0.05
    one = choices(model, 1)
    await one.start()
    assert await one.take(0.001) == []
    items: list[tuple[int, StreamItem]] = []
    while not items or not isinstance(items[-1][1], Finish):
        items += await one.take(1.0)
    assert items[0] == (0, Delta("a"))
    await one.close()


async def test_a_stream_without_its_last_item_is_a_fault() -> None:
    async def broken() -> AsyncIterator[StreamItem]:
        yield Started(1)
        yield Delta("a")

    with pytest.raises(RuntimeError, match="without its last item"):
        await Choices([broken()]).collect()


async def test_what_came_before_a_failure_is_handed_out_first() -> None:
    async def broken() -> AsyncIterator[StreamItem]:
        yield Started(1)
        yield Delta("a")
        yield Delta("b")
        raise EngineDiedError("The engine's process ended.")

    one = Choices([broken()])
    await one.start()
    await asyncio.sleep(0.01)  # all of it waits, as for a slow client
    assert await one.take(1.0) == [(0, Delta("a")), (0, Delta("b"))]
    with pytest.raises(EngineDiedError):
        await one.take(1.0)
    await one.close()
