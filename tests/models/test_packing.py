"""Layers go onto cards as runs of neighbours: wherever a way exists it is found, the order given is kept
where it can be, and faster cards are filled first."""

from __future__ import annotations

import itertools
import random

from nemolocal.models.packing import Runs


def fits(costs: list[int], rooms: list[int]) -> bool:
    """Whether the layers go into the rooms in any order, by trying them all."""
    for order in itertools.permutations(rooms):
        at = 0
        for room in order:
            left = room
            while at < len(costs) and costs[at] <= left:
                left -= costs[at]
                at += 1
        if at == len(costs):
            return True
    return False


def test_a_way_is_found_wherever_there_is_one() -> None:
    rng = random.Random(1)
    n_found = 0
    for _ in range(300):
        costs = [rng.choice([1, 2, 3, 20]) for _ in range(rng.randint(4, 12))]
        rooms = [rng.randint(5, 45) for _ in range(rng.randint(1, 5))]
        packed = Runs(costs).pack(0, rooms, [0] * len(rooms))
        assert (packed is not None) == fits(costs, rooms)
        if packed is None:
            continue
        n_found += 1
        assert sum(n for _, n in packed) == len(costs)
        assert len({i for i, _ in packed}) == len(packed)
        at = 0
        for i, n in packed:
            assert sum(costs[at : at + n]) <= rooms[i]
            at += n
    assert 50 < n_found < 290


def test_only_the_last_layers_are_packed_where_the_first_stay_behind() -> None:
    runs = Runs([100, 1, 1, 1, 1])
    assert runs.needed_bytes(1) == 4
    assert runs.pack(1, [2, 2], [0, 0]) == ((0, 2), (1, 2))
    assert runs.pack(0, [2, 2], [0, 0]) is None


def test_the_order_given_is_kept_and_rooms_are_filled_alike() -> None:
    assert Runs([1] * 12).pack(0, [10, 20], [0, 0]) == ((0, 4), (1, 8))
    assert Runs([20, *[1] * 8]).pack(0, [10, 25], [0, 0]) == (
        (1, 1),
        (0, 8),
    )  # the first layer needs the second


def test_faster_cards_are_filled_before_slower_ones_are_begun() -> None:
    assert Runs([1] * 12).pack(0, [10, 10], [1, 0]) == ((0, 2), (1, 10))
    assert Runs([1] * 8).pack(0, [10, 10], [1, 0]) == ((1, 8),)


def test_layers_without_bytes_cost_no_room() -> None:
    """Blocks for multi-token prediction are numbered but not loaded."""
    assert Runs([3, 3, 0, 0, 3]).pack(0, [6, 3], [0, 0]) == ((0, 4), (1, 1))
