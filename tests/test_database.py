"""The database: made, brought up to date, shared by processes, and what is said where it cannot be used."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from nemolocal import config, database
from nemolocal.errors import DatabaseError

TABLES = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'load_settings'"


def db_path() -> Path:
    return config.load().paths.data / database.FILE


def test_a_first_connection_makes_file_and_tables() -> None:
    with closing(database.connect(config.load())) as connection:
        assert connection.execute(TABLES).fetchone() == (1,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA user_version").fetchone() == (len(database.MIGRATIONS),)
    if os.name == "posix":
        assert db_path().stat().st_mode & 0o077 == 0


def test_a_session_keeps_all_or_nothing() -> None:
    settings = config.load()

    def write(*refs: str, then: type[Exception] | None = None) -> None:
        with database.session(settings) as connection:
            for ref in refs:
                connection.execute("INSERT INTO load_settings VALUES (?, '{}')", (ref,))
            if then:
                raise then

    write("a")
    with pytest.raises(ZeroDivisionError):
        write("b", then=ZeroDivisionError)
    with pytest.raises(DatabaseError, match="UNIQUE"):
        write("c", "a")
    with database.session(settings) as connection:
        assert connection.execute("SELECT ref FROM load_settings").fetchall() == [("a",)]


def test_an_older_file_is_brought_up_to_date_with_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config.load()
    with database.session(settings) as connection:
        connection.execute("INSERT INTO load_settings VALUES ('a', '{}')")
    more = ("CREATE TABLE later (id INTEGER)", "INSERT INTO later VALUES (7)")
    monkeypatch.setattr(database, "MIGRATIONS", (*database.MIGRATIONS, more))
    for _ in range(2):
        with database.session(settings) as connection:
            assert connection.execute("SELECT ref FROM load_settings").fetchall() == [("a",)]
            assert connection.execute("SELECT id FROM later").fetchall() == [(7,)]


def test_a_step_that_fails_leaves_the_older_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config.load()
    database.connect(settings).close()
    before = database.MIGRATIONS
    broken = ("CREATE TABLE later (id INTEGER)", "CREATE TABLE later (id INTEGER)")
    monkeypatch.setattr(database, "MIGRATIONS", (*before, broken))
    with pytest.raises(DatabaseError, match="already exists"):
        database.connect(settings)
    monkeypatch.setattr(database, "MIGRATIONS", before)
    with closing(database.connect(settings)) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'later'").fetchone() == (
            0,
        )


def test_a_newer_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config.load()
    database.connect(settings).close()
    monkeypatch.setattr(database, "MIGRATIONS", ())
    with pytest.raises(DatabaseError, match="newer NemoLocal"):
        database.connect(settings)


def test_a_broken_file_is_one_line_with_a_way_out() -> None:
    db_path().parent.mkdir(parents=True)
    db_path().write_bytes(b"no database at all" * 100)
    with pytest.raises(DatabaseError) as caught:
        database.connect(config.load())
    assert "\n" not in str(caught.value)
    assert "Move the file away" in caught.value.hint


def test_a_folder_that_cannot_be_made_is_one_line() -> None:
    folder = db_path().parent
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    with pytest.raises(DatabaseError, match="cannot be used"):
        database.connect(config.load())


def test_a_writer_that_waits_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "PATIENCE_S", 0.05)
    settings = config.load()
    with (
        database.session(settings),
        pytest.raises(DatabaseError, match="locked"),
        database.session(settings),
    ):
        pass


WRITER = """
from nemolocal import config, database
settings = config.load()
for n in range(20):
    with database.session(settings) as connection:
        found = connection.execute("SELECT settings_json FROM load_settings WHERE ref = 'n'").fetchone()
        value = int(found[0]) + 1 if found else 1
        connection.execute("INSERT OR REPLACE INTO load_settings VALUES ('n', ?)", (str(value),))
"""


def test_processes_that_begin_and_write_at_once_lose_nothing() -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER], stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for writer in writers:
        _, said = writer.communicate(timeout=60)
        assert writer.returncode == 0, said
    with closing(sqlite3.connect(db_path())) as connection:
        assert connection.execute("SELECT settings_json FROM load_settings").fetchone() == ("80",)
