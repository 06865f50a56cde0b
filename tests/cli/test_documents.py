"""`nemolocal ask` and `nemolocal summarize`: what is printed, the JSON, and files that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, is_one_error
from tests.documents import pdfs
from tests.fakes import FakeService


@pytest.fixture
def note(tmp_path: Path) -> Path:
    path = tmp_path / "note.txt"
    path.write_text("The harbour code is QUARTZ-88.\n\nThe mayor lives on the hill.")
    return path


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    return pdfs.write(tmp_path / "scan.pdf", [pdfs.blank] * 2)


def test_an_answer_and_what_it_rests_on(cli: Cli, service: FakeService, note: Path) -> None:
    service.model.pieces = ("It is ", '"The harbour code is QUARTZ-88." ', "[1]")
    asked = cli("ask", note, "-q", "What is the code?")
    assert asked.code == 0, asked.err
    assert asked.out.startswith('It is "The harbour code is QUARTZ-88." [1]\n')
    assert "- [1] note.txt, lines 1–3: “The harbour code is QUARTZ-88.”" in asked.out
    assert "The documents: read whole." in asked.err


def test_a_quote_that_is_not_there_is_marked(cli: Cli, service: FakeService, note: Path) -> None:
    service.model.pieces = ('It is "GRANITE-99 and more" [1].',)
    asked = cli("ask", note, "-q", "What is the code?", "--json")
    [citation] = json.loads(asked.out)["citations"]
    assert citation["verified"] is False
    assert "supports this answer" in cli("ask", note, "-q", "What is the code?").err


def test_json_of_an_answer(cli: Cli, service: FakeService, note: Path) -> None:
    service.model.pieces = ("The harbour code is QUARTZ-88 [1].",)
    answer = json.loads(cli("ask", note, "-q", "What is the code?", "--json").out)
    assert (answer["answer"], answer["mode"]) == ("The harbour code is QUARTZ-88 [1].", "whole")
    [citation] = answer["citations"]
    assert (citation["document"], citation["page"], citation["verified"]) == ("note.txt", 1, True)
    assert answer["not_read"] == []
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.usefixtures("service")
def test_passages_without_a_model(cli: Cli, note: Path) -> None:
    shown = cli("ask", note, "-q", "Who lives on the hill?", "--passages-only")
    assert shown.code == 0
    assert "note.txt, lines 1–3" in shown.out
    assert "The mayor lives on the hill." in shown.out
    [passage] = json.loads(cli("ask", note, "-q", "harbour", "--passages-only", "--json").out)["passages"]
    assert (passage["document"], passage["page_from"], passage["page_to"]) == ("note.txt", 1, 1)
    assert passage["score"] > 0
    nothing = cli("ask", note, "-q", "zebra", "--passages-only")
    assert "has to do with the question" in nothing.out


def test_what_cannot_be_read_is_told_and_the_rest_is_answered(
    cli: Cli, service: FakeService, note: Path, scan: Path
) -> None:
    service.model.pieces = ("The harbour code is QUARTZ-88.",)
    asked = cli("ask", note, scan, "missing.pdf", "-q", "What is the code?")
    assert asked.code == 1
    assert "QUARTZ-88" in asked.out
    errors = [line for line in asked.err.splitlines() if line.startswith("error: ")]
    assert ["scan.pdf" in errors[0], "missing.pdf" in errors[1]] == [True, True]
    assert len(errors) == 2


def test_nothing_readable_asks_no_model(cli: Cli, service: FakeService, scan: Path) -> None:
    asked = cli("ask", scan, "-q", "What is the code?")
    assert asked.code == 1
    assert "no readable document" in asked.out
    assert service.model.calls == []
    assert is_one_error(cli("ask", scan, "-q", "  "), 2)


def test_a_summary_and_its_record(cli: Cli, service: FakeService, note: Path, tmp_path: Path) -> None:
    service.model.pieces = ("A harbour ", "and a mayor.")
    made = cli("summarize", note)
    assert made.code == 0, made.err
    assert made.out.startswith("# note.txt\n\nA harbour and a mayor.")
    assert "note.txt: 1 of 1 pages read, 1 of 1 pieces" in made.err
    written = cli("summarize", note, "-o", tmp_path / "out.md", "--length", "long", "--focus", "harbours")
    assert (written.code, written.out) == (0, "")
    assert "A harbour" in (tmp_path / "out.md").read_text()
    [found] = json.loads(cli("summarize", note, "--json").out)["documents"]
    assert found["path"] == str(note)
    assert found["coverage"] == {"pages": 1, "read": [1], "skipped": [], "pieces": 1, "pieces_read": 1}


def test_several_summaries_and_one_over_all(
    cli: Cli, service: FakeService, note: Path, scan: Path, tmp_path: Path
) -> None:
    service.model.pieces = ("Said.",)
    (tmp_path / "b.md").write_text("# Head\n\nMore words.")
    made = cli("summarize", note, tmp_path / "b.md", scan, "--json")
    assert made.code == 1  # one of the three was not read
    result = json.loads(made.out)
    assert len(result["documents"]) == 2
    assert result["overall"] == "Said."


@pytest.mark.parametrize(
    "arguments", [("--length", "huge"), ("-o", "/nowhere/at/all.md"), ("-o", "."), ("--password",)]
)
@pytest.mark.usefixtures("service")
def test_wrong_use_is_told_before_the_work(cli: Cli, note: Path, arguments: tuple[str, ...]) -> None:
    assert is_one_error(cli("summarize", note, *arguments), 2)
