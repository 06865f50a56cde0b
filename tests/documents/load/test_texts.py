"""Texts of all kinds, and files that are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemolocal.documents.limits import Limits
from nemolocal.documents.load import load
from nemolocal.documents.parts import Document
from nemolocal.errors import DocumentError


def put(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def refused(path: Path, limits: Limits | None = None) -> DocumentError:
    with pytest.raises(DocumentError) as caught:
        load(path, limits=limits)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"]
)
def test_any_encoding(tmp_path: Path, encoding: str) -> None:
    text = "Die Größe der Tür beträgt zwölf Meter, und das Café öffnet früh.\n" * 20
    assert "Größe der Tür" in load(put(tmp_path, "a.txt", text.encode(encoding))).text


def test_parts_are_called_by_their_lines(tmp_path: Path) -> None:
    document = load(put(tmp_path, "a.txt", "\n\n".join(f"Line {n}." for n in range(1, 151))))
    assert document.n_pages == 3
    assert document.where(2) == "lines 101–200"
    assert document.where(1, 2) == "lines 1–200"
    at = next(block for block in document.blocks if block.text == "Line 60.")
    assert at.page == 2


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.pdf", "a.docx", "a.html", "a.csv"])
@pytest.mark.parametrize("data", [b"", b"  \n\t \n"])
def test_empty_files(tmp_path: Path, name: str, data: bytes) -> None:
    assert refused(put(tmp_path, name, data)).kind == "empty"


def test_one_line_that_is_very_long(tmp_path: Path) -> None:
    document = load(put(tmp_path, "a.txt", b"words and more " * 200_000))
    assert sum(len(block.text) for block in document.blocks) > 2_900_000
    assert max(len(block.text) for block in document.blocks) < 10_000
    assert refused(put(tmp_path, "b.txt", b"x" * 5000), Limits(max_chars=1000)).kind == "too_large"


def test_markdown(tmp_path: Path) -> None:
    text = "# Title\n\nSome words.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    text += "```py\nx = 1\n\ny = 2\n```\n- one\n- two\n"
    document = load(put(tmp_path, "a.md", text))
    kinds = [(block.kind, block.text) for block in document.blocks]
    assert kinds == [
        ("heading", "Title"),
        ("paragraph", "Some words."),
        ("table", "a | b\n1 | 2"),
        ("code", "x = 1\n\ny = 2"),
        ("list", "- one\n- two"),
    ]
    assert document.title == "Title"


def test_code_is_cut_where_something_begins(tmp_path: Path) -> None:
    functions = [f"def f{n}(x):\n" + "    x += 1\n" * 10 for n in range(8)]
    document = load(put(tmp_path, "a.py", "\n\n".join(functions)))
    assert {block.kind for block in document.blocks} == {"code"}
    assert all(block.text.startswith("def f") for block in document.blocks)


def test_mail(tmp_path: Path) -> None:
    lines = [
        "From: a@example.org",
        "To: b@example.org",
        "Subject: =?utf-8?q?Gr=C3=BC=C3=9Fe?=",
        "MIME-Version: 1.0",
        'Content-Type: multipart/mixed; boundary="x"',
        "",
        "--x",
        "Content-Type: text/plain",
        "",
        "The body.",
        "--x",
        "Content-Type: application/pdf",
        'Content-Disposition: attachment; filename="../plan.pdf"',
        "",
        "%PDF",
        "--x--",
        "",
    ]
    text = "\r\n".join(lines)
    document = load(put(tmp_path, "a.eml", text))
    assert "Subject: Grüße" in document.text
    assert "The body." in document.text
    assert "plan.pdf" in document.not_read[0].why


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.docx", b"PK\x03\x04" + bytes(100), "damaged"),
        ("a.docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "old Office file"),
        ("a.txt", b"\x89PNG\r\n\x1a\n" + bytes(50), "image"),
        ("a.txt", b"{\\rtf1 x}", "RTF"),
        ("a.txt", bytes(range(1, 9)) * 500, "no text"),
        ("a.bin", os.urandom(4000).replace(b"\n", b"x"), ""),
        ("a.zip", b"PK\x05\x06" + bytes(18), "ZIP archive"),
    ],
)
def test_files_that_are_no_texts(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    error = refused(put(tmp_path, name, data))
    assert error.kind in ("unsupported", "damaged")
    assert words in str(error)


def test_names_are_shown_without_tricks(tmp_path: Path) -> None:
    document: Document = load(put(tmp_path, "a.txt", "Words."), name="in\x1b[31mvoice\u202efdp.txt\n")
    assert document.name == "in[31mvoicefdp.txt"


def test_what_is_no_file(tmp_path: Path) -> None:
    assert refused(tmp_path / "missing.txt").kind == "missing"
    assert refused(tmp_path).kind == "unsupported"
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert refused(tmp_path / "pipe").kind == "unsupported"
    large = put(tmp_path, "large.txt", b"x" * 2000)
    assert refused(large, Limits(max_file_bytes=1000)).kind == "too_large"


def test_what_tells_the_encoding_may_come_late(tmp_path: Path) -> None:
    data = b"Plain words in here.\n" * 6000 + "Die Größe der Tür in Köln.\n".encode("cp1252") * 30
    assert "Größe der Tür in Köln." in load(put(tmp_path, "a.txt", data)).text


def test_a_long_line_is_cut_without_a_loss() -> None:
    from nemolocal.documents.load.text import N_LONG_LINE, paragraphs

    for text in ("word and more. " * 5000, "x" * 50_000, "y" * 9000 + " " + "z" * 9000, " " * 20_000 + "a"):
        parts = [block.text for _, block in paragraphs(text)]
        assert "".join("".join(parts).split()) == "".join(text.split())
        assert all(part.strip() and len(part) <= N_LONG_LINE for part in parts)


def test_a_path_with_tricks_is_shown_without(tmp_path: Path) -> None:
    assert "\x1b" not in refused(tmp_path / "no\x1b[31m.pdf").message
    assert refused(Path("a\0b.txt")).kind == "missing"
