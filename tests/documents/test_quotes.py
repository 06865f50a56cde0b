"""Quotes are found where they stand and nowhere else."""

from __future__ import annotations

import pytest

from nemolocal.documents import quotes

TEXT = (
    "The committee dis-\ncussed the information budget of 4711 crowns. “It’s well-known” – so the chair.\n"
    "At -5 °C the valve opens; at 5 °C it shuts. The oﬃce is closed.\n港口代码是石英88。请保密。"
)


@pytest.mark.parametrize(
    ("quote", "standing"),
    [
        ("discussed the information", "dis-\ncussed the information"),
        ("BUDGET  of\n4711", "budget of 4711"),
        ('"It\'s well-known" - so', "“It’s well-known” – so"),
        ("at -5 °C", "At -5 °C"),
        ("office is", "oﬃce is"),
        ("committee … crowns", "committee dis-\ncussed the information budget of 4711 crowns"),
        ("committee [...] 4711 crowns", "committee dis-\ncussed the information budget of 4711 crowns"),
        ("代码是石英88", "代码是石英88"),
    ],
)
def test_quote_is_found_as_it_stands(quote: str, standing: str) -> None:
    found = quotes.find(quote, TEXT)
    assert found is not None
    assert TEXT[slice(*found)] == standing


@pytest.mark.parametrize(
    "quote",
    [
        "budget of 4712 crowns",
        "crowns … committee",  # the wrong way round
        "mittee dis",  # begins within a word
        "the valv",
        "shuts at -5 °C",
        "opens; at -5",
        "of",
        "",
        "…",
        " . . ",
    ],
)
def test_quote_that_is_not_there_is_not_found(quote: str) -> None:
    assert quotes.find(quote, TEXT) is None


def test_a_later_place_is_taken_where_the_first_does_not_go_on() -> None:
    text = "alpha " + "x " * 3_000 + "alpha beta"
    found = quotes.find("alpha … beta", text)
    assert found == (len(text) - 10, len(text))


def test_ellipsis_does_not_join_what_is_far_apart() -> None:
    assert quotes.find("alpha … beta", "alpha " + "x " * 3_000 + "beta") is None


RULES = (
    "The fee is 40 crowns a month. The contract cannot be ended before 2030. See M8 at 22 Nm.\n"
    "港口代码是石英。"
)


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("A month costs a fee of 40 crowns", "The fee is 40 crowns a month."),
        (
            "One cannot end the contract before 2030: the contract is not ended",
            "The contract cannot be ended before 2030.",
        ),
        ("M8 takes 22 Nm", "See M8 at 22 Nm."),
        ("这个港口代码是石英", "港口代码是石英。"),
    ],
)
def test_statement_rests_on_the_sentence_that_shares_its_words(statement: str, sentence: str) -> None:
    best = quotes.support(statement, RULES)
    assert best is not None
    assert RULES[best[0] : best[1]] == sentence


@pytest.mark.parametrize(
    "statement",
    ["The fee is 41 crowns a month", "The contract can be ended before 2030", "Yes.", "", "Blue contract"],
)
def test_statement_rests_on_nothing_that_says_something_else(statement: str) -> None:
    assert quotes.support(statement, RULES) is None


def test_sentences_are_not_cut_within_numbers_and_end_with_lines() -> None:
    text = "Use 3.5 bar. Then stop\n  Wirklich? 对。好"
    assert [text[a:b] for a, b in quotes.sentences(text)] == [
        "Use 3.5 bar.",
        "Then stop",
        "Wirklich?",
        "对。",
        "好",
    ]


def test_page_is_that_of_the_block() -> None:
    assert [quotes.page_at(at, (0, 10, 20), (1, 1, 4)) for at in (0, 9, 10, 20, 99)] == [1, 1, 1, 4, 4]
