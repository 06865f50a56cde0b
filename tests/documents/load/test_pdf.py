"""PDF: reading order, words that were parted, running heads, outline and labels, and broken files."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemolocal.documents.limits import Limits
from nemolocal.documents.load import load, ocr
from nemolocal.documents.parts import Document
from nemolocal.errors import DocumentError
from tests.documents import pdfs

NO_OCR = Limits(ocr=False)


def read(path: Path, **options: object) -> Document:
    return load(path, limits=NO_OCR, **options)  # type: ignore[arg-type]


def refused(path: Path, **options: object) -> DocumentError:
    with pytest.raises(DocumentError) as caught:
        read(path, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_words_that_lines_have_parted(tmp_path: Path) -> None:
    text = ["The committee dis-", "cussed the infor-", "mation budget of 4711 crowns. A well-"]
    text += ["known example is the mother-in-law."]
    said = read(pdfs.write(tmp_path / "a.pdf", [pdfs.lines(text)])).text
    assert said == (
        "The committee discussed the information budget of 4711 crowns. "
        "A well-known example is the mother-in-law."
    )


def test_columns_are_read_one_after_the_other(tmp_path: Path) -> None:
    def draw(canvas: object) -> None:
        left = ["LEFT one alpha", "LEFT two bravo", "LEFT three charlie"]
        right = ["RIGHT one delta", "RIGHT two echo", "RIGHT three foxtrot"]
        for n, (a, b) in enumerate(zip(left, right, strict=True)):  # row by row, as some programs write
            canvas.drawString(72, 760 - 14 * n, a)  # type: ignore[attr-defined]
            canvas.drawString(320, 760 - 14 * n, b)  # type: ignore[attr-defined]

    said = read(pdfs.write(tmp_path / "a.pdf", [draw])).text
    assert said.rindex("LEFT") < said.index("RIGHT")
    assert said.index("alpha") < said.index("charlie") < said.index("delta") < said.index("foxtrot")


def test_short_cells_side_by_side_are_rows_of_a_table(tmp_path: Path) -> None:
    rows = [("Part", "Torque"), ("M6", "9 Nm"), ("M8", "22 Nm"), ("M10", "44 Nm")]

    def draw(canvas: object) -> None:
        for n, (a, b) in enumerate(rows):
            canvas.drawString(72, 760 - 14 * n, a)  # type: ignore[attr-defined]
            canvas.drawString(250, 760 - 14 * n, b)  # type: ignore[attr-defined]

    document = read(pdfs.write(tmp_path / "a.pdf", [draw]))
    assert [block.kind for block in document.blocks] == ["table"]
    assert "M8 | 22 Nm" in document.text.splitlines()


def test_running_heads_go_and_a_sentence_runs_over_the_break(tmp_path: Path) -> None:
    pages = []
    for n in range(1, 10):
        head = pdfs.lines([f"Page {n} of 9 CONFIDENTIAL"], y=810, size=9)
        text = [f"Page number {n} tells of something else, such as the word w{n * n}.", "It ends here."]
        if n == 4:
            text.append("The sentence that begins on this page goes on to say that the treasure")
        if n == 5:
            text.insert(0, "is buried under the old oak tree. So much for that.")
        pages.append(pdfs.both(head, pdfs.lines(text)))
    document = read(pdfs.write(tmp_path / "a.pdf", pages))
    assert "CONFIDENTIAL" not in document.text
    assert "that the treasure is buried under the old oak tree." in document.text
    whole = next(block for block in document.blocks if "treasure" in block.text)
    assert (whole.page, whole.last_page) == (4, 5)
    assert all(f"w{n * n}." in document.text for n in range(1, 10))


def test_ligatures_are_spelt_out() -> None:
    from nemolocal.documents.load.prose import LIGATURES

    assert "oﬃce ﬁle eﬃcient ﬂow".translate(LIGATURES) == "office file efficient flow"


def test_the_outline_names_the_headings(tmp_path: Path) -> None:
    def draw(canvas: object) -> None:
        canvas.bookmarkPage("one")  # type: ignore[attr-defined]
        canvas.addOutlineEntry("1 Scope", "one", level=0)  # type: ignore[attr-defined]
        pdfs.lines(["1 Scope", "What follows is about scope and so on."])(canvas)

    document = read(pdfs.write(tmp_path / "a.pdf", [draw]))
    assert document.has_outline
    assert (document.blocks[0].kind, document.blocks[0].text) == ("heading", "1 Scope")


def test_without_an_outline_larger_lines_are_headings(tmp_path: Path) -> None:
    body = [f"A line of the text that stands below it, the {n}th." for n in range(6)]
    page = pdfs.both(pdfs.lines(["Results"], size=18), pdfs.lines(body, y=720))
    document = read(pdfs.write(tmp_path / "a.pdf", [page]))
    assert [block.text for block in document.blocks if block.kind == "heading"] == ["Results"]
    assert not document.has_outline


def test_pages_without_text_are_named(tmp_path: Path) -> None:
    pages = [pdfs.lines(["The harbour code is QUARTZ-88."]), *[pdfs.picture] * 4]
    document = read(pdfs.write(tmp_path / "a.pdf", pages))
    assert document.text == "The harbour code is QUARTZ-88."
    assert [each.page for each in document.not_read] == [2, 3, 4, 5]
    assert "tesseract" in document.not_read[0].why or "OCR" in document.not_read[0].why


@pytest.mark.parametrize("draw", [pdfs.blank, pdfs.picture])
def test_a_scan_is_refused_by_name(tmp_path: Path, draw: pdfs.Draw) -> None:
    error = refused(pdfs.write(tmp_path / "scan.pdf", [draw] * 3))
    assert error.kind == "empty"
    assert "scan.pdf" in error.message
    assert "text layer" in error.message


def test_with_tesseract_pictures_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "tesseract"
    program.write_text("#!/bin/sh\ncat >/dev/null\nprintf 'Read from\\nthe picture.\\n'\n")
    program.chmod(0o755)
    monkeypatch.setattr(ocr, "PROGRAM", str(program))
    pages = [pdfs.lines(["Page one is text."]), pdfs.picture, pdfs.lines(["Page three, too."])]
    document = load(pdfs.write(tmp_path / "a.pdf", pages))
    assert document.n_ocr_pages == 1
    assert not document.not_read
    [read_by_it] = [block for block in document.blocks if block.page == 2]
    assert "the picture." in read_by_it.text


def test_why_tesseract_read_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "tesseract"
    program.write_text("#!/bin/sh\ncat >/dev/null\necho 'no language xyz' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(ocr, "PROGRAM", str(program))
    document = load(pdfs.write(tmp_path / "a.pdf", [pdfs.lines(["Text."]), pdfs.picture]))
    assert "no language xyz" in document.not_read[0].why


def test_a_password_is_asked_for(tmp_path: Path) -> None:
    path = pdfs.write(tmp_path / "a.pdf", [pdfs.lines(["Secret words."])], encrypt="geheim")
    assert refused(path).kind == "encrypted"
    assert "wrong" in refused(path, password="other").message
    assert read(path, password="geheim").text == "Secret words."


def test_broken_files_are_one_line(tmp_path: Path) -> None:
    whole = pdfs.write(tmp_path / "a.pdf", [pdfs.lines(["Some words."])] * 3).read_bytes()
    for name, data in {"cut": whole[:300], "junk": b"%PDF-1.7\n" + bytes(range(256)) * 50}.items():
        path = tmp_path / f"{name}.pdf"
        path.write_bytes(data)
        assert refused(path).kind in ("damaged", "empty"), name


def test_more_pages_than_are_read(tmp_path: Path) -> None:
    path = pdfs.write(tmp_path / "a.pdf", [pdfs.lines(["Words."])] * 4)
    with pytest.raises(DocumentError) as caught:
        load(path, limits=Limits(max_pages=3, ocr=False))
    assert caught.value.kind == "too_large"


def test_the_name_does_not_matter(tmp_path: Path) -> None:
    path = pdfs.write(tmp_path / "a.txt", [pdfs.lines(["Words of a PDF."])])
    assert (read(path).kind, read(path).text) == ("pdf", "Words of a PDF.")


def test_a_font_that_is_not_in_the_file(tmp_path: Path) -> None:
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.cidfonts import UnicodeCIDFont

    pdfmetrics.registerFont(UnicodeCIDFont("STSong-Light"))
    text = ["港口的代码是石英八十八号，由委员会在三月决定。", "合同的价格为四千七百一十一克朗，不含税费。"]
    said = read(pdfs.write(tmp_path / "a.pdf", [pdfs.lines(text, font="STSong-Light")])).text
    for sentence in text:
        assert sentence in said.replace(" ", "").replace("\n", "")


def test_hyphens_that_belong_to_words_stay(tmp_path: Path) -> None:
    text = ["It was state-of-the-", "art when the North-", "South line of 2019-", "2020 sent an e-"]
    text += ["mail on pre-", "and post-war agree-", "ments."]
    said = read(pdfs.write(tmp_path / "a.pdf", [pdfs.lines(text)])).text
    assert said == (
        "It was state-of-the-art when the North-South line of 2019-2020 sent an e-mail on pre- "
        "and post-war agreements."
    )


def test_a_table_with_long_cells_is_no_columns(tmp_path: Path) -> None:
    rows = [("Name of the part", "What it is good for", "Price")]
    rows += [(f"Hex bolt M{n} zinc", f"Holds plates of {n} mm together", f"0.{n}") for n in range(3, 9)]
    columns = [pdfs.lines([row[n] for row in rows], x=x) for n, x in enumerate((72, 220, 450))]
    document = read(pdfs.write(tmp_path / "a.pdf", [pdfs.both(*columns)]))
    assert [block.kind for block in document.blocks] == ["table"]
    assert document.text.splitlines() == [" | ".join(row) for row in rows]


def test_a_table_within_a_column_of_prose_stays_in_it(tmp_path: Path) -> None:
    prose = [f"and so line {n} of the left text goes on" for n in range(8)]
    draws = [pdfs.lines(prose, x=50), *(pdfs.lines([f"{c}{n}" for n in range(8)], x=x) for c, x in
             (("Alpha one two ", 330), ("v", 480)))]  # fmt: skip
    said = read(pdfs.write(tmp_path / "a.pdf", [pdfs.both(*draws)])).text
    assert said.index("line 7") < said.index("Alpha one two 0 | v0")


def test_left_and_right_pages_have_heads_of_their_own(tmp_path: Path) -> None:
    pages = [
        pdfs.both(
            pdfs.lines(["Book title" if n % 2 else "Name of a chapter"], y=810, size=9),
            pdfs.lines([f"Page {'abcdefgh'[n]} has words.", "And more of them."]),
        )
        for n in range(8)
    ]
    said = read(pdfs.write(tmp_path / "a.pdf", pages)).text
    assert "Book title" not in said
    assert "chapter" not in said
    assert all(f"Page {letter} has words." in said for letter in "abcdefgh")


def test_a_wide_table_of_figures_is_read_row_by_row(tmp_path: Path) -> None:
    columns = [pdfs.lines([f"{r}.{c}" for r in range(30)], x=40 + 50 * c, size=8) for c in range(10)]
    document = read(pdfs.write(tmp_path / "a.pdf", [pdfs.both(*columns)]))
    assert document.text.splitlines() == [" | ".join(f"{r}.{c}" for c in range(10)) for r in range(30)]
