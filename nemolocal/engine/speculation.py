"""Guessing ahead: several tokens of an answer are guessed, computed in one step and kept as far as the model
says the same. What comes out is what would have come out one by one; only the number of steps changes.

Guesses come from the text itself (what followed the same words before: quotes, code, lists) or from a small
model of the same vocabulary. Whether they pay is measured while running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from nemolocal.engine.backend import Backend, Batch, CacheFullError, Row, Sampler
from nemolocal.engine.prefixes import n_common
from nemolocal.errors import EngineError
from nemolocal.types import SamplingParams

N_GRAMS = (8, 5)
"""Tokens that must have occurred before, the longer run looked up first. Shorter ones recur in any text, and
a wrong guess costs a step of another shape, which a GPU pays for twice."""
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
HOPE = 0.7  # share of right guesses that is assumed before any was made
SMOOTHING = 0.15
EXPERIENCE = 0.05  # what one guess of any text changes in the hope for the next one
N_BETWEEN_TRIES = 32  # steps without guesses before some are tried again; doubled each time they were wrong
N_BETWEEN_TRIES_MOST = 1024
N_TRIED = 4
N_READ = 128  # tokens of a text that a small model reads within one step: everyone's streams wait for it

StepCost = Callable[[int], float]
"""Seconds of a step that computes this many rows; only ratios count."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A sequence that could use guesses: its slot, its tokens so far, and how many guesses at most."""

    id: int
    slot: int
    tokens: Sequence[int]
    n_most: int


class Drafter(Protocol):
    """Where guesses come from. `is_free` says that making them costs next to nothing, so that how many are
    worth computing is asked afterwards."""

    is_free: bool

    def draft(self, wishes: Sequence[Wish]) -> dict[int, list[int]]:
        """Guesses by sequence id; none where there is nothing to go by."""

    def forget(self, id: int) -> None:
        """The sequence has ended."""

    def close(self) -> None:
        """Free what it holds."""


class Experience:
    """How often guesses were right of late, over all texts: what a new one may hope for."""

    def __init__(self) -> None:
        self.share = HOPE

    def observe(self, is_right: bool) -> None:
        self.share += EXPERIENCE * (float(is_right) - self.share)


class Watch:
    """How often the guesses of one sequence were right, and so how many are worth computing.

    With a share p of right guesses, d guesses give 1 + p + p² + … + p^d tokens on average for the price of
    1 + d rows.
    """

    def __init__(self, experience: Experience) -> None:
        self._experience = experience
        self.share = experience.share
        self._n_held_back = 0
        self._n_between = N_BETWEEN_TRIES

    def n_worthwhile(self, n_most: int, n_rows: int, cost: StepCost) -> int:
        """How many guesses to compute, `n_most` at most, in a step that has `n_rows` rows without them, one
        of each running sequence."""
        best, best_rate = 0, n_rows / cost(n_rows)
        expected, power, length = float(n_rows), 1.0, 0
        for d in LENGTHS:
            if d > n_most:
                break
            while length < d:
                power *= self.share
                expected += power
                length += 1
            rate = expected / cost(n_rows + d)
            if rate > best_rate:
                best, best_rate = d, rate
        if best == 0:
            self._n_held_back += 1
            if self._n_held_back >= self._n_between:
                self._n_held_back = 0
                return min(n_most, N_TRIED)
        return best

    def observe(self, n_guessed: int, n_right: int) -> None:
        """Learn from one step: each right guess counts as one trial, and the first wrong one too."""
        for index in range(min(n_right + 1, n_guessed)):
            self.share += SMOOTHING * (float(index < n_right) - self.share)
            self._experience.observe(index < n_right)
        if n_right:
            self._n_between = N_BETWEEN_TRIES
        else:
            self._n_between = min(2 * self._n_between, N_BETWEEN_TRIES_MOST)


class Speculation:
    """Guesses for the running sequences, as many as pay."""

    def __init__(self, drafter: Drafter, step_cost: StepCost) -> None:
        self._drafter = drafter
        self._step_cost = step_cost
        self._experience = Experience()
        self._watches: dict[int, Watch] = {}

    def guesses(self, wishes: Sequence[Wish], n_rows: int) -> dict[int, list[int]]:
        """What the wishing sequences may go on with, by id, for a step of `n_rows` rows without guesses."""
        if not self._drafter.is_free:
            wanted = []
            for wish in wishes:
                n = self._n_worthwhile(wish.id, wish.n_most, n_rows)
                wanted += [replace(wish, n_most=n)] if n else []
            return self._drafter.draft(wanted) if wanted else {}
        guesses = {}
        for id, tokens in self._drafter.draft(wishes).items():
            n = self._n_worthwhile(id, len(tokens), n_rows)
            if n:
                guesses[id] = tokens[:n]
        return guesses

    def observe(self, id: int, *, n_guessed: int, n_right: int) -> None:
        """Learn how many guesses of a sequence were right."""
        self._watches[id].observe(n_guessed, n_right)

    def forget(self, id: int) -> None:
        """The sequence has ended."""
        self._watches.pop(id, None)
        self._drafter.forget(id)

    def _n_worthwhile(self, id: int, n_most: int, n_rows: int) -> int:
        if id not in self._watches:
            self._watches[id] = Watch(self._experience)
        return self._watches[id].n_worthwhile(n_most, n_rows, self._step_cost)


