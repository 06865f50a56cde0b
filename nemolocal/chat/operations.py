"""What a template's operations on values mean where texts are marked, and what they cost.

Comparing and cutting go by the plain text; what is cut keeps its marks. Everything is paid for from a budget
before it is made, so that a template can neither run nor grow without end.

Knows nothing of Jinja and of messages.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from typing import Any

from nemolocal.chat.provenance import Marks
from nemolocal.errors import TemplateError

STEP = 50  # what a loop step or a call costs, in characters
MAX_INDENT = 16
MAX_INT_BITS = 4096

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda item, container: item in container,
    "notin": lambda item, container: item not in container,
}

# The methods that may be called. Left out are those that pad to any width or make bytes.
_CUTTING = frozenset(
    {"split", "rsplit", "partition", "rpartition", "strip", "lstrip", "rstrip"}
    | {"removeprefix", "removesuffix"}
)
_WHOLE = frozenset(
    {"upper", "lower", "title", "capitalize", "swapcase", "casefold", "startswith", "endswith", "count"}
    | {"find", "rfind", "index", "rindex", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit"}
    | {"isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper"}
)
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _CUTTING | _WHOLE | {"join", "replace", "splitlines"}),
    (Mapping, frozenset({"get", "items", "keys", "values", "copy"})),
    (Sequence, frozenset({"index", "count", "copy"})),
    (float, frozenset({"is_integer"})),
)

_COLLECTIONS = (Mapping, list, tuple, KeysView, ValuesView, ItemsView)

_NUMBERS = re.compile(r"\d{3,}")
_NESTED = re.compile(r":[^{}:]*\{")


class Budget:
    """How much work is left, counted in characters."""

    def __init__(self, n_characters: int) -> None:
        self._n_left = n_characters

    def spend(self, n_characters: int) -> None:
        self._n_left -= n_characters
        if self._n_left < 0:
            raise TemplateError(
                "The model's chat template was stopped: it does too much work.", param="messages"
            )


class Operations:
    """The operations of one render. Those that fail raise what Python raises.

    `refuses_none` makes it a TypeError to write None, which no template means to.
    """

    def __init__(self, marks: Marks, budget: Budget, *, refuses_none: bool = False) -> None:
        self._marks = marks
        self.spend = budget.spend
        self._refuses_none = refuses_none

    def plain(self, value: object) -> Any:
        return self._marks.unmark_all(value, self.spend)

    def text(self, value: object) -> str:
        """What is written for a value. Python's own form of a list would show marks as escapes."""
        if isinstance(value, str):
            return value
        if isinstance(value, _COLLECTIONS):
            return self._marks.mark(str(self.plain(value)))
        if value is None and self._refuses_none:
            raise TypeError("None is written")
        return str(value)

    def concat(self, parts: Iterable[str]) -> str:
        texts: list[str] = []
        for part in parts:
            self.spend(len(part))
            texts.append(part)
        return "".join(texts)

    def compare(self, left: object, *rest: object) -> bool:
        """Compare as in `left < right == further`; `rest` holds names and operands in turn."""
        self.spend(STEP)
        left = self.plain(left)
        for name, right in zip(rest[::2], rest[1::2], strict=True):
            # A mapping finds its keys by their plain form; it need not be copied for that.
            is_lookup = name in ("in", "notin") and isinstance(right, Mapping)
            right = right if is_lookup else self.plain(right)
            if not _COMPARISONS[str(name)](left, right):
                return False
            left = right
        return True

    def pay_for_operator(self, symbol: str, left: object, right: object) -> None:
        """Pay for `left + right` and the like; numbers are bounded instead."""
        if symbol == "%" and isinstance(left, str):
            self.pay_for_format(left, right if isinstance(right, tuple) else (right,))
        elif isinstance(left, int) and isinstance(right, int):
            n_left, n_right = left.bit_length(), right.bit_length()
            n_bits = n_left * abs(right) if symbol == "**" else n_left + n_right
            if symbol in ("*", "**") and n_bits > MAX_INT_BITS:
                raise OverflowError("the number is too large")
        elif symbol == "*":
            n_times, sequence = (left, right) if isinstance(left, int) else (right, left)
            self.spend(size(sequence) * max(n_times, 0) if isinstance(n_times, int) else 0)
        else:
            self.spend(size(left) + size(right))

    def pay_for_format(self, form: str, arguments: Sequence[object]) -> None:
        """A format may name a width or precision, or take it from its arguments."""
        for value in arguments:
            self.plain(value)
        self.spend(len(form) + sum(int(digits[:12]) for digits in _NUMBERS.findall(form)))
        if "*" in form or _NESTED.search(form):
            self.spend(sum(abs(value) for value in arguments if isinstance(value, int)))

    def is_for_templates(self, owner: object, name: str) -> bool:
        """Whether this method of a built-in type may be called."""
        return any(isinstance(owner, kind) and name in names for kind, names in _METHODS)

    def call_text(self, text: str, name: str, *args: Any, **kwargs: Any) -> object:
        """Call a method of a text, one that `is_for_templates`."""
        self.spend(STEP + len(text))
        if name == "join":
            return self.join(text, *args)
        if name == "replace":
            return self.replace(text, *args)
        if name == "splitlines":  # line breaks are white space, which is never marked
            return text.splitlines(*args, **kwargs)
        if name in _CUTTING:
            return getattr(self._marks, name)(text, *args, **kwargs)
        return self.whole(getattr(str, name))(text, *args, **kwargs)

    def join(self, between: str, values: Iterable[object]) -> str:
        texts: list[str] = []
        for value in values:
            texts.append(self.text(value))
            self.spend(len(texts[-1]) + len(between))
        return between.join(texts)

    def trim(self, value: object, chars: str | None = None) -> str:
        return self._marks.strip(self.text(value), chars)

    def replace(self, value: object, old: str, new: str, count: int | None = None) -> str:
        text = self.text(value)
        self.spend(self._marks.unmark(text).count(self._marks.unmark(old)) * len(new))
        return self._marks.replace(text, old, new, -1 if count is None else count)

    def format(self, form: str, *args: object, **kwargs: object) -> str:
        self.pay_for_format(form, (*args, *kwargs.values()))
        return form % (kwargs or args)

    def to_json(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as chat templates expect it: other scripts and `<` stay as they are."""
        if indent is not None and (indent if isinstance(indent, int) else len(indent)) > MAX_INDENT:
            raise ValueError("the indent is too wide")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self.concat(encoder.iterencode(value))

    def sort_key(self, values: Iterable[object], case_sensitive: bool) -> list[Any]:
        plain = [self.plain(value) for value in values]
        return [v.lower() if isinstance(v, str) and not case_sensitive else v for v in plain]

    def whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function work on plain values. A text that it makes is a content as a whole as soon as a
        content may have been involved."""

        @functools.wraps(function)
        def on_plain(*args: Any, **kwargs: Any) -> Any:
            plain_kwargs = {name: self.plain(value) for name, value in kwargs.items()}
            result = function(*map(self.plain, args), **plain_kwargs)
            if not isinstance(result, str):
                return result
            given = (*args, *kwargs.values())
            is_template = all(value.isascii() for value in given if isinstance(value, str))
            is_template &= not any(isinstance(value, _COLLECTIONS) for value in given)
            return str(result) if is_template else self._marks.mark(result)

        return on_plain

    def unfolded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function that compares or hashes its arguments be paid for by all that is in them."""

        @functools.wraps(function)
        def after_unfolding(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                self.plain(value)
            return function(*args, **kwargs)

        return after_unfolding

    def paid(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function be paid for by the size of what it is given."""

        @functools.wraps(function)
        def after_paying(*args: Any, **kwargs: Any) -> Any:
            self.spend(STEP + sum(map(size, args)))
            return function(*args, **kwargs)

        return after_paying


def size(value: object) -> int:
    """Characters of a text, items of a collection."""
    return len(value) if isinstance(value, str | list | tuple | dict | range) else 0
