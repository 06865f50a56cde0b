"""What texts and questions have in common, over spellings, inflections and scripts."""

from __future__ import annotations

import sqlite3

import pytest

from nemolocal.documents.terms import STOP_WORDS, language_of, match, question_terms, terms


def is_found(question: str, text: str, language: str = "") -> bool:
    """By SQLite itself, with the tokenizer of the library's table."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute(
            "CREATE VIRTUAL TABLE t USING fts5(terms,"
            " tokenize = \"unicode61 remove_diacritics 0 tokenchars '-_./:,&'\")"
        )
        connection.execute("INSERT INTO t VALUES (?)", (" ".join(terms(text, language)),))
        query = match(question, language)
        return bool(query and connection.execute("SELECT 1 FROM t WHERE t MATCH ?", (query,)).fetchone())
    finally:
        connection.close()


@pytest.mark.parametrize("written", ["Größe", "GRÖSSE", "Groesse", "grosse", "große"])
@pytest.mark.parametrize("asked", ["größe", "groesse", "Grösse"])
def test_german_spellings_find_each_other(written: str, asked: str) -> None:
    assert is_found(asked, f"Die {written} ist", "german")
    assert is_found(written, f"Die {asked} ist", "german")


@pytest.mark.parametrize("written", ["Größe", "GROESSE", "grosse"])
def test_umlauts_are_found_where_the_language_is_not_known(written: str) -> None:
    assert is_found("größe", written)
    assert is_found(written, "Größe")


@pytest.mark.parametrize(
    ("language", "written", "asked"),
    [
        ("english", "the tenants were notified", "notify the tenant"),
        ("german", "Die Häuser wurden verkauft", "haus"),
        ("german", "Kündigungen sind schriftlich", "kündigung"),
        ("french", "les propriétaires", "propriétaire"),
        ("french", "café crème", "cafe"),
        ("spanish", "las canciones", "canción"),
    ],
)
def test_inflections_and_accents(language: str, written: str, asked: str) -> None:
    assert is_found(asked, written, language)


@pytest.mark.parametrize("asked", ["QUARTZ-88", "quartz 88", "88", "Quartz"])
def test_codes_are_found_whole_and_by_their_parts(asked: str) -> None:
    assert is_found(asked, "Use QUARTZ-88, then stop.", "english")
    assert is_found(asked, "请使用QUARTZ-88型号", "")


@pytest.mark.parametrize("number", ["17,40", "1,234.56", "2026-12-01", "10.0.0.1", "A/7-3", "max_tokens"])
def test_numbers_stay_whole(number: str) -> None:
    assert number.casefold() in terms(f"It is {number}.", "english")
    assert is_found(number, f"({number})", "english")


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ("港湾的石头是灰色的", "石头是什么颜色"),
        ("灯塔位于海港", "港"),
        ("灯塔位于港", "港"),
        ("東京都の人口", "人口"),
        ("ท่าเรือเก่า", "เรือ"),
        ("서울특별시의 인구는", "특별시"),
        ("ﾊｰﾄﾞﾜｪｱ", "ハードウェア"),
    ],
)
def test_scripts_without_blanks_are_found_by_pairs(written: str, asked: str) -> None:
    assert is_found(asked, written)


def test_a_single_character_finds_no_other() -> None:
    assert not is_found("港", "灯塔位于海边")


@pytest.mark.parametrize(
    "question",
    [
        'a" OR "b',
        "NEAR(x, 3)",
        "terms:x AND NOT y*",
        "^x",
        "-",
        "",
        '"',
        "''; DROP TABLE t; --",
        "\x00a\x00",
        "(((",
        "* * *",
        "🚢",
        "a" * 100_000,
        "x y " * 20_000,
        "\ud800",
    ],
)
def test_no_question_is_a_query(question: str) -> None:
    assert not is_found(question, "zebra")


def test_words_of_syntax_are_words() -> None:
    assert is_found("NEAR", "far and near")
    assert not is_found("zebra NOT near", "and only this")


@pytest.mark.parametrize("language", sorted(STOP_WORDS))
def test_stop_words_weigh_nothing_but_are_better_than_none(language: str) -> None:
    stop = STOP_WORDS[language].split()
    asked = question_terms(" ".join([*stop[:6], "zirkonium"]), language)
    assert not set(asked) & set(stop)
    assert question_terms(stop[0], language)[0] == stop[0]


def test_a_question_in_another_language_loses_its_own_stop_words() -> None:
    assert "what" not in question_terms("What is the name of the Schiffswerft?", "german")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The harbour of the town was built in stone by a merchant.", "english"),
        ("Der Hafen der Stadt ist von einem Kaufmann gebaut und gehört der Gemeinde.", "german"),
        ("Le port de la ville est dans une baie, et les bateaux sont au quai.", "french"),
        ("港湾的石头是灰色的", ""),
        ("x = y + z; return 7", ""),
        ("", ""),
    ],
)
def test_languages_are_told_by_their_stop_words(text: str, language: str) -> None:
    assert language_of(text) == language
