"""States on disk: found by their tokens, dropped when damaged, within a limit, safe between processes."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemolocal.engine import warm, warm_file
from nemolocal.engine.warm import WarmStore

STATE = bytes(range(256)) + b"end"
LIMIT = 1 << 20

KILLED_HALFWAY = """
import sys, time, zlib
from nemolocal.engine import warm, warm_file
warm_file.PIECE_BYTES = 1 << 20
pieces = []
def crc32(piece, checksum=zlib.crc32):
    if len(pieces) == 3:
        print("halfway", flush=True)
        time.sleep(60)
    pieces.append(piece)
    return checksum(piece)
zlib.crc32 = crc32
warm.WarmStore(sys.argv[1], key="k", limit_bytes=1 << 30).save(range(9), bytes(8 << 20))
"""

SAVES_FOR_EVER = """
import itertools, sys
from nemolocal.engine import warm
store = warm.WarmStore(sys.argv[1], key="k", limit_bytes=64 << 20)
print("begins", flush=True)
for i in itertools.count():
    store.save([i, 1, 2, 3], bytes([i % 256]) * (2 << 20))
"""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of a few hundred bytes has several pieces, and other processes' files are seen at once."""
    monkeypatch.setattr(warm_file, "PIECE_BYTES", 64)
    monkeypatch.setattr(warm, "RESCAN_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "warm"


def open_store(folder: Path, key: str = "model, plan", limit_bytes: int = LIMIT) -> WarmStore:
    return WarmStore(folder, key=key, limit_bytes=limit_bytes)


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.warm"))


def is_kept(store: WarmStore, tokens: list[int]) -> bool:
    """Whether the store has these very tokens."""
    entry = store.find(tokens)
    return entry is not None and entry.n_tokens == entry.n_common == len(tokens)


def set_age(path: Path, seconds: float) -> None:
    used = time.time() - seconds
    os.utime(path, (used, used))


def only_file(folder: Path) -> Path:
    (path,) = kept(folder)
    return path


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Saved, found, loaded -----------------------------------------------------------------------------


def test_what_was_saved_is_there_after_a_restart(folder: Path) -> None:
    assert open_store(folder).save([5, 6, 7, -1], STATE)
    store = open_store(folder)
    entry = store.find([5, 6, 7, -1, 8])
    assert entry is not None
    assert (entry.n_tokens, entry.n_common, entry.state_bytes) == (4, 4, len(STATE))
    loaded = store.load(entry)
    assert loaded is not None
    tokens, state = loaded
    assert tokens == [5, 6, 7, -1]
    assert state == STATE


@pytest.mark.parametrize("n_bytes", [1, 63, 64, 65, 128, 1000])
def test_states_of_every_size_around_a_piece_come_back(folder: Path, n_bytes: int) -> None:
    store = open_store(folder)
    state = random.Random(n_bytes).randbytes(n_bytes)
    assert store.save([1], state)
    entry = store.find([1])
    assert entry is not None
    loaded = store.load(entry)
    assert loaded is not None
    assert loaded[1] == state
    assert only_file(folder).stat().st_size == warm_file.Head(bytes(32), bytes(4), n_bytes).file_bytes


def test_a_state_comes_from_native_memory_and_goes_back_into_it(folder: Path) -> None:
    source = (ctypes.c_uint8 * 300)(*(i % 251 for i in range(300)))
    store = open_store(folder)
    assert store.save([1, 2], memoryview(source))
    entry = store.find([1, 2])
    assert entry is not None
    loaded = store.load(entry)
    assert loaded is not None
    view = (ctypes.c_uint8 * 300).from_buffer(loaded[1])
    assert bytes(view) == bytes(source)


def test_the_longest_shared_beginning_is_found(folder: Path) -> None:
    store = open_store(folder)
    document = list(range(1000))
    for tokens in ([*document[:500], -1], [*document[:900], -2, -3], [*document[:900], -4], [7, 7, 7]):
        store.save(tokens, STATE)
    entry = store.find(document)
    assert entry is not None
    assert (entry.n_common, entry.n_tokens) == (900, 901)  # of two that share as much, the smaller
    assert store.find([-9, 1, 2]) is None
    assert store.find([]) is None


def test_the_number_of_shared_tokens_is_exact_at_every_length(folder: Path) -> None:
    store = open_store(folder)
    tokens = [256 * i for i in range(1, 40)]  # numbers that share bytes but are not equal
    store.save(tokens, STATE)
    for n in range(1, 40):
        for rest in ([], [1], [257], [-1] * 50):
            entry = store.find(tokens[:n] + rest)
            assert entry is not None
            assert entry.n_common == n


def test_where_memory_cannot_roll_back_only_whole_entries_count(folder: Path) -> None:
    store = open_store(folder)
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 9]):
        assert store.save(tokens, STATE, whole=True)
    assert len(kept(folder)) == 3  # the state after [1, 2] is of use by itself
    entry = store.find([1, 2, 3, 5], whole=True)
    assert entry is not None
    assert entry.n_tokens == entry.n_common == 2
    longer = store.find([1, 2, 3, 4], whole=True)
    assert longer is not None
    assert longer.n_tokens == 4
    assert store.find([1], whole=True) is None
    assert store.save([1, 2, 3], STATE, whole=True)
    assert len(kept(folder)) == 4


