"""Who wrote which character of a prompt: the template, or a content (user, tool, document).

Contents may spell control tokens. So before a template sees them, each of their characters that occurs in
any control token is swapped for a private-use character, one for one: the content is *marked*. Whatever the
template then does with it (cut it, join it, glue it to its own text), a marked character never becomes part
of a control token again: every control token in the result was written by the template alone. White space is
never marked, so that trimming and splitting work on marked text as they are.

Knows nothing of Jinja and of messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from typing import SupportsIndex

from nemolocal.errors import InvalidRequestError
from nemolocal.types import Segment

PART = 30  # what a list or mapping costs beside its contents, in characters

_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_PRIVATE_PLANES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


def private_characters(text: str) -> set[str]:
    """The characters of `text` that can therefore not serve as marks."""
    return set() if text.isascii() else set(_PRIVATE.findall(text))


class Marks:
    """One render's exchange of characters: `alphabet`, ascending, for private-use ones outside `taken`.

    Raises InvalidRequestError when `taken` leaves too few; that takes 130,000 different ones.
    """

    def __init__(self, alphabet: Sequence[str] = (), taken: Iterable[str] = ()) -> None:
        used = {ord(character) for character in taken}
        free = (point for plane in _PRIVATE_PLANES for point in plane if point not in used)
        self._marked = dict(zip(map(ord, alphabet), free, strict=False))
        if len(self._marked) < len(alphabet):
            raise InvalidRequestError(
                "The messages use up the private-use characters of Unicode.", param="messages"
            )
        self._plain = {private: point for point, private in self._marked.items()}

    def mark(self, text: str) -> str:
        return text.translate(self._marked)

    def unmark(self, text: str) -> str:
        return text if text.isascii() else text.translate(self._plain)

    def mark_all(self, value: object) -> object:
        """A copy of a JSON-like value with all its texts marked, the keys too."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, Mapping):
            return self.mark_dict(value)
        if isinstance(value, list | tuple):
            return [self.mark_all(item) for item in value]
        return value

    def mark_dict(self, value: Mapping[str, object]) -> MarkedDict:
        return MarkedDict(self, {self.mark(str(k)): self.mark_all(v) for k, v in value.items()})

    def unmark_all(self, value: object, spend: Callable[[int], None]) -> object:
        """A copy of a value with plain texts throughout. `spend` is told the size of each part, since a
        template can nest lists so that they unfold without end."""
        if isinstance(value, str):
            spend(len(value))
            return self.unmark(value)
        if isinstance(value, Mapping):
            spend(PART + 5 * len(value))
            return {self.unmark_all(k, spend): self.unmark_all(v, spend) for k, v in value.items()}
        if isinstance(value, list | tuple | KeysView | ValuesView | ItemsView):
            spend(PART + 5 * len(value))
            items = [self.unmark_all(item, spend) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
        return value

    # Cutting marked text as if it were plain: the lengths are equal, so places carry over -----------

    def split(self, text: str, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        if sep is None:
            return text.split(None, maxsplit)
        return _carve(text, self.unmark(text).split(self.unmark(sep), maxsplit), len(sep))

    def rsplit(self, text: str, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        if sep is None:
            return text.rsplit(None, maxsplit)
        return _carve(text, self.unmark(text).rsplit(self.unmark(sep), maxsplit), len(sep))

    def partition(self, text: str, sep: str) -> tuple[str, ...]:
        return tuple(_carve(text, self.unmark(text).partition(self.unmark(sep)), 0))

    def rpartition(self, text: str, sep: str) -> tuple[str, ...]:
        return tuple(_carve(text, self.unmark(text).rpartition(self.unmark(sep)), 0))

    def strip(self, text: str, chars: str | None = None) -> str:
        return self.rstrip(self.lstrip(text, chars), chars)

    def lstrip(self, text: str, chars: str | None = None) -> str:
        if chars is None:
            return text.lstrip()
        return text[len(text) - len(self.unmark(text).lstrip(self.unmark(chars))) :]

    def rstrip(self, text: str, chars: str | None = None) -> str:
        if chars is None:
            return text.rstrip()
        return text[: len(self.unmark(text).rstrip(self.unmark(chars)))]

    def removeprefix(self, text: str, prefix: str) -> str:
        return text[len(text) - len(self.unmark(text).removeprefix(self.unmark(prefix))) :]

    def removesuffix(self, text: str, suffix: str) -> str:
        return text[: len(self.unmark(text).removesuffix(self.unmark(suffix)))]

    def replace(self, text: str, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return text.replace(old, new, count)
        return new.join(self.split(text, old, count))


class MarkedDict(dict[object, object]):
    """A content's mapping: its keys are marked, and are found by their plain form too."""

    def __init__(self, marks: Marks, items: Mapping[object, object]) -> None:
        super().__init__(items)
        self._marks = marks

    def _key(self, key: object) -> object:
        return self._marks.mark(self._marks.unmark(key)) if isinstance(key, str) else key

    def __getitem__(self, key: object) -> object:
        return super().__getitem__(self._key(key))

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._key(key))

    def get(self, key: object, default: object = None) -> object:
        return super().get(self._key(key), default)


class ControlTokens:
    """The control tokens of a vocabulary, as texts. White space alone is never taken for one."""

    def __init__(self, texts: Iterable[str]) -> None:
        usable = sorted({text for text in texts if text.strip()}, key=lambda text: (-len(text), text))
        letters = {c for text in usable for c in text + text.upper() + text.lower() if not c.isspace()}
        self.alphabet = tuple(sorted(letters))
        self._pattern = re.compile("|".join(map(re.escape, usable))) if usable else None

    def cut(self, rendered: str, marks: Marks) -> tuple[Segment, ...]:
        """Cut a rendered prompt at its control tokens; the text between two of them is one segment."""
        segments: list[Segment] = []
        end = 0
        for match in self._pattern.finditer(rendered) if self._pattern else ():
            if match.start() > end:
                segments.append(Segment(marks.unmark(rendered[end : match.start()])))
            segments.append(Segment(match.group(), is_control=True))
            end = match.end()
        if len(rendered) > end:
            segments.append(Segment(marks.unmark(rendered[end:])))
        return tuple(segments)


def _carve(text: str, pieces: Sequence[str], n_between: int) -> list[str]:
    """Cut `text` where its plain form was cut into `pieces`, `n_between` characters apart."""
    carved: list[str] = []
    start = 0
    for piece in pieces:
        carved.append(text[start : start + len(piece)])
        start += len(piece) + n_between
    return carved
