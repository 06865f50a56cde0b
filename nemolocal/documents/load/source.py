"""A file that is to be read: what readers get, and the texts of what can go wrong with any of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nemolocal.errors import DocumentError

OnPage = Callable[[int, int], None]
"""Told how many pages are done, and of how many."""

_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


@dataclass(frozen=True)
class Source:
    """`name` is what the document is called, `sha256` the hash of the file's bytes."""

    path: Path
    name: str
    sha256: str = ""
    password: str = field(default="", repr=False)

    def data(self) -> bytes:
        return self.path.read_bytes()

    def damaged(self, reason: object = "") -> DocumentError:
        """What to raise for a file that is not what it says."""
        said = " ".join(str(reason).split())[:200]
        return DocumentError(
            f"{self.name} is damaged{f': {said}' if said else ''}.",
            kind="damaged",
            hint="Open and save it with the program that made it.",
        )

    def too_large(self, what: str) -> DocumentError:
        return DocumentError(f"{self.name} is too large: {what}.", kind="too_large", hint="Split it.")

    def empty(self, what: str = "there is no text in it") -> DocumentError:
        return DocumentError(f"{self.name} is empty: {what}.", kind="empty")

    def unsupported(self, what: str, hint: str = "") -> DocumentError:
        return DocumentError(f"{self.name} cannot be read: {what}.", kind="unsupported", hint=hint)


def display_name(name: str) -> str:
    """A file's name without what would change how it is shown: control characters and turns of direction."""
    return _HIDDEN.sub("", name).strip() or "document"


def hash_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
