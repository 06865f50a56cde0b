"""The documents that were read, kept in the database: their text, their pieces, and what these are found by.

A document is stored once, by the hash of its file, however many places it lies in. Everything here blocks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nemolocal import database
from nemolocal.config import Config
from nemolocal.documents import nearness, split, terms
from nemolocal.documents.parts import Block, Document, NotRead, Piece
from nemolocal.errors import ModelNotFoundError

if TYPE_CHECKING:
    import sqlite3

READER: Final = 1
"""Raised when documents would be read or cut otherwise, so that what was read before is read anew."""
N_LOOKED_AT: Final = 200
"""The best by BM25, in which the nearness of words is looked at."""
N_WEIGHED: Final = 48
"""Terms of a question, in that."""
NEARNESS_WEIGHT: Final = 2.0
"""Against BM25, whose terms count up to 2.2 times where they are frequent in a piece."""
N_VECTORS_AT_ONCE: Final = 8_192

_COLUMNS: Final = "id, sha256, name, kind, title, language, n_pages, n_chars, n_tokens, at_s"


@dataclass(frozen=True, slots=True)
class Row:
    """A document of the library. `n_tokens` is estimated, `at_s` when it was read, in seconds since 1970."""

    id: int
    sha256: str
    name: str
    kind: str
    title: str
    language: str
    n_pages: int
    n_chars: int
    n_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Hit:
    """A piece that was found; the higher the score, the better."""

    document_id: int
    number: int
    score: float


class Library:
    """All of it for one configuration; any thread may use it, each call has a connection of its own."""

    def __init__(self, config: Config) -> None:
        self._config = config

    # What is there -------------------------------------------------------------------------------

    def find(self, sha256: str) -> Row | None:
        """The document with this content, where it was read as it would be now."""
        with database.reading(self._config) as connection:
            found = connection.execute(
                f"SELECT {_COLUMNS} FROM documents WHERE sha256 = ? AND reader = ?", (sha256, READER)
            ).fetchone()
        return Row(*found) if found else None

    def known(self, path: Path) -> Row | None:
        """The document that a file was when it was read, if it has neither its size nor its time changed."""
        try:
            now = path.stat()
        except OSError:
            return None
        with database.reading(self._config) as connection:
            found = connection.execute(
                f"SELECT {_COLUMNS} FROM documents JOIN document_places ON document_id = id"
                " WHERE path = ? AND size_bytes = ? AND mtime_ns = ? AND reader = ?",
                (str(path.resolve()), now.st_size, now.st_mtime_ns, READER),
            ).fetchone()
        return Row(*found) if found else None

    def rows(self, collection: str | None = None) -> list[Row]:
        """All documents, or those of a collection, the last one first."""
        where = ""
        values: tuple[str, ...] = ()
        if collection is not None:
            where = "WHERE id IN (SELECT document_id FROM document_places WHERE collection = ?)"
            values = (collection,)
        with database.reading(self._config) as connection:
            found = connection.execute(f"SELECT {_COLUMNS} FROM documents {where} ORDER BY id DESC", values)
            return [Row(*row) for row in found]

    def row(self, id: int) -> Row:
        """Raises ModelNotFoundError where there is none."""
        with database.reading(self._config) as connection:
            found = connection.execute(f"SELECT {_COLUMNS} FROM documents WHERE id = ?", (id,)).fetchone()
        if not found:
            raise ModelNotFoundError(f"There is no document {id} in the library.")
        return Row(*found)

    def document(self, id: int) -> Document:
        """A document as it was read."""
        with database.reading(self._config) as connection:
            found = connection.execute("SELECT document_json FROM documents WHERE id = ?", (id,)).fetchone()
        if not found:
            raise ModelNotFoundError(f"There is no document {id} in the library.")
        return _document(json.loads(found[0]))

    def pieces(self, id: int, numbers: Iterable[int] | None = None) -> list[Piece]:
        """The pieces of a document, all of them or those of these numbers, in their order."""
        wanted = None if numbers is None else set(numbers)
        with database.reading(self._config) as connection:
            found = connection.execute(
                "SELECT number, piece_json FROM pieces WHERE document_id = ? ORDER BY number", (id,)
            )
            return [_piece(json.loads(text)) for number, text in found if wanted is None or number in wanted]

    # Coming and going ----------------------------------------------------------------------------

    def add(self, document: Document, *, path: Path | None = None, collection: str = "") -> Row:
        """Keep a document, and where it lies. One that is kept already is only given its place."""
        found = self.find(document.sha256)
        if found is None:
            pieces = split.split(document)
            language = terms.language_of(document.text)
            indexed = [
                (
                    " ".join(terms.terms(" ".join(piece.headings), language)),
                    " ".join(terms.terms(piece.text, language)),
                )
                for piece in pieces
            ]
            with database.session(self._config) as connection:
                older = "SELECT id FROM documents WHERE sha256 = ? AND reader <> ?"
                for (id,) in connection.execute(older, (document.sha256, READER)).fetchall():
                    _delete(connection, id)
                self._insert(connection, document, pieces, indexed, language)
            found = self.find(document.sha256)
            assert found is not None
        if path is not None:
            self.place(found.id, path, collection)
        return found

    def place(self, id: int, path: Path, collection: str = "") -> None:
        """Remember that a file is this document."""
        with suppress(OSError):
            now = path.stat()
            values = (str(path.resolve()), id, collection, now.st_size, now.st_mtime_ns)
            with database.session(self._config) as connection:
                connection.execute("INSERT OR REPLACE INTO document_places VALUES (?, ?, ?, ?, ?)", values)

    @staticmethod
    def _insert(
        connection: sqlite3.Connection,
        document: Document,
        pieces: Sequence[Piece],
        indexed: Sequence[tuple[str, str]],
        language: str,
    ) -> None:
        """Another process may have been first; then there is nothing to do."""
        made = connection.execute(
            "INSERT OR IGNORE INTO documents (sha256, name, kind, title, language, n_pages, n_chars,"
            " n_tokens, at_s, reader, document_json) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                document.sha256,
                document.name,
                document.kind,
                document.title,
                language,
                document.n_pages,
                len(document.text),
                sum(piece.n_tokens for piece in pieces),
                time.time(),
                READER,
                json.dumps(asdict(document), ensure_ascii=False),
            ),
        )
        if not made.rowcount:
            return
        id = made.lastrowid
        for piece, (headings, words) in zip(pieces, indexed, strict=True):
            text = json.dumps(asdict(piece), ensure_ascii=False)
            row = connection.execute(
                "INSERT INTO pieces (document_id, number, piece_json) VALUES (?, ?, ?)",
                (id, piece.number, text),
            )
            connection.execute(
                "INSERT INTO piece_terms (rowid, headings, terms) VALUES (?, ?, ?)",
                (row.lastrowid, headings, words),
            )

    def remove(self, *ids: int) -> None:
        """Delete documents and all that was made of them, so that nothing of them stays in the file.

        The file is written anew for it, several documents in one go: pages that were split when something
        was added keep parts of it in their gaps, which no deletion overwrites.
        """
        rows = [self.row(id) for id in ids]
        with database.reading(self._config) as connection:
            with database.transaction(connection):
                for row in rows:
                    _delete(connection, row.id)
                    connection.execute("DELETE FROM summary_parts WHERE sha256 = ?", (row.sha256,))
                # What was deleted stays in the index until its parts are merged.
                connection.execute("INSERT INTO piece_terms (piece_terms) VALUES ('optimize')")
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # Finding -------------------------------------------------------------------------------------

    def search(self, question: str, *, k: int, ids: Sequence[int] | None = None) -> list[Hit]:
        """The pieces that fit a question best: by BM25, and by how near its words are to each other."""
        found: list[Hit] = []
        with database.reading(self._config) as connection:
            for language in self._languages(connection, ids):
                match = terms.match(question, language)
                if not match:
                    continue
                rows = connection.execute(
                    "SELECT document_id, number, -piece_terms.rank, piece_terms.terms FROM piece_terms"
                    " JOIN pieces ON pieces.id = piece_terms.rowid"
                    " JOIN documents ON documents.id = document_id"
                    f" WHERE piece_terms MATCH ? AND language = ? {_among(ids)}"
                    " ORDER BY piece_terms.rank LIMIT ?",
                    (match, language, max(k, N_LOOKED_AT)),
                ).fetchall()
                weights = self._weights(connection, terms.question_terms(question, language))
                for document, number, score, text in rows:
                    near = nearness.nearness(text.split(" "), weights)
                    found.append(Hit(document, number, score + NEARNESS_WEIGHT * near))
        return sorted(found, key=lambda hit: (-hit.score, hit.document_id, hit.number))[:k]

    @staticmethod
    def _weights(connection: sqlite3.Connection, words: Sequence[str]) -> dict[str, float]:
        n_all = connection.execute("SELECT count(*) FROM pieces").fetchone()[0]
        count = "SELECT count(*) FROM piece_terms WHERE piece_terms MATCH ?"
        counts = {word: connection.execute(count, (f'"{word}"',)).fetchone()[0] for word in words[:N_WEIGHED]}
        return {word: nearness.idf(n, n_all) for word, n in counts.items() if n}

    @staticmethod
    def _languages(connection: sqlite3.Connection, ids: Sequence[int] | None) -> list[str]:
        rows = connection.execute(f"SELECT DISTINCT language FROM documents WHERE 1 {_among(ids, 'id')}")
        return [row[0] for row in rows]

    def without_vectors(self, model: str, ids: Sequence[int] | None = None) -> list[tuple[int, str]]:
        """(piece, text) of the pieces that have no vector of this model yet."""
        with database.reading(self._config) as connection:
            rows = connection.execute(
                f"SELECT id, piece_json FROM pieces WHERE 1 {_among(ids)}"
                " AND id NOT IN (SELECT piece_id FROM piece_vectors WHERE model = ?)",
                (model,),
            )
            return [(id, _for_embedding(_piece(json.loads(text)))) for id, text in rows]

    def keep_vectors(self, model: str, vectors: Mapping[int, bytes]) -> None:
        """Keep vectors (float32, of length 1) by the piece that they stand for."""
        with database.session(self._config) as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO piece_vectors VALUES (?, ?, ?)",
                [(piece, model, vector) for piece, vector in vectors.items()],
            )

    def nearest(self, model: str, vector: bytes, *, k: int, ids: Sequence[int] | None = None) -> list[Hit]:
        """The pieces whose vectors are nearest to this one: all are compared, a few thousand at a time."""
        import numpy as np

        asked = np.frombuffer(vector, dtype="<f4")
        best: list[Hit] = []
        with database.reading(self._config) as connection:
            rows = connection.execute(
                "SELECT document_id, number, vector FROM piece_vectors JOIN pieces ON pieces.id = piece_id"
                f" WHERE model = ? {_among(ids)}",
                (model,),
            )
            while some := rows.fetchmany(N_VECTORS_AT_ONCE):
                kept = [row for row in some if len(row[2]) == len(vector)]
                if not kept:
                    continue
                scores = (
                    np.frombuffer(b"".join(row[2] for row in kept), dtype="<f4").reshape(-1, len(asked))
                    @ asked
                )
                hits = [Hit(row[0], row[1], float(score)) for row, score in zip(kept, scores, strict=True)]
                best = sorted([*best, *hits], key=lambda hit: -hit.score)[:k]
        return best


def _delete(connection: sqlite3.Connection, id: int) -> None:
    """In the caller's transaction. The index knows nothing of the other tables, so it comes first."""
    connection.execute(
        "DELETE FROM piece_terms WHERE rowid IN (SELECT id FROM pieces WHERE document_id = ?)", (id,)
    )
    connection.execute("DELETE FROM documents WHERE id = ?", (id,))


def _among(ids: Sequence[int] | None, column: str = "document_id") -> str:
    return "" if ids is None else f"AND {column} IN ({', '.join(str(int(id)) for id in ids)})"


def _for_embedding(piece: Piece) -> str:
    return "\n".join([" › ".join(piece.headings), piece.text]) if piece.headings else piece.text


def _document(found: dict[str, Any]) -> Document:
    blocks = tuple(Block(**block) for block in found.pop("blocks"))
    not_read = tuple(NotRead(**each) for each in found.pop("not_read"))
    return Document(blocks=blocks, not_read=not_read, labels=tuple(found.pop("labels")), **found)


def _piece(found: dict[str, Any]) -> Piece:
    return Piece(headings=tuple(found.pop("headings")), kinds=tuple(found.pop("kinds")), **found)
