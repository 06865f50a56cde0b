"""Which inputs go into the next batch of a model that embeds or ranks: whole ones, side by side, a few of
each request in turn, so that a thousand documents hold up no query. Pure: knows no clock, pipe or model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from nemolocal.engine.backend import Row


@dataclass(slots=True, eq=False)
class Job:
    """The inputs of one request in tokens, how many of them have been given out, and what came of each."""

    id: int
    inputs: Sequence[Sequence[int]]
    n_given: int = 0
    results: dict[int, bytes] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.inputs))

    @property
    def is_given_out(self) -> bool:
        return self.n_given == len(self.inputs)

    @property
    def is_done(self) -> bool:
        return len(self.results) == len(self.inputs)


@dataclass(slots=True)
class Item:
    """A row of a batch and the input that it is of; `is_last` says that the input ends with it."""

    job: Job
    index: int
    row: Row
    is_last: bool = True


class Packer:
    """Hands out batches of at most `n_slots` inputs and `n_packed` tokens. An input that is longer goes
    alone, and one of more than `n_batch` tokens in parts, one batch after another."""

    def __init__(self, *, n_slots: int, n_packed: int, n_batch: int) -> None:
        self._n_slots = n_slots
        self._n_packed = min(n_packed, n_batch)
        self._n_batch = n_batch
        self._turns: deque[Job] = deque()
        self._rest: Item | None = None  # of an input that is read in parts

    @property
    def has_work(self) -> bool:
        return bool(self._turns) or self._rest is not None

    def add(self, job: Job) -> None:
        """Give `job`, which has at least one input, its turn after the others."""
        self._turns.append(job)

    def drop(self, job: Job) -> None:
        """Hand out nothing more of it."""
        if job in self._turns:
            self._turns.remove(job)
        if self._rest and self._rest.job is job:
            self._rest = None

    def next(self) -> list[Item]:
        """The next batch, empty when there is nothing left."""
        if self._rest:
            rest, self._rest = self._rest, None
            return [self._in_parts(rest)]
        items: list[Item] = []
        n_left = self._n_packed
        n_passed = 0  # jobs one after another whose next input has no room in this batch
        first_passed: Job | None = None
        while self._turns and n_passed < len(self._turns) and len(items) < self._n_slots:
            job = self._turns[0]
            tokens = job.inputs[job.n_given]
            if items and len(tokens) > n_left:
                n_passed += 1
                first_passed = first_passed or job
                self._turns.rotate(-1)
                continue
            n_passed = 0
            n_left -= len(tokens)
            items.append(Item(job, job.n_given, Row(len(items), 0, list(tokens))))
            job.n_given += 1
            self._turns.rotate(-1)
            if job.is_given_out:
                self._turns.pop()
        if first_passed:  # the next batch begins with it, so that small inputs of others never keep it out
            self._turns.rotate(-self._turns.index(first_passed))
        if len(items) == 1:
            items = [self._in_parts(items[0])]
        return items

    def _in_parts(self, item: Item) -> Item:
        """The first part of what is left of an input; the rest is for the next batch."""
        row = item.row
        if len(row.tokens) <= self._n_batch:
            return item
        part, rest = row.tokens[: self._n_batch], row.tokens[self._n_batch :]
        self._rest = Item(item.job, item.index, Row(row.slot, row.start + len(part), rest))
        return Item(item.job, item.index, Row(row.slot, row.start, part), is_last=False)
