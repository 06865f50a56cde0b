"""From sampled bytes to text that may be shown: whole characters only, and nothing that may yet turn out
to be a stop string. Knows nothing of tokens or models."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """The text of one answer as it grows.

    `push` takes the bytes of each token and returns the text that is certain: a character that is not
    whole yet is held back, and so is the longest end that could begin a stop string. Bytes that are no
    UTF-8 become U+FFFD. After a stop string `is_stopped` is true and nothing more comes out.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(s for s in stop if s)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.is_stopped = False

    def push(self, piece: bytes) -> str:
        text = self._decoder.decode(piece)
        return self._release(text) if self._stop else text

    def finish(self) -> str:
        """What was held back, when the answer ends without a stop string."""
        text = self._release(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        if self.is_stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
        if found:
            self.is_stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        n_kept = max((_overlap(self._held, s) for s in self._stop), default=0)
        cut = len(self._held) - n_kept
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, shorter than `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
