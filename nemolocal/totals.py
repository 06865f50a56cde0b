"""What each model has done since the program started, as plain numbers. Knows neither engines nor formats of
metrics: it is fed from the last items of streams and handed out as values."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass

from nemolocal.types import Finish


@dataclass(slots=True)
class ModelTotals:
    """Sums over one model's life in this program, over all its loads.

    `n_requests` ended with an answer, `n_cancelled` because the client left, `n_failures` because the engine
    died, hung or gave up. Tokens and seconds are those of the requests that ended with an answer:
    `cached_tokens` is the part of `prompt_tokens` that did not have to be read; the seconds are added up over
    requests that may have run at the same time. `n_loads` were good, `n_failed_loads` not; `load_s` is what
    the good ones took.
    """

    n_requests: int = 0
    n_cancelled: int = 0
    n_failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    queue_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    n_loads: int = 0
    n_failed_loads: int = 0
    load_s: float = 0.0


class Totals:
    """The totals of every model, by its id."""

    def __init__(self) -> None:
        self._of: defaultdict[str, ModelTotals] = defaultdict(ModelTotals)

    def snapshot(self) -> dict[str, ModelTotals]:
        """Copies, which nobody changes any more, in the order of the ids."""
        return {id: ModelTotals(**asdict(totals)) for id, totals in sorted(self._of.items())}

    def finished(self, id: str, finish: Finish) -> None:
        totals, usage, timings = self._of[id], finish.usage, finish.timings
        totals.n_requests += 1
        totals.prompt_tokens += usage.prompt_tokens
        totals.cached_tokens += usage.cached_tokens
        totals.completion_tokens += usage.completion_tokens
        totals.drafted_tokens += usage.drafted_tokens
        totals.accepted_tokens += usage.accepted_tokens
        totals.queue_s += timings.queue_s
        totals.prompt_s += timings.prompt_s
        totals.decode_s += timings.decode_s

    def cancelled(self, id: str) -> None:
        self._of[id].n_cancelled += 1

    def failed(self, id: str) -> None:
        self._of[id].n_failures += 1

    def loaded(self, id: str, *, seconds: float) -> None:
        self._of[id].n_loads += 1
        self._of[id].load_s += seconds

    def load_failed(self, id: str) -> None:
        self._of[id].n_failed_loads += 1
