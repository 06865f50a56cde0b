"""What goes into a batch of inputs to embed: whole ones, everyone's in turn, long ones alone or in parts."""

from __future__ import annotations

import random

import pytest

from nemolocal.engine.packing import Item, Job, Packer


def job(id: int, *lengths: int) -> Job:
    """Inputs of these lengths; each token says where it stands."""
    return Job(id, [list(range(n)) for n in lengths])


def packer(*jobs: Job, n_slots: int = 4, n_packed: int = 10, n_batch: int = 20) -> Packer:
    made = Packer(n_slots=n_slots, n_packed=n_packed, n_batch=n_batch)
    for each in jobs:
        made.add(each)
    return made


def shown(items: list[Item]) -> list[tuple[int, int, int]]:
    """(request, input, tokens) of each row."""
    return [(item.job.id, item.index, len(item.row.tokens)) for item in items]


def drain(made: Packer) -> list[list[Item]]:
    batches = []
    while made.has_work:
        batches.append(made.next())
        assert len(batches) < 1000
    return batches


def test_whole_inputs_stand_side_by_side_up_to_the_limits() -> None:
    made = packer(job(1, 4, 4, 4, 1, 1, 1, 1, 1))
    assert shown(made.next()) == [(1, 0, 4), (1, 1, 4)]  # the third would be too much
    assert shown(made.next()) == [(1, 2, 4), (1, 3, 1), (1, 4, 1), (1, 5, 1)]  # no more than four at once
    assert shown(made.next()) == [(1, 6, 1), (1, 7, 1)]
    assert not made.has_work
    assert made.next() == []


def test_each_row_has_a_slot_of_its_own_and_begins_at_the_first_position() -> None:
    rows = [item.row for item in packer(job(1, 2, 3), job(2, 1)).next()]
    assert [(row.slot, row.start, row.tokens) for row in rows] == [
        (0, 0, [0, 1]),
        (1, 0, [0]),
        (2, 0, [0, 1, 2]),
    ]


def test_requests_take_turns_so_that_one_input_waits_for_no_thousand() -> None:
    made = packer(job(1, *[5] * 1000))
    made.next()
    made.add(job(2, 5))
    assert (2, 0, 5) in shown(made.next())


def test_an_input_above_the_useful_size_goes_alone() -> None:
    made = packer(job(1, 15, 3), job(2, 3))
    assert [shown(batch) for batch in drain(made)] == [[(1, 0, 15)], [(2, 0, 3), (1, 1, 3)]]


def test_small_inputs_of_others_never_keep_a_larger_one_out() -> None:
    made = packer(job(1, 9), job(2, *[4] * 50), job(3, *[4] * 50))
    made.next()
    made.add(job(4, 9))
    n_before = next(n for n in range(100) if (4, 0, 9) in shown(made.next()))
    assert n_before <= 2


def test_an_input_above_the_batch_is_read_in_parts_one_after_another() -> None:
    made = packer(job(1, 45), job(2, 1))
    parts = [made.next()[0] for _ in range(3)]
    assert [(part.row.start, len(part.row.tokens), part.is_last) for part in parts] == [
        (0, 20, False),
        (20, 20, False),
        (40, 5, True),
    ]
    assert [token for part in parts for token in part.row.tokens] == list(range(45))
    assert len({part.row.slot for part in parts}) == 1
    assert shown(made.next()) == [(2, 0, 1)]


def test_a_dropped_request_is_handed_out_no_more_not_even_the_rest_of_an_input() -> None:
    first, second = job(1, 45), job(2, 1, 1)
    made = packer(first, second)
    made.next()
    made.drop(first)
    assert shown(made.next()) == [(2, 0, 1), (2, 1, 1)]
    made.drop(second)
    assert not made.has_work


@pytest.mark.parametrize("seed", range(20))
def test_every_input_comes_once_and_whole_whatever_is_sent(seed: int) -> None:
    dice = random.Random(seed)
    jobs = [job(id, *(dice.randint(1, 45) for _ in range(dice.randint(1, 30)))) for id in range(8)]
    made = packer(*jobs[:4])
    seen: dict[tuple[int, int], list[int]] = {}
    waiting = jobs[4:]
    while made.has_work or waiting:
        if waiting and (not made.has_work or dice.random() < 0.2):
            made.add(waiting.pop())
        items = made.next()
        total = sum(len(item.row.tokens) for item in items)
        assert len(items) <= 4
        assert total <= 10 or len(items) == 1
        assert total <= 20
        assert len({item.row.slot for item in items}) == len(items)
        for item in items:
            so_far = seen.setdefault((item.job.id, item.index), [])
            assert item.row.start == len(so_far)
            so_far += item.row.tokens
            assert item.is_last == (len(so_far) == len(item.job.inputs[item.index]))
    assert seen == {(j.id, i): list(tokens) for j in jobs for i, tokens in enumerate(j.inputs)}
