"""Packing layers onto cards: runs of neighbours, each into the room of one card.

Numbers alone: what a layer costs and how much room there is on a card is for placement.py to say.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

N_SEARCHED: Final = 8
"""Up to so many cards every order of them is considered; of more, the order given and that by room."""

_N_STEPS: Final = 24


class Runs:
    """The layers of a model in their order, of which the last ones are to be packed.

    Each card takes a run of neighbours, so it matters in which order the cards stand wherever layers are of
    unlike sizes: one that is too large for the next card's room sends all that follow it further on.
    """

    def __init__(self, costs: Sequence[int]) -> None:
        self._ends = [0, *accumulate(costs)]  # bytes of all layers before this one

    def needed_bytes(self, first: int) -> int:
        """Bytes of the layers from `first` on."""
        return self._ends[-1] - self._ends[first]

    def pack(
        self, first: int, rooms: Sequence[int], tiers: Sequence[int]
    ) -> tuple[tuple[int, int], ...] | None:
        """The layers from `first` on in these rooms, as (room, layers) in the order of the layers, or None
        where they do not fit. Rooms left empty are left out.

        The order given is kept where it does. Rooms of a lower tier are filled before those of a higher one
        are begun, all of one tier to the same share.
        """
        order = self._order(first, rooms)
        if order is None:
            return None
        ranks = sorted(set(tiers))
        places = [ranks.index(tiers[i]) for i in order]

        def filled(level: float) -> list[int] | None:
            """The runs with the rooms of tier t open to a share of `level` - t."""
            parts = [min(max(level - t, 0.0), 1.0) for t in places]
            return self._fill(first, [int(rooms[i] * part) for i, part in zip(order, parts, strict=True)])

        low, high = 0.0, float(len(ranks))
        counts = filled(high)
        for _ in range(_N_STEPS):
            middle = (low + high) / 2
            fewer = filled(middle)
            if fewer:
                counts, high = fewer, middle
            else:
                low = middle
        return tuple((i, n) for i, n in zip(order, counts or (), strict=True) if n)

    def _fill(self, first: int, rooms: Sequence[int]) -> list[int] | None:
        """Layers for each room, as many as it takes in turn; None where some are left."""
        counts, at = [], first
        for room in rooms:
            end = self._reach(at, room)
            counts.append(end - at)
            at = end
        return counts if at == len(self._ends) - 1 else None

    def _reach(self, at: int, room: int) -> int:
        """The first layer that no longer goes into a room whose run begins at `at`."""
        return max(bisect_right(self._ends, self._ends[at] + room) - 1, at)

    def _order(self, first: int, rooms: Sequence[int]) -> Sequence[int] | None:
        """An order of the rooms in which all layers go into them; the one given if it is one."""
        given = range(len(rooms))
        by_room = sorted(given, key=lambda i: (-rooms[i], i))
        for order in (given, by_room):
            if self._fill(first, [rooms[i] for i in order]):
                return order
        return self._searched(first, rooms) if len(rooms) <= N_SEARCHED else None

    def _searched(self, first: int, rooms: Sequence[int]) -> list[int] | None:
        """The same by going through all sets of rooms: how far a set reaches at best follows from how far it
        reaches without one of its rooms, as that one comes last."""
        n_sets = 1 << len(rooms)
        reach, last = [first] * n_sets, [-1] * n_sets
        for chosen in range(1, n_sets):
            for i, room in enumerate(rooms):
                if chosen >> i & 1:
                    end = self._reach(reach[chosen ^ (1 << i)], room)
                    if last[chosen] < 0 or end > reach[chosen]:
                        reach[chosen], last[chosen] = end, i
        if reach[-1] < len(self._ends) - 1:
            return None
        order, chosen = [], n_sets - 1
        while chosen:
            order.append(last[chosen])
            chosen ^= 1 << last[chosen]
        return order[::-1]
