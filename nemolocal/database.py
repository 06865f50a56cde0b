"""The one database of this user: an SQLite file in the data folder, and how its tables came to be.

Several processes may use it at the same time: readers do not wait for a writer, writers wait for each other.
Knows the tables' shapes, not what is kept in them.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from nemolocal.config import Config
from nemolocal.errors import DatabaseError

FILE: Final = "nemolocal.db"
PATIENCE_S: Final = 10.0
"""How long a writer waits for another one."""

_POLL_S: Final = 0.02

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    ("CREATE TABLE load_settings (ref TEXT PRIMARY KEY, settings_json TEXT NOT NULL) STRICT",),
    (
        "CREATE TABLE loads (id INTEGER PRIMARY KEY, at_s REAL NOT NULL, file TEXT NOT NULL,"
        " size_bytes INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, library TEXT NOT NULL,"
        " driver TEXT NOT NULL, load_json TEXT NOT NULL, is_on_gpus INTEGER NOT NULL, compute_ratio REAL)"
        " STRICT",
        "CREATE INDEX loads_by_file ON loads (file)",
        "CREATE TABLE load_bytes (load_id INTEGER NOT NULL REFERENCES loads ON DELETE CASCADE,"
        " device TEXT NOT NULL, kind TEXT NOT NULL, planned_bytes INTEGER NOT NULL, used_bytes INTEGER,"
        " PRIMARY KEY (load_id, device, kind)) STRICT",
        "CREATE TABLE speeds (id INTEGER PRIMARY KEY, at_s REAL NOT NULL, file TEXT NOT NULL,"
        " size_bytes INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, library TEXT NOT NULL,"
        " driver TEXT NOT NULL, placed TEXT NOT NULL, tokens_per_s REAL NOT NULL) STRICT",
        "CREATE INDEX speeds_by_file ON speeds (file, placed)",
    ),
    (
        "CREATE TABLE summary_parts (key TEXT PRIMARY KEY, sha256 TEXT NOT NULL, text TEXT NOT NULL,"
        " prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, at_s REAL NOT NULL) STRICT",
        "CREATE INDEX summary_parts_by_document ON summary_parts (sha256)",
    ),
    (
        "CREATE TABLE documents (id INTEGER PRIMARY KEY, sha256 TEXT NOT NULL UNIQUE, name TEXT NOT NULL,"
        " kind TEXT NOT NULL, title TEXT NOT NULL, language TEXT NOT NULL, n_pages INTEGER NOT NULL,"
        " n_chars INTEGER NOT NULL, n_tokens INTEGER NOT NULL, at_s REAL NOT NULL, reader INTEGER NOT NULL,"
        " document_json TEXT NOT NULL) STRICT",
        "CREATE TABLE document_places (path TEXT NOT NULL, document_id INTEGER NOT NULL"
        " REFERENCES documents ON DELETE CASCADE, collection TEXT NOT NULL, size_bytes INTEGER NOT NULL,"
        " mtime_ns INTEGER NOT NULL, PRIMARY KEY (path, collection)) STRICT",
        "CREATE INDEX document_places_by_document ON document_places (document_id)",
        "CREATE TABLE pieces (id INTEGER PRIMARY KEY, document_id INTEGER NOT NULL"
        " REFERENCES documents ON DELETE CASCADE, number INTEGER NOT NULL, piece_json TEXT NOT NULL,"
        " UNIQUE (document_id, number)) STRICT",
        "CREATE VIRTUAL TABLE piece_terms USING fts5(headings, terms,"
        " tokenize = \"unicode61 remove_diacritics 0 tokenchars '-_./:,&'\")",
        "INSERT INTO piece_terms (piece_terms, rank) VALUES ('rank', 'bm25(2.0, 1.0)')",
        "CREATE TABLE piece_vectors (piece_id INTEGER NOT NULL REFERENCES pieces ON DELETE CASCADE,"
        " model TEXT NOT NULL, vector BLOB NOT NULL, PRIMARY KEY (piece_id, model)) STRICT",
    ),
)
"""What makes version 1 of the tables, what makes version 2 of them, and so on, as single statements. What was
released is never changed: a new version is added."""


def connect(config: Config) -> sqlite3.Connection:
    """A connection with all tables there, made or brought up to date where they were not. To be closed by
    the caller, and used in this thread alone; each statement outside `transaction` stands for itself.

    Raises DatabaseError where the file cannot be used, or was written by a newer version.
    """
    path = config.paths.data / FILE
    with _translated(path):
        connection = _open(path)
        try:
            _migrate(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def reading(config: Config) -> Iterator[sqlite3.Connection]:
    """A connection of its own to read from, which waits for nobody. Raises DatabaseError, also for what
    SQLite raises inside the block."""
    connection = connect(config)
    try:
        with _translated(config.paths.data / FILE):
            yield connection
    finally:
        connection.close()


@contextmanager
def session(config: Config) -> Iterator[sqlite3.Connection]:
    """One transaction on a connection of its own: kept when the block ends well, else undone as a whole.

    Raises DatabaseError, also for what SQLite raises inside the block.
    """
    connection = connect(config)
    try:
        with _translated(config.paths.data / FILE), transaction(connection):
            yield connection
    finally:
        connection.close()


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is written in the block, or nothing of it. Other writers wait. Raises sqlite3.Error."""
    # Immediate: a reader that becomes a writer later may find that it has to fail.
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with suppress(sqlite3.Error):  # a full disk has undone it already
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    # For its owner's eyes alone; what SQLite writes beside it is given the same rights.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    connection = sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None)
    try:
        _use_write_ahead_log(connection)
        connection.execute("PRAGMA synchronous = NORMAL")  # safe with that log, but for the last commits
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten
    except BaseException:
        connection.close()
        raise
    return connection


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """SQLite does not wait when two processes make this change at once, so the waiting is ours."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_at:
                raise
            time.sleep(_POLL_S)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    if _version(connection, path) == len(MIGRATIONS):
        return
    with transaction(connection):
        done = _version(connection, path)  # another process may have been first
        for statements in MIGRATIONS[done:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _version(connection: sqlite3.Connection, path: Path) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > len(MIGRATIONS):
        raise DatabaseError(
            f"{path} was written by a newer NemoLocal.", hint="Update NemoLocal, or move the file away."
        )
    return version


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """What SQLite and the file system say, as one line."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        is_broken = getattr(error, "sqlite_errorcode", 0) & 0xFF in (
            sqlite3.SQLITE_CORRUPT,
            sqlite3.SQLITE_NOTADB,
        )
        hint = (
            "Move the file away; a new one is made." if is_broken else "Check the folder's rights and space."
        )
        raise DatabaseError(f"The database {path} cannot be used: {reason}.", hint=hint) from None
