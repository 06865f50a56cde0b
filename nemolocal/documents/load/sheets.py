"""XLSX: each sheet a table, with the values as they were last computed."""

from __future__ import annotations

import datetime
from typing import Any

from nemolocal.documents.limits import Limits
from nemolocal.documents.load.archive import PROBLEMS, open_archive
from nemolocal.documents.load.source import OnPage, Source
from nemolocal.documents.load.table import line_of
from nemolocal.documents.parts import Block, Document, NotRead

N_COLUMNS_MOST = 512


def read(source: Source, limits: Limits, on_page: OnPage) -> Document:
    import openpyxl
    from openpyxl.utils.exceptions import InvalidFileException

    open_archive(source, limits).close()
    blocks: list[Block] = []
    empty, cut, titles = [], [], []
    try:
        book = openpyxl.load_workbook(source.path, read_only=True, data_only=True, keep_links=False)
        sheets = [sheet for sheet in book.worksheets if hasattr(sheet, "iter_rows")]
        n_chars = 0
        for number, sheet in enumerate(sheets, 1):
            rows = []
            is_cut = (sheet.max_column or 0) > N_COLUMNS_MOST
            for row in sheet.iter_rows(values_only=True, max_col=N_COLUMNS_MOST + 1):
                is_cut = is_cut or any(value is not None for value in row[N_COLUMNS_MOST:])
                if line := line_of(_trimmed([_shown(value) for value in row[:N_COLUMNS_MOST]])):
                    rows.append(line)
                    n_chars += len(line)
                    if n_chars > limits.max_chars:
                        raise source.too_large(f"its cells hold more than {limits.max_chars:,} characters")
            titles.append(str(sheet.title))
            if rows:
                blocks.append(Block("heading", str(sheet.title), page=number, level=1))
                n_header_lines = 1 if len(rows) > 1 else 0
                blocks.append(Block("table", "\n".join(rows), page=number, n_header_lines=n_header_lines))
            else:
                empty.append(NotRead(number, "there is nothing in it"))
            if is_cut:
                cut.append(NotRead(0, f"the columns after the {N_COLUMNS_MOST}th of sheet {sheet.title}"))
            on_page(number, len(sheets))
        book.close()
    except (*PROBLEMS, InvalidFileException, AttributeError, TypeError, IndexError, SyntaxError) as error:
        raise source.damaged(error) from None
    return Document(
        name=source.name,
        kind="xlsx",
        sha256=source.sha256,
        blocks=tuple(blocks) if len(empty) < len(titles) else (),
        n_pages=max(len(titles), 1),
        unit="sheet",
        labels=tuple(titles),
        not_read=(*empty, *cut),
        has_outline=True,
    )


def _trimmed(cells: list[str]) -> list[str]:
    while cells and not cells[-1]:
        cells.pop()
    return cells


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime.datetime) and value.time() == datetime.time(0):
        return value.date().isoformat()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)
