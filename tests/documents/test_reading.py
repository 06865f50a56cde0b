"""Reading in a process of its own: what a file does to it stays there, and the next file is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from nemolocal.documents.gather import Missing, gather
from nemolocal.documents.limits import Limits
from nemolocal.documents.reading import Reader
from nemolocal.errors import DocumentError
from tests.documents import pdfs

pytestmark = pytest.mark.anyio


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    made = Reader(Limits(seconds=20.0, ocr=False))
    yield made
    await made.close()


def put(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


async def test_one_after_another_with_their_pages(reader: Reader, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = pdfs.write(tmp_path / "a.pdf", [pdfs.lines([f"Page {n}."]) for n in range(5)])
    document = await reader.read(path, on_page=lambda n_done, n_all: seen.append((n_done, n_all)))
    assert document.n_pages == 5
    await asyncio.sleep(0)
    assert seen == [(n, 5) for n in range(1, 6)]
    with pytest.raises(DocumentError, match="empty"):
        await reader.read(put(tmp_path, "b.txt", ""))
    assert (await reader.read(put(tmp_path, "c.txt", "Words."), name="other")).name == "other"


async def test_a_process_that_dies_is_an_error_and_the_next_file_is_read(
    reader: Reader, tmp_path: Path
) -> None:
    words = put(tmp_path, "a.txt", "Words.")
    await reader.read(words)
    assert reader._process
    slow = pdfs.write(tmp_path / "a.pdf", [pdfs.lines(["Some words."] * 40)] * 3000)

    def kill(n_done: int, n_all: int) -> None:
        if n_done == 5:
            psutil.Process(reader._process.pid).kill()  # type: ignore[union-attr]

    with pytest.raises(DocumentError, match="broke"):
        await reader.read(slow, on_page=kill)
    assert (await reader.read(words)).text == "Words."


async def test_what_takes_too_long_is_given_up(tmp_path: Path) -> None:
    reader = Reader(Limits(seconds=0.001))
    try:
        with pytest.raises(DocumentError) as caught:
            await reader.read(put(tmp_path, "a.txt", "Words."))
        assert caught.value.kind == "too_slow"
    finally:
        await reader.close()


async def test_cancelling_ends_the_process(reader: Reader, tmp_path: Path) -> None:
    path = pdfs.write(tmp_path / "a.pdf", [pdfs.lines(["Some words."] * 40)] * 3000)
    begun = asyncio.Event()
    task = asyncio.create_task(reader.read(path, on_page=lambda n_done, n_all: begun.set()))
    await begun.wait()
    process = psutil.Process(reader._process.pid)  # type: ignore[union-attr]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    process.wait(10)
    assert (await reader.read(put(tmp_path, "b.txt", "Words."))).text == "Words."


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.md", "sub/c.pdf", ".hidden.txt", "~$lock.docx", "x.exe"):
        put(tmp_path, name, "x")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path, target_is_directory=True)
    found = gather([tmp_path, tmp_path / "b.txt", tmp_path / "*.md", "nothing-here.pdf", "no\0name"])
    names = [path.name for path in found if isinstance(path, Path)]
    assert names == ["a.md", "b.txt", "c.pdf"]
    missing = [each for each in found if isinstance(each, Missing)]
    assert len(missing) == 2
    assert missing[0].error.kind == "missing"
    assert gather([tmp_path / "x.exe"]) == [tmp_path / "x.exe"]  # who names a file means it
