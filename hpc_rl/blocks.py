"""Large files in blocks of 8 MiB, each with a checksum of its own: hashed while they are written, checked while they are read.

So a reader that needs a part of a file reads and checks only the blocks that have it, and no byte is read twice. Nothing
here knows what the bytes mean; names, commits and manifests are the checkpoint package's.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hpc_rl.errors import Damaged

BLOCK_BYTES = 8 << 20
NUM_WRITERS = 2  # one block is hashed while another is written; more would wait for the inode's lock
NUM_READERS = 4
NUM_READ_AHEAD = 4  # blocks
MAX_PARTS = 512  # of one pwritev; Linux takes 1024
_DIGITS = 16  # of one block's xxh3 (64 bits), in hex
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class FileRecord:
    """One file: its name within its folder, its size in bytes, and the xxh3 of every block, in hex, one after another."""

    name: str
    size: int
    xxh3: str


class Abandoned(Exception):
    """A write was called off by whoever started it."""


def write(path: Path, parts: Sequence[memoryview], cancel: threading.Event | None = None) -> FileRecord:
    """Write the parts one after another as a new file, durably.

    Space is reserved first, where the file system can do that: a full disk or quota is met before anything is written.
    Raises OSError (the file is left for the caller to remove), and Abandoned once `cancel` is set.
    """
    size = sum(len(part) for part in parts)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _reserve(fd, size)

        def one(block: tuple[int, list[memoryview]]) -> str:
            if cancel is not None and cancel.is_set():
                raise Abandoned
            return _write_block(fd, *block)

        digests = _side_by_side(one, list(_cut(parts)), NUM_WRITERS)
        os.fsync(fd)
    finally:
        os.close(fd)  # its error counts: a network file system may tell of a quota only here
    return FileRecord(path.name, size, "".join(digests) or _digest(b""))


def record(path: Path) -> FileRecord:
    """The record of a file as it lies there: reads every byte. Raises OSError."""
    with Reader(path) as reader:
        digests = _side_by_side(lambda i: _digest(reader.block(i)), range(reader.num_blocks), NUM_READERS)
        return FileRecord(path.name, reader.size, "".join(digests) or _digest(b""))


class Reader:
    """One file, read in whole blocks that are checked against a record; without one nothing is checked.

    Raises OSError, and Damaged, which names the file, where the size or a block is not what was written.
    """

    def __init__(self, path: Path, expected: FileRecord | None = None) -> None:
        self.path = path
        self.expected = expected
        self._fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size
        self.num_blocks = -(-self.size // BLOCK_BYTES)
        self._own = threading.local()
        if expected is not None and expected.size != self.size:
            os.close(self._fd)
            raise Damaged(f"{path.name} has {self.size} bytes, {expected.size} were written")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def block(self, index: int) -> memoryview:
        """Block `index`, checked; valid until this thread asks for the next one."""
        start = index * BLOCK_BYTES
        size = min(BLOCK_BYTES, self.size - start)
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(bytearray(min(BLOCK_BYTES, self.size)))
        view = self._own.buffer[:size]
        os.posix_fadvise(self._fd, start + NUM_READ_AHEAD * BLOCK_BYTES, BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
        done = 0
        while done < size:
            count = os.preadv(self._fd, [view[done:]], start + done)
            if not count:
                raise Damaged(f"{self.path.name} ends at byte {start + done}")
            done += count
        if self.expected is not None and self.expected.xxh3[index * _DIGITS : (index + 1) * _DIGITS] != _digest(view):
            raise Damaged(f"{self.path.name}: bytes {start} to {start + size} are not what was written (checksum)")
        return view

    def check(self) -> None:
        """Read and check every block."""
        if self.expected is not None and len(self.expected.xxh3) != _DIGITS * max(1, self.num_blocks):
            raise Damaged(f"{self.path.name}: its record has another number of checksums than the file has blocks")
        _side_by_side(lambda index: len(self.block(index)), range(self.num_blocks), NUM_READERS)

    def read(self, start: int, end: int) -> bytes:
        """A few bytes. Raises Damaged where the file ends before."""
        if end > self.size or start > end:
            raise Damaged(f"{self.path.name} has {self.size} bytes, and bytes {start} to {end} are asked for")
        target = np.empty(end - start, np.uint8)
        self.fill([(start, target)])
        return target.tobytes()

    def fill(self, wanted: Sequence[tuple[int, np.ndarray]]) -> None:
        """Read several ranges, each into its flat uint8 array, which says how many bytes from the start offset on."""
        by_block: dict[int, list[tuple[int, np.ndarray]]] = {}
        for start, target in wanted:
            if start + len(target) > self.size:
                raise Damaged(f"{self.path.name} has {self.size} bytes, {start + len(target)} are needed")
            for index in range(start // BLOCK_BYTES, -(-(start + len(target)) // BLOCK_BYTES)) if len(target) else ():
                by_block.setdefault(index, []).append((start, target))

        def one(index: int) -> None:
            block = np.frombuffer(self.block(index), np.uint8)
            first, last = index * BLOCK_BYTES, index * BLOCK_BYTES + len(block)
            for start, target in by_block[index]:
                begin, end = max(start, first), min(start + len(target), last)
                target[begin - start : end - start] = block[begin - first : end - first]

        _side_by_side(one, sorted(by_block), NUM_READERS)


def _cut(parts: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset, pieces) of every block."""
    offset, block, room = 0, list[memoryview](), BLOCK_BYTES
    for part in parts:
        at = 0
        while at < len(part):
            piece = part[at : at + room]
            block.append(piece)
            at, room = at + len(piece), room - len(piece)
            if not room:
                yield offset, block
                offset, block, room = offset + BLOCK_BYTES, [], BLOCK_BYTES
    if block:
        yield offset, block


def _write_block(fd: int, offset: int, pieces: list[memoryview]) -> str:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    left, at = list(pieces), offset
    while left:
        count = os.pwritev(fd, left[:MAX_PARTS], at)
        at += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    _start_writeback(fd, offset, at - offset)
    return digest.hexdigest()


def _start_writeback(fd: int, offset: int, size: int) -> None:
    """Have the kernel write these pages out now, so that the fsync at the end finds little to do. A hint: errors don't count."""
    if hasattr(_libc, "sync_file_range"):
        _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def _reserve(fd: int, size: int) -> None:
    """Reserve space by the system call itself: the C library's stand-in would write a byte into every block."""
    if not size or not hasattr(_libc, "fallocate"):
        return
    while _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _side_by_side(work: Callable[[Any], Any], items: Iterable[Any], num_threads: int) -> list[Any]:
    """Results in order; the first error ends it, with no work left running."""
    items = list(items)
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _digest(data: Any) -> str:
    return xxhash.xxh3_64_hexdigest(data)
