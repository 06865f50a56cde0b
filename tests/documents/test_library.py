"""What is kept of documents: once, found by words and vectors, and gone when it is removed."""

from __future__ import annotations

import random
import re
import sqlite3
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nemolocal import config, database
from nemolocal.documents import library as library_module
from nemolocal.documents.library import Library
from nemolocal.documents.parts import Block, Document, NotRead
from nemolocal.errors import DatabaseError, ModelNotFoundError

HARBOUR = "The harbour of Aldmere was built by a merchant, and the lighthouse stands at its mouth."
MILL = "The mill of the village grinds corn for the bakers, and it is driven by the river."
HAFEN = "Der Hafen der Stadt ist von Kaufleuten gebaut, und die Größe der Mole ist bekannt."


def document(*texts: str, name: str = "d.txt", heading: str = "") -> Document:
    blocks = [Block("heading", heading, level=1)] if heading else []
    blocks += [Block("paragraph", text, page=page) for page, text in enumerate(texts, 1)]
    sha256 = f"{abs(hash((texts, heading))):064x}"
    return Document(name, "text", sha256, tuple(blocks), n_pages=max(len(texts), 1))


@pytest.fixture
def library() -> Library:
    return Library(config.load())


def unit(*values: float) -> bytes:
    return array("f", values).tobytes()


def test_a_document_comes_back_as_it_was_read(library: Library) -> None:
    read = Document(
        "q.pdf",
        "pdf",
        "a" * 64,
        (
            Block("heading", "One", level=1),
            Block("table", "a | b\n1 | 2", page=2, page_to=3, n_header_lines=1),
            Block("note", "“Ünï” 港 🚢"),
        ),
        n_pages=4,
        unit="slide",
        title="T",
        labels=("i", "ii", "1", "2"),
        not_read=(NotRead(4, "no text"),),
        n_ocr_pages=1,
        has_outline=True,
    )
    row = library.add(read)
    assert library.document(row.id) == read
    assert [piece.number for piece in library.pieces(row.id)] == list(range(len(library.pieces(row.id))))
    assert library.pieces(row.id)[0].headings == ("One",)


def test_the_same_content_is_kept_once_in_any_number_of_places(library: Library, tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("a.txt", "b.txt")]
    for place in places:
        place.write_text(HARBOUR)
    rows = [library.add(document(HARBOUR), path=place, collection=place.stem) for place in places]
    assert rows[0].id == rows[1].id
    assert len(library.rows()) == len(library.rows("a")) == len(library.rows("b")) == 1
    assert library.rows("c") == []
    assert library.known(places[1]) == library.find(rows[0].sha256) == rows[0]
    places[1].write_text(MILL * 2)
    assert library.known(places[1]) is None
    assert library.known(tmp_path / "gone") is None


def test_words_find_the_piece_and_headings_weigh_more(library: Library) -> None:
    harbour, mill = library.add(document(HARBOUR)), library.add(document(MILL))
    assert [hit.document_id for hit in library.search("Which merchant built the harbour?", k=5)] == [
        harbour.id
    ]
    assert library.search("bakers", k=5, ids=[harbour.id]) == []
    assert library.search("bakers", k=5, ids=[]) == []
    titled = library.add(document("It is old and the bakers know it.", heading="The harbour"))
    assert library.search("harbour", k=5)[0].document_id == titled.id
    assert len(library.search("harbour bakers", k=2)) == 2
    assert {hit.document_id for hit in library.search("harbour bakers", k=9)} == {
        harbour.id,
        mill.id,
        titled.id,
    }


def test_each_document_is_asked_in_its_language(library: Library) -> None:
    library.add(document(HARBOUR))
    german = library.add(document(HAFEN))
    assert (german.language, library.rows()[1].language) == ("german", "english")
    assert [hit.document_id for hit in library.search("Wie gross sind die Molen?", k=5)] == [german.id]


@pytest.mark.parametrize("question", ["", "?", '"', "terms:", "a OR b *", "the of and", "NEAR("])
def test_odd_questions_find_nothing_and_break_nothing(library: Library, question: str) -> None:
    library.add(document("Zebra, zebra."))
    assert library.search(question, k=5) == []


def bytes_kept() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(config.load().paths.data.glob("nemolocal.db*")))


