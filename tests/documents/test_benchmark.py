"""The benchmark of the search, in small: made-up documents, read, kept and asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.documents.__main__ import report
from benchmarks.documents.book import WHERE, write_book
from benchmarks.documents.measure import Plan, measure
from benchmarks.documents.words import LANGUAGES
from nemolocal import config

PLANS = (
    Plan("en", ".pdf", 20, 12),
    Plan("en", ".html", 20, 12),
    Plan("de", ".docx", 12, 12),
    Plan("de", ".md", 20, 12),
    Plan("zh", ".txt", 20, 12),
)


def test_facts_are_found_by_their_words_wherever_they_stand(tmp_path: Path) -> None:
    kept, asked = measure(PLANS, tmp_path, config.load())
    assert len(asked) == sum(plan.n_facts for plan in PLANS)
    assert sum(one.is_after_border for one in asked) >= 8
    missed = [one for one in asked if not one.found["keywords"]]
    assert len(missed) <= 0.03 * len(asked)
    assert "vectors" not in {way for one in asked for way in one.found}
    lines = report(kept, asked).splitlines()
    assert lines[2].startswith(f"| all | {len(asked)} |")
    assert lines[2].endswith("| not measured |")


@pytest.mark.parametrize("language", sorted(LANGUAGES))
def test_each_fact_is_told_once_and_beside_others_like_it(language: str) -> None:
    book = write_book(LANGUAGES[language], n_pages=50, n_facts=20, seed=4)
    whole = [
        "\n".join((*page.paragraphs, *page.notes, *("|".join(row) for row in page.rows)))
        for page in book.pages
    ]
    for number, fact in enumerate(book.facts):
        assert [at for at, text in enumerate(whole, 1) if fact.value in text] == [fact.page]
        assert fact.where == WHERE[number % len(WHERE)]
    assert len({fact.keywords for fact in book.facts}) == len(book.facts)
    depths = [fact.depth for fact in book.facts]
    assert depths == sorted(depths)
    assert depths[0] < 0.05
    assert depths[-1] > 0.9
