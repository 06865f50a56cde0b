"""What the server remembers of each tab's documents, in memory only: the files that are on their way into the
library, which documents are chosen, what was asked of them and answered, and the summary that is being made.

Knows neither gradio nor how any of it is shown. To be used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from nemolocal.documents.answer import Answer
from nemolocal.documents.summarise import Options, Progress, Summary
from nemolocal.types import Message
from nemolocal.ui.tabs import Run

N_ROOMS: Final = 64
N_TALKS: Final = 32
"""Selections of one tab whose questions are remembered."""
N_TURNS: Final = 50
"""Questions that are remembered of each."""

Part = Literal["reads", "picked", "talk", "summary", "page", "said"]


@dataclass(frozen=True, slots=True)
class Read:
    """A file on its way into the library. `n_done` of `n_all` are bytes while it arrives, then pages; `said`
    is what became of it. `is_locked` says that it waits for its password."""

    key: int
    name: str
    state: Literal["arriving", "waiting", "reading", "read", "failed"] = "arriving"
    n_done: int = 0
    n_all: int = 0
    said: str = ""
    is_locked: bool = False

    @property
    def is_over(self) -> bool:
        return self.state in ("read", "failed")


@dataclass(frozen=True, slots=True)
class Quoted:
    """A quote as it stands in its document, with what stands before and after it."""

    before: str
    quote: str
    after: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer, as far as it is written. `quoted` has an entry for each citation, None for
    one that was not found. `note` says in a few words why an answer is not whole."""

    question: str
    text: str = ""
    answer: Answer | None = None
    quoted: tuple[Quoted | None, ...] = ()
    note: str = ""


Talk = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class PageText:
    """A page of a document that is looked at: its text, with `quote` marked where it is not None. `is_cut`
    says that there is more on the page."""

    name: str
    where: str
    text: str
    quote: Quoted | None = None
    is_cut: bool = False


@dataclass
class Summing:
    """A summary of one or more documents (id, name) while it is made, and once it is."""

    documents: tuple[tuple[int, str], ...]
    options: Options
    state: Literal["running", "done", "stopped", "failed"] = "running"
    progress: Progress | None = None
    is_joining: bool = False
    """Whether the documents are done and the text over all of them is being written."""
    made: list[tuple[int, Summary]] = field(default_factory=list)
    """Each with the document that it is of."""
    overall: str = ""
    problem: str = ""
    lost: list[str] = field(default_factory=list)
    """Documents that could not be summarised, each with the reason in one line."""
    task: asyncio.Task[None] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(id for id, _ in self.documents)

    def markdown(self) -> str:
        """All of it as one document."""
        parts = [f"# All documents\n\n{self.overall}\n"] if self.overall else []
        return "\n".join([*parts, *(summary.text for _, summary in self.made)])


class Room:
    """One tab's. `marks` count the changes of each part, so that only what has changed is drawn anew."""

    def __init__(self) -> None:
        self.picked: tuple[int, ...] = ()
        self.is_removing = False
        self.reads: dict[int, Read] = {}
        self.files: dict[int, Path] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.arriving = ""
        """The batch of files that arrived last."""
        self.batch = ""
        """The batch that is chosen."""
        self.talks: OrderedDict[frozenset[int], Talk] = OrderedDict()
        self.run: Run | None = None
        self.asked: frozenset[int] = frozenset()
        self.summing: Summing | None = None
        self.page: PageText | None = None
        self.said = ""
        self.marks: Counter[Part] = Counter()
        self._n_reads = 0

    def touch(self, *parts: Part) -> None:
        self.marks.update(parts)

    @property
    def is_busy(self) -> bool:
        is_summing = self.summing is not None and self.summing.state == "running"
        return bool(self.tasks) or self.run is not None or is_summing

    def say(self, line: str) -> None:
        """What the person is told beside all else; "" for nothing."""
        if line != self.said:
            self.said = line
            self.touch("said")

    # Reading -------------------------------------------------------------------------------------

    def expect(self, name: str, n_bytes: int = 0) -> Read:
        """A file begins to arrive."""
        self._n_reads += 1
        read = Read(self._n_reads, name, n_all=n_bytes)
        self.reads[read.key] = read
        self.touch("reads")
        return read

    def tell(self, key: int, **changes: object) -> None:
        """A file has come further; nothing, where it is gone from the list."""
        if key in self.reads:
            self.reads[key] = replace(self.reads[key], **changes)  # type: ignore[arg-type]
            self.touch("reads")

    def drop(self, key: int) -> None:
        if self.reads.pop(key, None):
            self.touch("reads")

    # Choosing ------------------------------------------------------------------------------------

    def pick(self, ids: Sequence[int]) -> None:
        self.picked, self.is_removing = tuple(dict.fromkeys(ids)), False
        self.touch("picked")

    def receive(self, id: int, batch: str) -> None:
        """A document was read: those of one batch are chosen together."""
        is_first = bool(batch) and batch != self.batch
        self.batch = batch or self.batch
        self.pick([id] if is_first else [*self.picked, id])

    def forget(self, ids: Sequence[int]) -> None:
        """Documents are gone, and all that tells of them."""
        gone = set(ids)
        self.pick([id for id in self.picked if id not in gone])
        if self.asked & gone:
            self.asked = frozenset()
        for chosen in [each for each in self.talks if each & gone]:
            del self.talks[chosen]
        if self.summing and gone & set(self.summing.ids):
            self.summing = None
        self.page = None
        self.touch("talk", "summary", "page")

    # Asking --------------------------------------------------------------------------------------

    def talk(self) -> Talk:
        """What was asked of the documents that are chosen."""
        return self.talks.get(frozenset(self.picked), ())

    def keep(self, chosen: frozenset[int], turn: Turn) -> None:
        """A question is answered, or ended otherwise."""
        self.talks[chosen] = (*self.talks.get(chosen, ()), turn)[-N_TURNS:]
        self.talks.move_to_end(chosen)
        while len(self.talks) > N_TALKS:
            self.talks.popitem(last=False)
        self.touch("talk")


def history(talk: Talk) -> list[Message]:
    """The conversation so far as the model reads it."""
    found = []
    for turn in talk:
        if turn.text:
            found += [Message("user", turn.question), Message("assistant", turn.text)]
    return found


class Rooms:
    """All tabs', by the id that a tab keeps over reloads."""

    def __init__(self) -> None:
        self._rooms: OrderedDict[str, Room] = OrderedDict()

    def of(self, tab: str) -> Room:
        """The tab's; the one that was longest untouched and does nothing is forgotten when they are many."""
        room = self._rooms.setdefault(tab, Room())
        self._rooms.move_to_end(tab)
        if len(self._rooms) > N_ROOMS:
            idle = next((each for each, other in self._rooms.items() if not other.is_busy), tab)
            if idle != tab:
                del self._rooms[idle]
        return room

    def all(self) -> Iterator[Room]:
        return iter(list(self._rooms.values()))
