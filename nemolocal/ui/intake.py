"""Files that were dropped on the page: received, and read into the library one after the other, beside the
page, so that this goes on when the page is closed. Each lies in a folder of its own until it is read.

Knows neither gradio nor HTTP.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from nemolocal import units
from nemolocal.documents.limits import Limits
from nemolocal.documents.load.sniff import SUFFIXES
from nemolocal.documents.load.source import display_name
from nemolocal.errors import DocumentError
from nemolocal.papers import Added, Papers
from nemolocal.ui.problems import as_problem
from nemolocal.ui.rooms import Room

STOPPED: Final = "Stopped."
N_NAME_BYTES: Final = 200
"""Of a file's name, which file systems hold no more than 255 of."""
_UNUSABLE: Final = re.compile(r'[\x00-\x1f<>:"|?*]')


class Intake:
    """What all tabs bring. To be used from one event loop."""

    def __init__(self, papers: Papers, max_file_bytes: int = Limits().max_file_bytes) -> None:
        self.papers = papers
        self.max_file_bytes = max_file_bytes
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._folders: set[Path] = set()

    async def receive(
        self, room: Room, name: str, chunks: AsyncIterator[bytes], *, n_bytes: int = 0, batch: str = ""
    ) -> bool:
        """Take a file in and have it read. False where it is not taken; the room's line says why."""
        self._open(room, batch)
        shown = display_name(name.replace("\\", "/").rsplit("/", 1)[-1])
        read = room.expect(shown, n_bytes)
        if not shown.lower().endswith(SUFFIXES):
            room.tell(read.key, state="failed", said="This kind of file is not read here.")
            return False
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="nemolocal-"))
        self._folders.add(folder)
        path = folder / file_name(shown)
        try:
            problem = await self._write(room, read.key, path, chunks)
        except OSError as error:
            problem = f"It cannot be kept: {error.strerror or error}."
        except BaseException:  # whoever sent it is gone, or was broken off
            room.drop(read.key)
            self._discard(folder)
            raise
        if problem:
            room.tell(read.key, state="failed", said=problem)
            self._discard(folder)
            return False
        room.files[read.key] = path
        self._begin(room, read.key, batch)
        return True

    async def _write(self, room: Room, key: int, path: Path, chunks: AsyncIterator[bytes]) -> str:
        n_done = 0
        file = await asyncio.to_thread(path.open, "wb")
        try:
            async for chunk in chunks:
                n_done += len(chunk)
                if n_done > self.max_file_bytes:
                    return f"It is larger than {units.size(self.max_file_bytes)}, the most that is read."
                await asyncio.to_thread(file.write, chunk)
                room.tell(key, n_done=n_done)
        finally:
            await asyncio.to_thread(file.close)
        return ""

    def _open(self, room: Room, batch: str) -> None:
        """What became of the files of earlier batches is off the list once another begins."""
        if batch != room.arriving:
            room.arriving = batch
            self.clear(room, is_all=False)

    def refuse(self, room: Room, name: str, why: str, *, batch: str = "") -> None:
        """A file that did not arrive."""
        self._open(room, batch)
        read = room.expect(display_name(name))
        room.tell(read.key, state="failed", said=why)

    def unlock(self, room: Room, password: str) -> None:
        """Read those again that wait for a password."""
        for read in list(room.reads.values()):
            if read.is_locked and read.key not in room.tasks:
                self._begin(room, read.key, room.batch, password)

    def stop(self, room: Room, key: int) -> None:
        """Do not read it, or not to its end."""
        if key in room.tasks:
            room.tasks[key].cancel()

    def clear(self, room: Room, *, is_all: bool = True) -> None:
        """Take what is over off the list; those that wait for a password only where `is_all`."""
        for read in list(room.reads.values()):
            if read.is_over and (is_all or not read.is_locked):
                room.drop(read.key)
                if path := room.files.pop(read.key, None):
                    self._discard(path.parent)

    async def close(self) -> None:
        """End all and leave nothing behind."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for folder in list(self._folders):
            self._discard(folder)

    def _begin(self, room: Room, key: int, batch: str, password: str = "") -> None:
        room.tell(key, state="waiting", n_done=0, n_all=0, said="", is_locked=False)
        task = asyncio.create_task(self._read(room, key, batch, password))
        room.tasks[key] = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._over, room, key))

    def _over(self, room: Room, key: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        room.tasks.pop(key, None)
        if task.cancelled():
            room.tell(key, state="failed", said=STOPPED)
        if not (key in room.reads and room.reads[key].is_locked) and (path := room.files.pop(key, None)):
            self._discard(path.parent)

    async def _read(self, room: Room, key: int, batch: str, password: str) -> None:
        def on_page(name: str, n_done: int, n_all: int) -> None:
            room.tell(key, n_done=n_done, n_all=n_all)

        async with self._turn:
            room.tell(key, state="reading")
            try:
                async for added in self.papers.add([room.files[key]], password=password, on_page=on_page):
                    await self._take(room, key, added, batch)
            except Exception as error:  # the page's border
                room.tell(key, state="failed", said=as_problem(error))

    async def _take(self, room: Room, key: int, added: Added, batch: str) -> None:
        if added.row is None:
            error = added.error or DocumentError("It is not read.", kind="damaged")
            is_locked = isinstance(error, DocumentError) and error.kind == "encrypted"
            room.tell(key, state="failed", said=as_problem(error), is_locked=is_locked)
            return
        document = await asyncio.to_thread(self.papers.library.document, added.row.id)
        said = "read" if added.is_new else "was here already"
        for line in unread_lines([(each.page, each.why) for each in document.not_read], document.unit):
            said += f"; {line}"
        room.tell(key, state="read", said=said)
        room.receive(added.row.id, batch)

    def _discard(self, folder: Path) -> None:
        self._folders.discard(folder)
        with suppress(OSError):
            shutil.rmtree(folder)


def file_name(shown: str) -> str:
    """A name that every file system takes, with the same ending."""
    name = _UNUSABLE.sub("_", shown).strip(" .") or "document"
    stem, dot, suffix = name.rpartition(".")
    room = N_NAME_BYTES - len(f"{dot}{suffix}".encode())
    if not stem or room <= 0:
        return name.encode()[:N_NAME_BYTES].decode(errors="ignore")
    return f"{stem.encode()[:room].decode(errors='ignore')}{dot}{suffix}"


def unread_lines(found: list[tuple[int, str]], unit: str = "page") -> list[str]:
    """What was not read, pages with one reason together. Page 0 is something beside the pages."""
    groups: dict[str, list[int]] = {}
    for page, why in found:
        groups.setdefault(why, []).append(page)
    lines = []
    for why, pages in groups.items():
        numbered = [page for page in pages if page]
        where = f"{unit}{'' if len(numbered) == 1 else 's'} {units.ranges(numbered)} " if numbered else ""
        lines.append(f"{where}not read: {why}")
    return lines
