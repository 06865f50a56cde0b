"""What goes into the next batch: a row for every answer, with guesses where they pay, and chunks of prompts
beside them. Decides about tokens only; who has a slot was decided before."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

from nemolocal.engine.backend import Backend, Batch, Row
from nemolocal.engine.cache import SlotCache
from nemolocal.engine.sequence import Sequence

N_FLOWING_PER_WAITING = 4  # a burst of new requests is one when each waits for at most so many streams
N_REPEATABLE = 128  # tokens of a chunk where a seed asks for the same text: where it is cut changes rounding
N_GAP_FILLED = 8  # slots; a longer gap costs more rows than a further pass over the weights


@dataclass(frozen=True, slots=True)
class Budget:
    """Prompt tokens for one step: `n_prefill` as a rule, `n_burst` when that brings several requests to
    their first token."""

    n_prefill: int
    n_burst: int


@dataclass(slots=True)
class Plan:
    """Rows with their sequences; a row without one fills a gap between slots and is forgotten afterwards."""

    entries: list[tuple[Sequence | None, Row]] = field(default_factory=list)
    n_tokens: int = 0
    n_prefill: int = 0

    def add(self, sequence: Sequence | None, row: Row) -> None:
        self.entries.append((sequence, row))
        self.n_tokens += len(row.tokens)

    def batch(self) -> Batch:
        adapters = next((sequence.adapters for sequence, _ in self.entries if sequence), ())
        return Batch([row for _, row in self.entries], adapters)


def plan(
    running: Several[Sequence],
    cache: SlotCache,
    backend: Backend,
    *,
    budget: Budget,
    guesses: Mapping[int, list[int]],
) -> Plan:
    """Choose from the running sequences, all with the same adapters, oldest first. Rows stand in the order of
    their slots, since llama.cpp computes only neighbouring slots together where each has its own cells."""
    chosen = Plan()
    prompts = []
    n_left = backend.n_batch
    for sequence in running:
        if not sequence.is_decoding:
            prompts.append(sequence)
        elif n_left:
            guessed = guesses[sequence.id][: n_left - 1] if sequence.id in guesses else []
            chosen.add(sequence, _next_row(sequence, guessed))
            n_left -= 1 + len(guessed)
    limit = _n_prefill(prompts, len(running) - len(prompts), budget)
    for sequence in prompts:
        n_whole = sequence.n_pending
        n = min(_n_to_border(sequence), n_left, limit - chosen.n_prefill)
        if chosen.n_prefill and n < n_whole <= limit:
            break  # it can be read in one piece by the next step, which costs a pass less
        if n > 0 and not cache.make_room(chosen.n_tokens + n):
            n = min(n, cache.n_free - chosen.n_tokens)
        if n <= 0:
            break
        chosen.add(sequence, _prompt_row(sequence, n))
        n_left -= n
        chosen.n_prefill += n
    if not backend.memory.is_shared:
        _fill_gaps(chosen, cache, backend)
    chosen.entries.sort(key=lambda entry: entry[1].slot)
    return chosen


def _n_prefill(prompts: Several[Sequence], n_flowing: int, budget: Budget) -> int:
    if n_flowing == 0 and len(prompts) == 1 and prompts[0].params.is_repeatable:
        return N_REPEATABLE  # whatever the last steps took
    if n_flowing == 0 or N_FLOWING_PER_WAITING * len(prompts) < n_flowing or len(prompts) < 2:
        return budget.n_prefill
    two_shortest = sorted(sequence.n_pending for sequence in prompts)[:2]
    return max(budget.n_burst, budget.n_prefill) if sum(two_shortest) <= budget.n_burst else budget.n_prefill


def _n_to_border(sequence: Sequence) -> int:
    """Pending tokens up to the next place where a checkpoint is due."""
    at = bisect_right(sequence.borders, sequence.n_computed)
    end = sequence.borders[at] if at < len(sequence.borders) else len(sequence.tokens)
    return end - sequence.n_computed


def _next_row(sequence: Sequence, guessed: list[int]) -> Row:
    """The last token of an answer, and what is guessed to follow it."""
    assert sequence.slot is not None
    tokens = [sequence.tokens[-1], *guessed]
    return Row(sequence.slot, sequence.n_computed, tokens, sequence.sampler, len(guessed))


def _prompt_row(sequence: Sequence, n: int) -> Row:
    """The next `n` pending tokens of a prompt."""
    assert sequence.slot is not None
    start = sequence.n_computed
    is_last = n == sequence.n_pending
    return Row(
        sequence.slot, start, sequence.tokens[start : start + n], sequence.sampler if is_last else None
    )


def _fill_gaps(chosen: Plan, cache: SlotCache, backend: Backend) -> None:
    """Give the idle slots between the chosen ones a throw-away row each, so that all are computed at once."""
    used = sorted(row.slot for _, row in chosen.entries)
    if not used or used[-1] - used[0] < len(used) or not backend.memory.can_rollback:
        return
    lengths = cache.idle_lengths()
    n_left = backend.n_batch - chosen.n_tokens
    for below, above in itertools.pairwise(used):
        gap = range(below + 1, above)
        is_open = all(slot in lengths and lengths[slot] < backend.n_ctx for slot in gap)
        if is_open and len(gap) <= min(N_GAP_FILLED, n_left):
            for slot in gap:
                chosen.add(None, Row(slot, lengths[slot], [0]))
            n_left -= len(gap)