@dataclass(slots=True)
class _Index:
    """Where each run of tokens was last followed by something, for one text that grows at its end."""

    n_indexed: int = 0
    places: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter:
    """Looks up what followed the last tokens when they occurred before."""

    is_free = True

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def draft(self, wishes: Sequence[Wish]) -> dict[int, list[int]]:
        return {wish.id: guesses for wish in wishes if (guesses := self._guess(wish))}

    def forget(self, id: int) -> None:
        self._indexes.pop(id, None)

    def close(self) -> None:
        self._indexes.clear()

    def _guess(self, wish: Wish) -> list[int]:
        tokens = wish.tokens
        index = self._indexes.setdefault(wish.id, _Index())
        if index.n_indexed > len(tokens):  # the context was shifted
            index = self._indexes[wish.id] = _Index()
        # The run that ends the text is looked up before it is entered: it is followed by nothing yet.
        for end in range(max(index.n_indexed, N_GRAMS[-1]), len(tokens)):
            for n in N_GRAMS:
                if end >= n:
                    index.places[tuple(tokens[end - n : end])] = end
        index.n_indexed = len(tokens)
        for n in N_GRAMS:
            at = index.places.get(tuple(tokens[-n:])) if len(tokens) >= n else None
            if at is not None:
                return list(tokens[at : at + wish.n_most])
        return []


class ModelDrafter:
    """Lets a small model of the same vocabulary go on greedily. It keeps up with each slot's text, and
    guesses nothing for one that it is still reading."""

    is_free = False

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._held: list[list[int]] = [[] for _ in range(backend.n_slots)]

    def draft(self, wishes: Sequence[Wish]) -> dict[int, list[int]]:
        samplers = {}
        guesses: dict[int, list[int]] = {wish.id: [] for wish in wishes}
        texts = {wish.id: list(wish.tokens) for wish in wishes}
        active = self._fitting(wishes)
        try:
            active = self._caught_up(active)
            for wish in active:
                greedy = SamplingParams(temperature=0.0)
                samplers[wish.id] = self._backend.sampler(greedy, [], n_logprobs=None)
            while active:
                rows = [
                    self._row(wish, texts[wish.id], samplers[wish.id], self._backend.n_batch // len(active))
                    for wish in active
                ]
                self._backend.launch(Batch(rows))
                sampled = iter(self._backend.collect())
                for wish, row in zip(active, rows, strict=True):
                    self._held[wish.slot] += row.tokens
                    if row.sampler:
                        token = next(sampled).tokens[0]
                        guesses[wish.id].append(token)
                        texts[wish.id].append(token)
                active = [wish for wish in active if not self._is_done(wish, guesses[wish.id])]
        except (CacheFullError, EngineError):  # a token beyond a smaller vocabulary, say: no guesses then
            self._forget(range(len(self._held)))
            return {}
        finally:
            for sampler in samplers.values():
                sampler.close()
        return {id: tokens for id, tokens in guesses.items() if tokens}

    def forget(self, id: int) -> None:
        """Nothing: a slot's text stays, and its next sequence may begin like it."""

    def close(self) -> None:
        self._backend.close()

    def _fitting(self, wishes: Sequence[Wish]) -> list[Wish]:
        """Those whose texts fit side by side, in slot order. The other slots forget theirs where that
        is in the way: a beginning that the large model's slots share is here once for each."""
        n_free, chosen = self._backend.memory.n_cells, []
        for wish in wishes:
            n_needed = len(wish.tokens) + wish.n_most
            if n_needed <= min(self._backend.n_ctx, n_free):
                chosen.append(wish)
                n_free -= n_needed
        others = set(range(len(self._held))) - {wish.slot for wish in chosen}
        if sum(len(self._held[slot]) for slot in others) > n_free:
            self._forget(others)
        return sorted(chosen, key=lambda wish: wish.slot)

    def _caught_up(self, wishes: list[Wish]) -> list[Wish]:
        """Those whose texts it has read but for a little; it reads a piece of one of the others."""
        behind = [wish for wish in wishes if self._n_behind(wish) > N_READ]
        if behind:
            row = self._row(behind[0], behind[0].tokens, None, min(N_READ, self._backend.n_batch))
            self._backend.launch(Batch([row]))
            self._backend.collect()
            self._held[row.slot] += row.tokens
        return [wish for wish in wishes if wish not in behind]

    def _n_behind(self, wish: Wish) -> int:
        return len(wish.tokens) - n_common(self._held[wish.slot], wish.tokens)

    def _is_done(self, wish: Wish, guesses: list[int]) -> bool:
        return len(guesses) >= wish.n_most or bool(guesses and self._backend.vocab.is_end(guesses[-1]))

    def _row(self, wish: Wish, text: Sequence[int], sampler: Sampler | None, n_most: int) -> Row:
        held = self._held[wish.slot]
        n_kept = min(n_common(held, text), len(text) - 1)
        if n_kept < len(held):
            if not self._backend.memory.remove(wish.slot, n_kept):
                self._backend.memory.remove(wish.slot, 0)
                n_kept = 0
            del held[n_kept:]
        tokens = list(text[n_kept : n_kept + max(n_most, 1)])
        is_last = n_kept + len(tokens) == len(text)
        return Row(wish.slot, n_kept, tokens, sampler if is_last else None)

    def _forget(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._backend.memory.remove(slot, 0)
            self._held[slot].clear()
