"""How much goes into one step, so that streams keep flowing while prompts are read and guesses pay.

Knows only how long steps took: the worker measures, the scheduler obeys.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from nemolocal.engine.batching import Budget

FLOWING_S = 0.08  # a step while answers are being written: what a reader does not notice
BURST_S = 0.3  # the same when it brings several waiting requests to their first token
ALONE_S = 0.5  # a step while only prompts are read: how long a cancel or a new request may have to wait
N_LEAST = 16  # below this a prompt would hardly advance
N_PROBE = 128  # prompt tokens of a step before anything was measured
SMOOTHING = 0.3
UNKNOWN = 2.0  # how much more a prompt token is taken to cost beside answers before that was measured
ROW_SHARE = 0.15  # of a step, what one row more is taken to cost before it was measured


class Pace:
    """Learns what prompt tokens and rows cost, and turns a time per step into a number of tokens."""

    def __init__(self, n_batch: int) -> None:
        self._n_batch = n_batch
        self._alone_s = 0.0  # a prompt token, in steps that read prompts
        self._beside_s = 0.0  # the same in steps that also write answers, whose chunks are smaller
        self._decode_s = 0.0
        self._known_rows: list[int] = []  # sorted
        self._row_s: dict[int, float] = {}

    def budget(self, *, is_flowing: bool) -> Budget:
        """Prompt tokens for the next step. Before anything was measured: a small probe."""
        alone_s, beside_s = self._alone_s or self._beside_s, self._beside_s or UNKNOWN * self._alone_s
        if alone_s == 0.0:
            n = min(self._n_batch, N_PROBE)
            return Budget(n, n)
        if not is_flowing:
            return Budget(self._n_prefill(ALONE_S, alone_s), self._n_prefill(BURST_S, alone_s))
        n = self._n_prefill(FLOWING_S - self._decode_s, beside_s)
        return Budget(n, self._n_prefill(BURST_S - self._decode_s, alone_s))

    def observe(self, *, n_prefill: int, n_rows: int, seconds: float) -> None:
        """Learn from a step that read `n_prefill` prompt tokens (0: it only wrote answers, `n_rows` rows)."""
        if n_prefill == 0:
            self._decode_s = _smooth(self._decode_s, seconds)
            if n_rows not in self._row_s:
                insort(self._known_rows, n_rows)
            self._row_s[n_rows] = _smooth(self._row_s.get(n_rows, 0.0), seconds)
        elif n_prefill >= N_LEAST:
            is_beside = n_rows > n_prefill
            token_s = max(seconds - (self._decode_s if is_beside else 0.0), 1e-6) / n_prefill
            if is_beside:
                self._beside_s = _follow(self._beside_s, token_s)
            else:
                self._alone_s = _follow(self._alone_s, token_s)

    def step_s(self, n_rows: int) -> float:
        """What a step of so many rows takes, in seconds: as measured, or between its measured neighbours.
        Before anything was measured: in units of a step of one row."""
        if n_rows in self._row_s:
            return self._row_s[n_rows]
        known = self._known_rows
        if not known:
            return _rows(n_rows)
        at = bisect_left(known, n_rows)
        if at in (0, len(known)):
            nearest = known[0] if at == 0 else known[-1]
            return self._row_s[nearest] * _rows(n_rows) / _rows(nearest)
        below, above = known[at - 1], known[at]
        share = (n_rows - below) / (above - below)
        return self._row_s[below] + share * (self._row_s[above] - self._row_s[below])

    def _n_prefill(self, seconds: float, token_s: float) -> int:
        return max(min(int(seconds / token_s), self._n_batch), min(N_LEAST, self._n_batch))


def _rows(n_rows: int) -> float:
    """What so many rows are taken to cost, in units of one."""
    return 1 + ROW_SHARE * (n_rows - 1)


def _follow(old: float, new: float) -> float:
    """Rises at once and falls slowly: a step that took too long was felt by everyone, one that could have
    taken longer by nobody."""
    return new if new > old else _smooth(old, new)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + SMOOTHING * (new - old)
