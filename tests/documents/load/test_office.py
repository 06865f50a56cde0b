"""Office files, tables, pages and books: what is in them is read in order, what is hidden is not, and packed
files stay within bounds."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from nemolocal.documents import split
from nemolocal.documents.limits import Limits
from nemolocal.documents.load import load
from nemolocal.errors import DocumentError

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def refused(path: Path, limits: Limits | None = None) -> DocumentError:
    with pytest.raises(DocumentError) as caught:
        load(path, limits=limits)
    assert "\n" not in str(caught.value)
    return caught.value


def rewritten(path: Path, changes: dict[str, bytes]) -> Path:
    """A packed file with other or more files in it."""
    with zipfile.ZipFile(path) as packed:
        held = {name: packed.read(name) for name in packed.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in (held | changes).items():
            packed.writestr(name, data)
    return path


def docx(path: Path) -> Path:
    import docx as library

    made = library.Document()
    made.sections[0].header.paragraphs[0].text = "Contract 7781"
    made.add_heading("Assembly", 1)
    made.add_paragraph("Before.")
    table = made.add_table(3, 2)
    for row, cells in zip(table.rows, (("Part", "Torque"), ("M6", "9 Nm"), ("M8", "22 Nm")), strict=True):
        row.cells[0].text, row.cells[1].text = cells
    table.cell(2, 1).add_table(1, 1).cell(0, 0).text = "NESTED-5"
    made.add_paragraph("After.")
    made.add_page_break()
    made.add_paragraph("On the second page.")
    made.save(str(path))
    return path


def test_docx_in_its_order(tmp_path: Path) -> None:
    document = load(docx(tmp_path / "a.docx"))
    text = document.text
    assert text.index("Before.") < text.index("Part | Torque") < text.index("After.")
    assert "M8 | 22 Nm" in text.splitlines()
    assert "NESTED-5" in text
    assert "Contract 7781" in text
    assert [block.text for block in document.blocks if block.kind == "heading"] == ["Assembly"]
    assert next(block.page for block in document.blocks if block.text == "On the second page.") == 2
    assert document.n_pages == 2


def test_docx_footnotes_boxes_and_deletions(tmp_path: Path) -> None:
    path = docx(tmp_path / "a.docx")
    with zipfile.ZipFile(path) as packed:
        body = packed.read("word/document.xml").decode()
        types = packed.read("[Content_Types].xml").decode()
        rels = packed.read("word/_rels/document.xml.rels").decode()
    more = (
        "<w:p><w:r><w:t>Said</w:t></w:r><w:r><w:footnoteReference w:id='2'/></w:r>"
        "<w:del><w:r><w:delText>GONE-1</w:delText></w:r></w:del></w:p>"
        "<w:p><w:r><w:pict><w:txbxContent><w:p><w:r><w:t>BOX-6</w:t></w:r></w:p></w:txbxContent></w:pict>"
        "</w:r></w:p>"
    )
    notes = f"<w:footnotes xmlns:w='{W}'><w:footnote w:id='2'><w:p><w:r><w:t>NOTE-7</w:t></w:r></w:p>"
    part = "application/vnd.openxmlformats-officedocument.wordprocessingml.footnotes+xml"
    kind = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/footnotes"
    rewritten(
        path,
        {
            "word/document.xml": body.replace("<w:sectPr", f"{more}<w:sectPr", 1).encode(),
            "word/footnotes.xml": f"{notes}</w:footnote></w:footnotes>".encode(),
            "[Content_Types].xml": types.replace(
                "</Types>", f'<Override PartName="/word/footnotes.xml" ContentType="{part}"/></Types>'
            ).encode(),
            "word/_rels/document.xml.rels": rels.replace(
                "</Relationships>",
                f'<Relationship Id="rId99" Type="{kind}" Target="footnotes.xml"/></Relationships>',
            ).encode(),
        },
    )
    text = load(path).text
    assert "BOX-6" in text
    assert "Footnote 2: NOTE-7" in text
    assert "GONE-1" not in text


def test_docx_within_controls_and_moved(tmp_path: Path) -> None:
    path = docx(tmp_path / "a.docx")
    with zipfile.ZipFile(path) as packed:
        body = packed.read("word/document.xml").decode()

    def said(text: str) -> str:
        return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"

    def control(inside: str) -> str:
        return f"<w:sdt><w:sdtContent>{inside}</w:sdtContent></w:sdt>"

    box = f"<w:p><w:r><w:pict><w:txbxContent>{said('BOX-2')}</w:txbxContent></w:pict></w:r></w:p>"
    row = f"<w:tr><w:tc>{control(said('CELL-1'))}</w:tc><w:tc>{said('b')}{box}</w:tc></w:tr>"
    more = (
        f"<w:tbl>{row}{control(row.replace('CELL-1', 'ROW-3').replace('BOX-2', 'BOX-4'))}</w:tbl>"
        f"<w:customXml>{said('CUSTOM-5')}</w:customXml>"
        "<w:p><w:moveFrom><w:r><w:t>MOVED-6</w:t></w:r></w:moveFrom><w:r><w:t>stays</w:t></w:r></w:p>"
    )
    changed = body.replace("<w:sectPr", f"{more}<w:sectPr", 1).encode()
    lines = load(rewritten(path, {"word/document.xml": changed})).text.splitlines()
    for text in ("CELL-1 | b", "ROW-3 | b", "BOX-2", "BOX-4", "CUSTOM-5", "stays", "NESTED-5"):
        assert lines.count(text) == 1, text


def test_mail_in_an_encoding_that_nobody_knows(tmp_path: Path) -> None:
    path = tmp_path / "a.eml"
    path.write_bytes("From: a@b.c\nContent-Type: text/plain; charset=x-none\n\nGrüße".encode())
    assert "Grüße" in load(path).text


def test_pptx(tmp_path: Path) -> None:
    import pptx

    deck = pptx.Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[1])
    slide.shapes.title.text = "Plan"
    slide.placeholders[1].text = "First point"
    slide.notes_slide.notes_text_frame.text = "Say it slowly."
    table = deck.slides.add_slide(deck.slide_layouts[6]).shapes.add_table(2, 2, 0, 0, 999, 999).table
    for n, text in enumerate(("Year", "Sales", "2025", "17")):
        table.cell(n // 2, n % 2).text = text
    deck.slides.add_slide(deck.slide_layouts[6])
    deck.save(str(tmp_path / "a.pptx"))
    document = load(tmp_path / "a.pptx")
    assert document.text.startswith("Plan\n\nFirst point")
    assert "Notes: Say it slowly." in document.text
    assert "2025 | 17" in document.text.splitlines()
    assert (document.n_pages, document.where(2)) == (3, "slide 2")
    assert [each.page for each in document.not_read] == [3]


def test_xlsx_and_each_piece_has_the_columns_names(tmp_path: Path) -> None:
    import datetime

    import openpyxl

    book = openpyxl.Workbook()
    book.active.title = "Prices"
    book.active.append(["id", "name", "price", "since"])
    for n in range(400):
        book.active.append([n, f"wood {n}", n * 1.5, datetime.datetime(2026, 1, 2)])
    book.create_sheet("Empty")
    book.save(tmp_path / "a.xlsx")
    document = load(tmp_path / "a.xlsx")
    assert "273 | wood 273 | 409.5 | 2026-01-02" in document.text.splitlines()
    assert document.where(1) == "sheet Prices"
    assert [each.page for each in document.not_read] == [2]
    holding = next(piece for piece in split.split(document) if "wood 273" in piece.text)
    assert "id | name | price | since" in holding.text.splitlines()[:3]


def test_xlsx_says_which_columns_are_left_out(tmp_path: Path) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    for number in (512, 513, 700):
        sheet = book.create_sheet(f"to {number}")
        sheet.cell(1, 1).value, sheet.cell(1, number).value = "first", "last"
    book.save(tmp_path / "a.xlsx")
    said = [each.why for each in load(tmp_path / "a.xlsx").not_read if each.page == 0]
    assert [why.rsplit("sheet ", 1)[1] for why in said] == ["to 513", "to 700"]


@pytest.mark.parametrize("mark", [";", ",", "\t"])
def test_csv_rows_stay_whole(tmp_path: Path, mark: str) -> None:
    rows = [f'{n}{mark}"tree {n}"{mark}"{n},40"' for n in range(400)]
    rows[272] = f'273{mark}Zirbe{mark}"17,40"'
    rows[100] = f'100{mark}"two\nlines {mark} one cell"{mark}"1"'
    text = "\n".join([mark.join(("id", "name", "price")), *rows])
    path = tmp_path / "a.csv"
    path.write_text(text)
    document = load(path)
    assert len(document.text.splitlines()) == 401
    assert f"100 | two lines {mark.strip()} one cell".replace("  ", " ") in document.text.replace("  ", " ")
    holding = next(piece for piece in split.split(document) if "Zirbe" in piece.text)
    assert holding.text.splitlines()[0] == "id | name | price"
    path.write_text("id;name;price\n")
    assert load(path).text == "id | name | price"


def test_html_as_it_is_seen(tmp_path: Path) -> None:
    text = (
        "<!doctype html><html><head><meta charset='gbk'><title>A page</title><style>STYLE-2</style></head>"
        "<body>"
        "<script>SCRIPT-1</script><!-- COMMENT-3 --><noscript>NOSCRIPT-4</noscript><p hidden>HIDDEN-5</p>"
        "<p style='display: none'>HIDDEN-6</p><h1>Head</h1><p>Gr&ouml;&szlig;e 中文</p>loose words"
        "<table><tr><th>Part</th><th>Torque</th></tr><tr><td>M8</td><td>22 Nm</td></tr></table>"
        "<ul><li>one</li><li>two <b>bold</b></li></ul><pre>x = 1\n  y</pre></body></html>"
    )
    path = tmp_path / "a.html"
    path.write_bytes(text.encode("gbk"))
    document = load(path)
    for gone in ("SCRIPT-1", "STYLE-2", "COMMENT-3", "NOSCRIPT-4", "HIDDEN-5", "HIDDEN-6"):
        assert gone not in document.text
    kinds = [(block.kind, block.text) for block in document.blocks]
    assert kinds == [
        ("heading", "Head"),
        ("paragraph", "Größe 中文"),
        ("paragraph", "loose words"),
        ("table", "Part | Torque\nM8 | 22 Nm"),
        ("list", "one"),
        ("list", "two bold"),
        ("code", "x = 1\n  y"),
    ]
    assert document.title == "A page"


def test_html_that_nests_very_deep(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text("<html><body>" + "<div>" * 5000 + "Inside." + "</div>" * 5000)
    assert "Inside." in load(path).text


def epub(path: Path, **more: str) -> Path:
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("mimetype", "application/epub+zip")
        packed.writestr(
            "META-INF/container.xml",
            "<container><rootfiles><rootfile full-path='o/c.opf'/></rootfiles></container>",
        )
        packed.writestr(
            "o/c.opf",
            "<package><metadata><title>Book</title></metadata><manifest><item id='b' href='2.xhtml'/>"
            "<item id='a' href='a%201.xhtml'/></manifest>"
            "<spine><itemref idref='a'/><itemref idref='b'/></spine>"
            "</package>",
        )
        packed.writestr("o/a 1.xhtml", "<html><body><h1>One</h1><p>First.</p></body></html>")
        packed.writestr("o/2.xhtml", "<html><body><p>Second.</p></body></html>")
        for name, text in more.items():
            packed.writestr(name.replace("__", "/").replace("_dot_", "."), text)
    return path


def test_epub_in_reading_order(tmp_path: Path) -> None:
    document = load(epub(tmp_path / "a.epub"))
    assert document.text == "One\n\nFirst.\n\nSecond."
    assert (document.n_pages, document.where(2), document.title) == (2, "chapter 2", "Book")
    locked = epub(tmp_path / "b.epub", **{"META-INF__encryption_dot_xml": "<x Algorithm='aes256-cbc'/>"})
    assert "DRM" in str(refused(locked))


def test_packed_files_stay_within_bounds(tmp_path: Path) -> None:
    bomb = rewritten(docx(tmp_path / "a.docx"), {"word/media/x.xml": bytes(30 << 20)})
    assert refused(bomb).kind == "too_large"
    large = rewritten(docx(tmp_path / "b.docx"), {"word/media/x.bin": bytes(1 << 20)})
    assert refused(large, Limits(max_unpacked_bytes=1 << 19)).kind == "too_large"
    entities = "<!DOCTYPE x [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;'>]><container>&b;</container>"
    bombed = rewritten(epub(tmp_path / "c.epub"), {"META-INF/container.xml": entities.encode()})
    assert refused(bombed).kind == "damaged"
    named = rewritten(docx(tmp_path / "d.docx"), {"../../evil.xml": b"x"})
    assert "Before." in load(named).text
    assert not (tmp_path.parent.parent / "evil.xml").exists()


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    path = docx(tmp_path / "a.docx")
    path.write_bytes(path.read_bytes()[:-300])
    assert refused(path).kind == "damaged"
    assert refused(rewritten(docx(tmp_path / "b.docx"), {"word/document.xml": b"<w:x"})).kind == "damaged"
    for name, inside in (("c.xlsx", "xl/workbook.xml"), ("d.pptx", "ppt/presentation.xml")):
        with zipfile.ZipFile(tmp_path / name, "w") as packed:
            packed.writestr(inside, "<junk/>")
        assert refused(tmp_path / name).kind == "damaged", name
