"""What a model says while it thinks, told from its answer. Where the template has opened the thinking
already, only its end is seen: then what was shown before is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

OPENING: Final = "<think>"
CLOSING: Final = "</think>"


class Thinking:
    """Takes an answer as it streams; `answer` is what of it is no thinking."""

    def __init__(self) -> None:
        self._shown: list[str] = []
        self._held = ""
        self._is_thinking = False

    @property
    def answer(self) -> str:
        return "".join(self._shown).strip()

    def feed(self, text: str) -> Iterator[tuple[str, bool]]:
        """What of a new piece can be shown, and whether all that was shown before was thinking."""
        self._held += text
        while self._held:
            mark = CLOSING if self._is_thinking else self._first_mark()
            at = self._held.find(mark) if mark else -1
            if at < 0:
                yield from self._let_go()
                return
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            if mark == OPENING:
                self._is_thinking = True
                if shown := self._show(before):
                    yield shown, False
            else:
                was_thinking, self._is_thinking = self._is_thinking, False
                if not was_thinking and (self._shown or before):
                    self._shown.clear()
                    yield "", True

    def flush(self) -> str:
        """The rest, once the stream has ended."""
        rest, self._held = "" if self._is_thinking else self._held, ""
        return self._show(rest)

    def _let_go(self) -> Iterator[tuple[str, bool]]:
        """All but what may be the beginning of a mark."""
        n_held = max(
            (n for mark in (OPENING, CLOSING) for n in range(1, len(mark)) if self._held.endswith(mark[:n])),
            default=0,
        )
        cut = len(self._held) - n_held
        free, self._held = self._held[:cut], self._held[cut:]
        if not self._is_thinking and (shown := self._show(free)):
            yield shown, False

    def _first_mark(self) -> str:
        places = [(at, mark) for mark in (OPENING, CLOSING) if (at := self._held.find(mark)) >= 0]
        return min(places)[1] if places else ""

    def _show(self, text: str) -> str:
        """Keep what belongs to the answer, which begins with no blanks."""
        text = text if self._shown else text.lstrip()
        if text:
            self._shown.append(text)
        return text
