"""The file that keeps one state of a sequence and the tokens that led to it: written, and read back checked.

Numbers are in the machine's byte order, as they are in the state:

    magic, version, number of tokens, bytes of the state, sha256 of the key
    sha256 of the above and the tokens
    the tokens, 4 bytes each
    the state
    crc32 of each PIECE_BYTES of the state, 4 bytes each

The crc32 is there to find damage (writes torn by a power cut, bad sectors, flipped bits). It runs at 4 GB/s
where sha256 runs at 1.7 GB/s, and at 0.5 where the processor has no instructions for it. Neither would find a
forger, who can write the right checksum as well. Knows nothing of folders and limits.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import mmap
import os
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"NEMOWARM"
VERSION = 1
PIECE_BYTES = 8 << 20
N_READERS = 4
SUFFIX = ".warm"

TOKEN_BYTES = 4
_FIXED = struct.Struct("=8sIIQ32s")
_CRC_BYTES = 4
_DIGEST_BYTES = 32


class DamagedError(Exception):
    """A file is not what it should be; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before the state. `tokens` as the file has them, so that beginnings compare fast."""

    key_digest: bytes
    tokens: bytes
    state_bytes: int

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def name(self) -> str:
        """The file's name. It follows from the content, and does not tell it."""
        return hashlib.sha256(self.key_digest + self.tokens).hexdigest() + SUFFIX

    @property
    def file_bytes(self) -> int:
        n_pieces = -(-self.state_bytes // PIECE_BYTES)
        return _FIXED.size + _DIGEST_BYTES + len(self.tokens) + self.state_bytes + n_pieces * _CRC_BYTES


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """The tokens as a file has them. Raises OverflowError for a number of more than 32 bits."""
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


def digest_key(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def write(stream: BinaryIO, head: Head, state: memoryview) -> None:
    """Write a whole file, without a copy of the state. Raises OSError."""
    fixed = _pack(head)
    stream.write(fixed)
    stream.write(hashlib.sha256(fixed + head.tokens).digest())
    stream.write(head.tokens)
    checksums = bytearray()
    for piece in _pieces(state):
        checksums += zlib.crc32(piece).to_bytes(_CRC_BYTES, sys.byteorder)
        stream.write(piece)
    stream.write(checksums)
    stream.flush()


def read_head(stream: BinaryIO, name: str) -> Head:
    """Read what stands before the state, and leave the stream there. Raises DamagedError, OSError."""
    fixed = stream.read(_FIXED.size)
    if not fixed.startswith(MAGIC):
        raise DamagedError("it is of another kind")
    if len(fixed) < _FIXED.size:
        raise DamagedError("it is cut off")
    _, version, n_tokens, state_bytes, key_digest = _FIXED.unpack(fixed)
    if version != VERSION:
        raise DamagedError(f"it has version {version}, and this is version {VERSION}")
    # The length first: it bounds all that is read and reserved below.
    expected = Head(key_digest, bytes(0), state_bytes).file_bytes + n_tokens * TOKEN_BYTES
    found_bytes = os.fstat(stream.fileno()).st_size
    if found_bytes != expected:
        raise DamagedError(f"it has {found_bytes} bytes and should have {expected}")
    digest = stream.read(_DIGEST_BYTES)
    tokens = stream.read(n_tokens * TOKEN_BYTES)
    if hashlib.sha256(fixed + tokens).digest() != digest:
        raise DamagedError("its head is damaged")
    head = Head(key_digest, tokens, state_bytes)
    if head.name != name:
        raise DamagedError("its name belongs to another content")
    return head


def read_state(stream: BinaryIO, head: Head) -> memoryview:
    """Read the state behind a head into a new buffer, and check it. Raises DamagedError, OSError."""
    state = memoryview(_reserve(head.state_bytes))
    begin = stream.tell()

    def read(places: range) -> list[bytes]:
        """The checksums of some pieces, read by a stream of their own."""
        with Path(stream.name).open("rb", buffering=0) as mine:
            return [_read_piece(mine, begin + at, state[at : at + PIECE_BYTES]) for at in places]

    # Side by side: one thread alone is slower than the disk, and neither reading nor checking holds the lock.
    share = -(-len(state) // (N_READERS * PIECE_BYTES)) * PIECE_BYTES
    parts = [
        range(at, min(at + share, len(state)), PIECE_BYTES) for at in range(0, len(state), max(share, 1))
    ]
    with ThreadPoolExecutor(N_READERS) as readers:
        checksums = b"".join(itertools.chain.from_iterable(readers.map(read, parts)))
    stream.seek(begin + len(state))
    if stream.read() != checksums:
        raise DamagedError("its state is damaged")
    return state


def _read_piece(stream: io.FileIO, at: int, piece: memoryview) -> bytes:
    stream.seek(at)
    n = 0
    while n < len(piece):
        n_more = stream.readinto(piece[n:])
        if not n_more:
            raise DamagedError("it is cut off")
        n += n_more
    return zlib.crc32(piece).to_bytes(_CRC_BYTES, sys.byteorder)


def _reserve(n_bytes: int) -> mmap.mmap:
    """An empty buffer. Raises OSError where there is no memory for it."""
    # Not the file itself as memory: a bad sector would then kill the process instead of raising an error.
    # Not a bytearray: filling gigabytes with zeros would hold up every other thread.
    if sys.platform == "win32":
        buffer = mmap.mmap(-1, n_bytes)
    else:
        buffer = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Giving back a gigabyte in small pages holds up every other thread for 70 ms, in huge ones for 3.
        with contextlib.suppress(AttributeError, OSError):  # systems and kernels that know none
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def _pack(head: Head) -> bytes:
    return _FIXED.pack(MAGIC, VERSION, head.n_tokens, head.state_bytes, head.key_digest)


def _pieces(state: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(state), PIECE_BYTES):
        yield state[begin : begin + PIECE_BYTES]
