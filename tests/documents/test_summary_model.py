"""A long PDF read, kept and summarised by the real program and engine, and killed on the way."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests import synthetic
from tests.documents import pdfs

pytestmark = pytest.mark.model

N_PAGES = 300
WORDS = ("the", "party", "shall", "deliver", "goods", "within", "thirty", "days", "of", "notice")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = replace(synthetic.TINY["llama"], n_ctx_train=8192)
    return synthetic.write(tmp_path_factory.mktemp("model") / "tiny.gguf", shape)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(7)

    def page(n: int) -> pdfs.Draw:
        text = [f"Article {n}. " + " ".join(rng.choices(WORDS, k=8)), " ".join(rng.choices(WORDS, k=9)) + "."]
        return pdfs.lines(text)

    return pdfs.write(tmp_path_factory.mktemp("book") / "book.pdf", [page(n) for n in range(1, N_PAGES + 1)])


def command(book: Path, model: Path) -> list[str]:
    words = ["summarize", str(book), "--model", str(model), "--length", "short", "--json"]
    return [sys.executable, "-m", "nemolocal.cli.app", *words, "--ctx", "8192", "--slots", "4", "--offline"]


def parts(home: Path) -> dict[str, float]:
    """The parts that are kept, and when each was written."""
    path = home / "data" / "nemolocal.db"
    if not path.exists():
        return {}
    with sqlite3.connect(path) as connection:
        try:
            return dict(connection.execute("SELECT key, at_s FROM summary_parts"))
        except sqlite3.OperationalError:
            return {}


def test_killed_and_begun_again(book: Path, model: Path, home: Path) -> None:
    """Each part is written once, and the record of what was read is the list of the pages."""
    environment = os.environ | {"NEMOLOCAL_HOME": str(home)}
    running = subprocess.Popen(
        command(book, model), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    n_wanted = random.randint(1, 5)
    try:
        until = time.monotonic() + 200
        while len(parts(home)) < n_wanted:
            assert running.poll() is None, "it ended before it was killed"
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        running.kill()
        running.wait(10)
    before = parts(home)
    done = subprocess.run(
        command(book, model), env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)["documents"][0]
    coverage = summary["coverage"]
    assert coverage["read"] == list(range(1, N_PAGES + 1))
    assert coverage["skipped"] == []
    assert coverage["pieces"] == coverage["pieces_read"] > 20
    assert summary["reused_parts"] >= n_wanted
    after = parts(home)
    assert {key: after[key] for key in before} == before
    assert len(after) > len(before)
    again = subprocess.run(
        command(book, model), env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert json.loads(again.stdout)["documents"][0]["summary"] == summary["summary"]
    assert parts(home) == after
