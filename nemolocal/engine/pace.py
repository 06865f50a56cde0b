"""How much of a prompt goes into one step, so that streams keep flowing while prompts are read.

Knows only how long steps took: the worker measures, the scheduler obeys.
"""

from __future__ import annotations

FLOWING_S = 0.08  # a step while answers are being written: what a reader does not notice
ALONE_S = 0.5  # a step while only prompts are read: how long a cancel or a new request may have to wait
N_LEAST = 16  # below this a prompt would hardly advance
SMOOTHING = 0.3


class Pace:
    """Learns the seconds that one prompt token costs and turns a time per step into a number of tokens."""

    def __init__(self, n_batch: int) -> None:
        self._n_batch = n_batch
        self._token_s = 0.0
        self._decode_s = 0.0

    def n_prefill(self, *, is_flowing: bool) -> int:
        """Prompt tokens for the next step. Before anything was measured: a small probe."""
        if self._token_s == 0.0:
            return min(self._n_batch, 128)
        left_s = FLOWING_S - self._decode_s if is_flowing else ALONE_S
        return max(min(int(left_s / self._token_s), self._n_batch), min(N_LEAST, self._n_batch))

    def observe(self, *, n_prefill: int, seconds: float) -> None:
        """Learn from a step that read `n_prefill` prompt tokens (0: it only wrote answers)."""
        if n_prefill == 0:
            self._decode_s = _smooth(self._decode_s, seconds)
        elif n_prefill >= N_LEAST:
            self._token_s = _smooth(self._token_s, max(seconds - self._decode_s, 1e-6) / n_prefill)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + SMOOTHING * (new - old)
