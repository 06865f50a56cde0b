"""Made-up documents with facts at known places, as pages that any format can be written from.

For each fact there are sentences that say nearly the same: of another place, of another building there, and
another property of it; the paragraph of a near-duplicate is that of the fact but for place and figure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.documents.words import Language
from nemolocal.documents.split import N_TOKENS, estimate

Where = Literal["paragraph", "border", "table", "footnote"]
WHERE: tuple[Where, ...] = ("paragraph", "border", "table", "footnote")
N_ROWS = 10
N_PARAGRAPHS_MOST = 8
N_PLACES_A_FACT = 3
Item = tuple[str, str, str]  # place, thing, property


@dataclass(frozen=True)
class Fact:
    """`depth` is the share of the document that comes before its page."""

    page: int
    depth: float
    where: Where
    value: str
    keywords: str
    paraphrase: str


@dataclass
class Page:
    heading: str = ""
    paragraphs: list[str] = field(default_factory=list)
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Book:
    language: Language
    pages: list[Page]
    facts: list[Fact]


def write_book(language: Language, *, n_pages: int, n_facts: int, seed: int) -> Book:
    """Pages of filler, facts evenly over all depths and in turn over all kinds of places."""
    return _Writer(language, n_pages, n_facts, random.Random(seed)).book()


class _Writer:
    def __init__(self, language: Language, n_pages: int, n_facts: int, chance: random.Random) -> None:
        self.language, self.n_pages, self.n_facts, self.chance = language, n_pages, n_facts, chance
        places = [first + last for first in language.syllables[0] for last in language.syllables[1]]
        self.places = chance.sample(places, min(len(places), 8 + n_facts // N_PLACES_A_FACT))
        self.used: set[Item] = set()
        self.values = iter(chance.sample(range(100_000, 1_000_000), 200 * n_facts))
        self.pages = [Page() for _ in range(n_pages)]

    def book(self) -> Book:
        for number, page in enumerate(self.pages):
            if number % 4 == 0:
                page.heading = self.language.heading.format(n=number // 4 + 1)
            page.paragraphs = [self.filler(5) for _ in range(4)]
        facts = []
        for number in range(self.n_facts):
            at = int((number + 0.5) * self.n_pages / self.n_facts)
            facts.append(self.place_fact(at, WHERE[number % len(WHERE)]))
        return Book(self.language, self.pages, facts)

    def filler(self, n_sentences: int) -> str:
        return self.language.blank.join(self.sentence() for _ in range(n_sentences))

    def sentence(self) -> str:
        words, choose = self.language, self.chance.choice
        comma, stop = ("，", "。") if not words.blank else (" ", ".")
        begun = f"{choose(words.openings)}{words.blank}{choose(words.actions)}"
        return f"{begun}{comma}{choose(words.endings)}{stop}"

    def item(self, place: str = "", thing: str = "", name: str = "") -> Item:
        """One that no other sentence tells of."""
        words, choose = self.language, self.chance.choice
        for _ in range(10_000):
            item = (
                place or choose(self.places),
                thing or choose(list(words.things)),
                name or choose(list(words.properties)),
            )
            if item not in self.used:
                self.used.add(item)
                return item
            place = place if self.chance.random() < 0.9 else ""  # all of this place are told
        raise ValueError("too many facts for so few words")

    def say(self, pattern: str, item: Item, value: str) -> str:
        place, thing, name = item
        return pattern.format(place=place, thing=thing, property=name, value=value)

    def place_fact(self, at: int, where: Where) -> Fact:
        words, page = self.language, self.pages[at]
        place, thing, name = item = self.item()
        value = str(next(self.values))
        others = [self.item(thing=thing, name=name), self.item(place, thing), self.item(place, name=name)]
        before, after = self.filler(2), self.filler(2)
        for other in others:
            there = self.chance.choice(
                [page for page in self.pages if len(page.paragraphs) < N_PARAGRAPHS_MOST]
            )
            told = self.say(words.fact, other, str(next(self.values)))
            there.paragraphs.append(words.blank.join((before, told, after)))
        if where == "paragraph":
            page.paragraphs[1] = words.blank.join((before, self.say(words.fact, item, value), after))
        elif where == "border":
            page.paragraphs = [
                self.filled(self.say(words.fact, item, value), page.heading),
                *page.paragraphs[3:],
            ]
        elif where == "table":
            page.rows = [(*self.item(), str(next(self.values))) for _ in range(N_ROWS)]
            page.rows[self.chance.randrange(N_ROWS)] = (*item, value)
        else:
            page.notes.append(self.say(words.note, item, value))
        asked = (place, words.things[thing], words.properties[name])
        return Fact(
            page=at + 1,
            depth=at / self.n_pages,
            where=where,
            value=value,
            keywords=self.say(words.keywords, item, ""),
            paraphrase=self.say(words.paraphrase, asked, ""),
        )

    def filled(self, fact: str, heading: str) -> str:
        """A paragraph that is longer than a piece, where the piece after the first begins with the fact."""
        sentences: list[str] = []
        left = N_TOKENS - estimate([heading])[0]
        while (n := estimate([sentence := self.sentence()])[0]) <= left:
            sentences.append(sentence)
            left -= n
        return self.language.blank.join((*sentences, fact, self.filler(1)))