def test_a_longer_state_replaces_those_of_its_beginnings(folder: Path) -> None:
    store = open_store(folder)
    store.save([1, 2], STATE)
    store.save([9], STATE)
    open_store(folder, key="other model").save([1], STATE)
    store.save([1, 2, 3], STATE)
    assert len(kept(folder)) == 3
    assert is_kept(store, [1, 2, 3])
    assert is_kept(store, [9])
    assert is_kept(open_store(folder, key="other model"), [1])


def test_what_a_kept_state_serves_is_not_written_again_but_counts_as_used(folder: Path) -> None:
    store = open_store(folder)
    store.save([1, 2, 3], STATE)
    path = only_file(folder)
    for tokens in ([1, 2, 3], [1, 2]):
        set_age(path, 1000)
        before = path.stat().st_ino
        assert store.save(tokens, b"another")
        assert only_file(folder) == path
        assert path.stat().st_ino == before
        assert path.stat().st_mtime > time.time() - 500
    path.unlink()
    assert store.save([1, 2], b"another")
    assert is_kept(open_store(folder), [1, 2])


def test_states_of_another_key_are_never_returned_nor_touched(folder: Path) -> None:
    open_store(folder, key="a").save([1, 2], STATE)
    other = open_store(folder, key="b")
    assert other.find([1, 2]) is None
    entry = open_store(folder, key="a").find([1, 2])
    assert entry is not None
    assert other.load(entry) is None
    assert is_kept(open_store(folder, key="a"), [1, 2])


def test_names_do_not_tell_what_was_read_and_files_are_for_their_owner(folder: Path) -> None:
    open_store(folder, key="schlüssel ✓").save([72, 105], STATE)
    path = only_file(folder)
    assert re.fullmatch(r"[0-9a-f]{64}\.warm", path.name)
    open_store(folder, key="b").save([72, 105], STATE)
    assert len(kept(folder)) == 2  # the same tokens have another name under another key
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700


# The limit ----------------------------------------------------------------------------------------


def test_the_least_recently_used_of_all_keys_gives_way(folder: Path) -> None:
    size = warm_file.Head(bytes(32), bytes(4), 1000).file_bytes
    a = open_store(folder, key="a", limit_bytes=3 * size)
    b = open_store(folder, key="b", limit_bytes=3 * size)
    for age, (store, token) in zip((300, 200, 100), ((a, 1), (b, 2), (a, 3)), strict=True):
        before = set(kept(folder))
        assert store.save([token], bytes(1000))
        (new,) = set(kept(folder)) - before
        set_age(new, age)
    entry = a.find([1])
    assert entry is not None
    assert a.load(entry) is not None  # used now: [2] is the oldest
    assert b.save([4], bytes(1000))
    assert [is_kept(a, [1]), is_kept(b, [2]), is_kept(a, [3]), is_kept(b, [4])] == [True, False, True, True]
    assert b.save([5], bytes(1000))
    assert [is_kept(a, [1]), is_kept(a, [3]), is_kept(b, [4]), is_kept(b, [5])] == [True, False, True, True]