def ends_kept() -> set[bytes]:
    """All that may be the end of a random word: words of an index share their beginnings."""
    return set(re.findall(rb"(?=([0-9a-f]{10}))", bytes_kept()))


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SQLite as some systems build it, which leaves what was deleted, beside another program that has the
    database open."""
    connect = sqlite3.connect

    def connect_carelessly(path: Path, **options: Any) -> sqlite3.Connection:
        connection = connect(path, **options)
        connection.execute("PRAGMA secure_delete = OFF")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_carelessly)
    with closing(database.connect(config.load())):
        yield


@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize("seed", [3, 5])
def test_what_is_removed_is_in_no_file_of_the_database(library: Library, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)

    def words(mark: str) -> list[str]:
        return [f"{mark}{chance.getrandbits(60):015x}" for _ in range(chance.randrange(5, 250))]

    gone: list[str] = []
    ids: list[int] = []
    for number in range(60):
        mark = "g" if number % 2 else "k"
        parts = [words(mark) for _ in range(chance.randrange(1, 12))]
        place = tmp_path / f"{mark}{chance.getrandbits(60):015x}.txt"
        place.write_text(mark)
        row = library.add(document(*map(" ".join, parts), name=place.name, heading=parts[0][0]), path=place)
        if mark == "g":
            gone += [place.stem, *(word for part in parts for word in part)]
            ids.append(row.id)
            pieces = library.without_vectors("m", [row.id])
            library.keep_vectors("m", {id: b"VECTOR" + text[:14].encode() for id, text in pieces})
            summary = "INSERT INTO summary_parts VALUES (?, ?, ?, 1, 1, 0)"
            with database.session(config.load()) as connection:
                connection.execute(summary, (f"key{number}", row.sha256, gone[-1]))
    assert {word[-10:].encode() for word in gone} <= ends_kept()
    for id in ids[:3]:
        library.remove(id)
    library.remove(*ids[3:])
    assert {word[-10:].encode() for word in gone} & ends_kept() == set()
    assert b"VECTOR" not in bytes_kept()
    assert len(library.rows()) == 30
    with database.reading(config.load()) as connection:
        connection.execute("INSERT INTO piece_terms (piece_terms) VALUES ('integrity-check')")
        counts = "SELECT (SELECT count(*) FROM pieces), (SELECT count(*) FROM piece_terms)"
        n_pieces, n_terms = connection.execute(counts).fetchone()
    assert n_pieces == n_terms > 0


def test_what_is_not_there_is_said(library: Library) -> None:
    for call in (library.remove, library.document, library.row):
        with pytest.raises(ModelNotFoundError, match="no document 7"):
            call(7)
    assert library.pieces(7) == []


def test_removed_documents_are_found_no_more_and_can_come_back(library: Library) -> None:
    row = library.add(document(HARBOUR))
    library.remove(row.id)
    assert library.search("harbour", k=5) == []
    assert library.find(row.sha256) is None
    again = library.add(document(HARBOUR))
    assert len(library.search("harbour", k=5)) == len(library.pieces(again.id)) == 1


def test_a_document_of_an_older_reader_is_replaced(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.add(document(HARBOUR))
    monkeypatch.setattr(library_module, "READER", library_module.READER + 1)
    row = library.add(document(HARBOUR))
    assert library.rows() == [row]
    assert [hit.document_id for hit in library.search("harbour", k=5)] == [row.id]
    other = library.add(document(MILL))
    assert {hit.document_id for hit in library.search("harbour mill", k=5)} == {row.id, other.id}


def test_a_write_that_fails_leaves_nothing_half_done(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(library_module.json, "dumps", broken)
        with pytest.raises(DatabaseError, match="disk full"):
            library.add(document(HARBOUR))
    assert library.rows() == []
    assert library.search("harbour", k=5) == []
    library.add(document(HARBOUR))
    assert len(library.search("harbour", k=5)) == 1


ADD = """
import sys
from nemolocal import config
from nemolocal.documents.library import Library
from nemolocal.documents.parts import Block, Document
library = Library(config.load())
for number in range(12):
    texts = [f"The stone {number} of part {page}. " * 40 for page in (1, 2)]
    blocks = tuple(Block("paragraph", text) for text in texts)
    library.add(Document(f"{number}", "text", f"{number:064}", blocks, n_pages=2))
"""


def test_several_processes_add_at_once(library: Library) -> None:
    library.rows()
    running = [subprocess.Popen([sys.executable, "-c", ADD], stderr=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate(timeout=60)[1] for process in running] == [b""] * 3
    assert sorted(row.name for row in library.rows()) == sorted(str(number) for number in range(12))
    with database.reading(config.load()) as connection:
        counts = "SELECT (SELECT count(*) FROM pieces), (SELECT count(*) FROM piece_terms)"
        n_pieces, n_terms = connection.execute(counts).fetchone()
    assert n_pieces == n_terms == sum(len(library.pieces(row.id)) for row in library.rows())


def test_vectors_are_compared_exactly_whatever_the_batch(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    chance = np.random.default_rng(3)
    rows = [library.add(document(*(f"stone {n} {page} " * 150 for page in range(5)))) for n in range(6)]
    missing = library.without_vectors("m")
    values = chance.standard_normal((len(missing), 8)).astype("<f4")
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    library.keep_vectors("m", {id: value.tobytes() for (id, _), value in zip(missing, values, strict=True)})
    assert library.without_vectors("m") == []
    assert len(library.without_vectors("other")) == len(missing)
    asked = values[4]
    monkeypatch.setattr(library_module, "N_VECTORS_AT_ONCE", 7)
    hits = library.nearest("m", asked.tobytes(), k=9)
    expected = np.sort(values @ asked)[::-1][:9]
    assert np.allclose([hit.score for hit in hits], expected, atol=1e-5)
    only = library.nearest("m", asked.tobytes(), k=9, ids=[rows[2].id])
    assert {hit.document_id for hit in only} == {rows[2].id}
    assert library.nearest("other", asked.tobytes(), k=9) == []
    assert library.nearest("m", unit(1.0, 0.0), k=9) == []  # of another length
    library.remove(rows[2].id)
    assert library.nearest("m", asked.tobytes(), k=9, ids=[rows[2].id]) == []