def test_a_state_of_exactly_the_limit_is_kept_and_one_byte_more_is_refused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = warm_file.Head(bytes(32), bytes(4), 1000).file_bytes
    store = open_store(folder, limit_bytes=size)
    assert store.save([1], bytes(1000))
    assert store.save([2], bytes(1000))
    assert not is_kept(store, [1])
    with caplog.at_level(logging.INFO):
        assert not store.save([3], bytes(1001))
    assert "is not kept: the limit" in caplog.text
    assert is_kept(store, [2])  # nothing gave way for what was refused
    assert sum(path.stat().st_size for path in kept(folder)) == size


def test_the_beginnings_that_a_new_state_replaces_give_way_first(folder: Path) -> None:
    size = warm_file.Head(bytes(32), bytes(8), 1000).file_bytes
    store = open_store(folder, limit_bytes=2 * size)
    store.save([8], bytes(1000))
    set_age(only_file(folder), 1000)
    store.save([1], bytes(1000))
    assert store.save([1, 2], bytes(1000))
    assert is_kept(store, [8])
    assert is_kept(store, [1, 2])


def test_the_folder_stays_within_its_limit_while_a_state_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = warm_file.Head(bytes(32), bytes(4), 1000).file_bytes
    store = open_store(folder, limit_bytes=2 * size)
    sums = []
    write = warm_file.write

    def watch(*args: object) -> None:
        write(*args)  # type: ignore[arg-type]
        sums.append(sum(path.stat().st_size for path in folder.iterdir()))

    monkeypatch.setattr(warm_file, "write", watch)
    for token in range(5):
        assert store.save([token], bytes(1000))
    assert max(sums) == 2 * size


def test_a_lower_limit_counts_from_the_next_start(folder: Path) -> None:
    size = warm_file.Head(bytes(32), bytes(4), 1000).file_bytes
    store = open_store(folder)
    for token in range(4):
        store.save([token], bytes(1000))
    open_store(folder, key="b", limit_bytes=2 * size)
    assert len(kept(folder)) == 2


def test_with_a_limit_of_0_nothing_is_kept_and_nothing_is_removed(folder: Path) -> None:
    off = open_store(folder, limit_bytes=0)
    assert not off.save([1], STATE)
    assert off.find([1]) is None
    assert not folder.exists()
    open_store(folder).save([1], STATE)
    assert open_store(folder, limit_bytes=0).find([1]) is None
    assert len(kept(folder)) == 1


def test_nothing_is_kept_of_nothing(folder: Path) -> None:
    """As when the library could not give a state."""
    store = open_store(folder)
    assert not store.save([1], b"")
    assert not store.save([1], memoryview((ctypes.c_uint8 * 0)()))
    assert not store.save([], STATE)
    assert kept(folder) == []


# Damage -------------------------------------------------------------------------------------------


def flip(offset: int) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        at = offset % len(content)
        return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]

    return damage


IN_HEAD = {
    "empty": lambda content: b"",
    "another kind of file": lambda content: b"GGUF" + content[4:],
    "a few bytes": lambda content: content[:20],
    "one byte short": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "one byte more": lambda content: content + b"x",
    "a future version": lambda content: content[:8] + (2).to_bytes(4, sys.byteorder) + content[12:],
    "the number of tokens": flip(12),
    "the state's length": flip(16),
    "the key": flip(30),
    "the head's checksum": flip(60),
    "a token": flip(90),
}
IN_STATE = {
    "the state's first byte": flip(100),
    "the state's middle": flip(250),
    "the state's last byte": flip(-25),
    "a checksum": flip(-1),
    "zeros after a power cut": lambda content: content[:150] + bytes(len(content) - 150),
}


@pytest.mark.parametrize("damage", IN_HEAD.values(), ids=IN_HEAD)
@pytest.mark.parametrize("when", ["at start", "after start"])
def test_a_damaged_head_is_dropped_with_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes], when: str
) -> None:
    store = open_store(folder)
    store.save([1, 2, 3], STATE)
    path = only_file(folder)
    entry = store.find([1, 2, 3])
    path.write_bytes(damage(path.read_bytes()))
    if when == "at start":
        assert open_store(folder).find([1, 2, 3]) is None
    else:
        assert entry is not None
        assert store.load(entry) is None
        assert store.find([1, 2, 3]) is None
    assert not path.exists()
    (line,) = warnings_in(caplog)
    assert path.name in line
    assert "\n" not in line
    assert store.save([1, 2, 3], STATE)  # the next one is kept again
    assert is_kept(store, [1, 2, 3])


@pytest.mark.parametrize("damage", IN_STATE.values(), ids=IN_STATE)
def test_a_damaged_state_is_dropped_when_it_is_asked_for(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    open_store(folder).save([1, 2, 3], STATE)
    path = only_file(folder)
    path.write_bytes(damage(path.read_bytes()))
    store = open_store(folder)
    entry = store.find([1, 2, 3])
    assert entry is not None  # a start reads no states
    assert store.load(entry) is None
    assert not path.exists()
    assert store.find([1, 2, 3]) is None
    (line,) = warnings_in(caplog)
    assert "its state is damaged" in line


def test_no_flipped_bit_anywhere_is_returned(folder: Path) -> None:
    open_store(folder).save([1, 2, 3], STATE)
    path = only_file(folder)
    content = path.read_bytes()
    for offset in range(len(content)):
        path.write_bytes(flip(offset)(content))
        store = open_store(folder)
        entry = store.find([1, 2, 3])
        assert entry is None or store.load(entry) is None, offset
        assert not path.exists()


def test_a_whole_file_under_the_name_of_another_is_dropped(folder: Path) -> None:
    store = open_store(folder)
    store.save([1, 2], STATE)
    path = only_file(folder)
    entry = store.find([1, 2])
    assert entry is not None
    open_store(folder.with_name("elsewhere"), key="foreign").save([1, 2], b"foreign")
    path.write_bytes(only_file(folder.with_name("elsewhere")).read_bytes())
    assert store.load(entry) is None
    assert not path.exists()


def test_files_of_other_names_are_left_alone(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "model.warm").write_text("mine too")
    open_store(folder, limit_bytes=1)
    open_store(folder).save([1], STATE)
    assert (folder / "notes.txt").exists()
    assert (folder / "model.warm").exists()


# Several processes --------------------------------------------------------------------------------


def test_two_stores_see_what_the_other_adds_and_removes(folder: Path) -> None:
    a, b = open_store(folder), open_store(folder)
    a.save([1, 2, 3], STATE)
    entry = b.find([1, 2, 3])
    assert entry is not None
    a.save([1, 2, 3, 4], STATE)  # removes the shorter one
    assert b.load(entry) is None
    again = b.find([1, 2, 3])
    assert again is not None
    assert again.n_tokens == 4
    assert b.load(again) is not None


def test_a_folder_that_is_removed_meanwhile_is_made_again(folder: Path) -> None:
    store = open_store(folder)
    store.save([1], STATE)
    only_file(folder).unlink()
    folder.rmdir()
    assert store.find([1]) is None
    assert store.save([1], STATE)
    assert is_kept(store, [1])


def run(code: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def writer(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that stands still with half of a state written."""
    with run(KILLED_HALFWAY, folder) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "halfway\n"
        yield process
        process.kill()


def test_what_a_killed_process_left_is_swept_but_not_what_is_being_written(
    folder: Path, writer: subprocess.Popen[str]
) -> None:
    (half,) = folder.iterdir()
    assert half.stat().st_size > 1 << 20
    assert open_store(folder, key="k").find(range(9)) is None
    assert half.exists()  # its writer lives
    writer.kill()
    writer.wait()
    assert open_store(folder, key="k").find(range(9)) is None
    assert list(folder.iterdir()) == []


def test_whenever_a_process_is_killed_only_whole_states_are_returned(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_file, "PIECE_BYTES", 8 << 20)
    n_loaded = 0
    for wait_s in (0.0, 0.05, 0.1):
        with run(SAVES_FOR_EVER, folder) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(wait_s)
            process.kill()
        store = open_store(folder, key="k", limit_bytes=64 << 20)
        assert {path.suffix for path in folder.iterdir()} <= {".warm"}
        for first in range(256):
            entry = store.find([first, 1, 2, 3])
            if entry is not None:
                loaded = store.load(entry)
                assert loaded is not None
                assert loaded[0] == [first, 1, 2, 3]
                assert loaded[1] == bytes([first]) * (2 << 20)
                n_loaded += 1
    assert n_loaded > 0


def test_hundreds_of_entries_are_read_at_start_without_their_states(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    for i in range(300):
        head = warm_file.Head(
            warm_file.digest_key("model, plan"), warm_file.pack_tokens([i, *range(200)]), 300
        )
        with (folder / head.name).open("wb") as stream:
            warm_file.write(stream, head, memoryview(bytes(300)))
    n_reads: list[str] = []
    read_head = warm_file.read_head

    def count(stream: object, name: str) -> warm_file.Head:
        n_reads.append(name)
        return read_head(stream, name)  # type: ignore[arg-type]

    monkeypatch.setattr(warm_file, "read_head", count)
    monkeypatch.delattr(warm_file, "read_state")
    store = open_store(folder)
    for i in range(300):
        entry = store.find([i, *range(100)])
        assert entry is not None
        assert entry.n_common == 101
    assert len(n_reads) == len(set(n_reads)) == 300  # each head once, however often is asked


# Disks that do not take it ------------------------------------------------------------------------


def test_a_folder_that_cannot_be_used_is_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file where the folder should be")
    store = open_store(folder)
    for token in range(3):
        assert not store.save([token], STATE)
        assert store.find([token]) is None
    assert len(warnings_in(caplog)) == 1
    assert str(folder) in warnings_in(caplog)[0]


def test_a_disk_that_fills_up_is_one_warning_and_leaves_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(stream: object, head: warm_file.Head, state: memoryview) -> None:
        stream.write(state[:100])  # type: ignore[attr-defined]
        raise OSError(errno.ENOSPC, "No space left on device")

    store = open_store(folder)
    store.save([1], STATE)
    with monkeypatch.context() as patch:
        patch.setattr(warm_file, "write", fill_up)
        for token in (2, 3):
            assert not store.save([token], STATE)
    assert len(list(folder.iterdir())) == 1
    (line,) = warnings_in(caplog)
    assert "No space left on device" in line
    assert is_kept(store, [1])
    assert store.save([4], STATE)  # there is space again


def test_nothing_gives_way_for_a_state_that_the_disk_cannot_take(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = warm_file.Head(bytes(32), bytes(4), 1000).file_bytes
    store = open_store(folder, limit_bytes=3 * size)
    store.save([1], bytes(1000))
    store.save([2], bytes(1000))
    full = shutil.disk_usage(folder)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert not store.save([3, 4], bytes(2000))  # one of the others would make room in the limit
    assert is_kept(store, [1])
    assert is_kept(store, [2])
    assert "full" in warnings_in(caplog)[0]


def test_a_file_that_cannot_be_read_is_passed_over(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(folder)
    store.save([1], STATE)
    entry = store.find([1])
    assert entry is not None

    def fail(stream: object, head: warm_file.Head) -> memoryview:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(warm_file, "read_state", fail)
    assert store.load(entry) is None
    assert store.find([1]) is None
    assert len(warnings_in(caplog)) == 1


def test_a_moment_without_memory_does_not_forget_a_state(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(folder)
    store.save([1], STATE)
    entry = store.find([1])
    assert entry is not None

    def fail(n_bytes: int) -> memoryview:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(warm_file, "_reserve", fail)
        assert store.load(entry) is None
    assert store.load(entry) is not None
