"""Files in blocks of 8 MiB with a checksum each: hashed while written, checked while read.

A reader of a part of a file reads and checks only the blocks of that part, and reads no byte twice. Large
files bypass the page cache if the file system allows it: that halves the CPU work, and does not evict the
pages of others. Blocks that are already cached are read from the cache. This module does not interpret the
bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from hpc_rl.core.errors import Damaged

# NumPy is imported only to move bytes: commands that only list generations do not wait for it
if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)
BLOCK_BYTES = 8 << 20
NUM_WRITERS = 2  # one block is hashed while another is written; more would wait for the lock of the inode
NUM_READERS = 4
NUM_READ_AHEAD = 4  # blocks
DIRECT_BYTES = 64 << 20  # files from this size on bypass the page cache
AGAIN_S = 1.0  # seconds before a failed read is repeated
_ALIGN_BYTES = 4096  # of addresses, offsets and sizes past the page cache
_HUGE_BYTES = 2 << 20  # of a huge page
_DIGITS = 16  # of one block's xxh3 (64 bits), in hex
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class FileRecord:
    """One file: its name in its folder, its size in bytes, and the xxh3 of its blocks in hex, in a row."""

    name: str
    size: int
    xxh3: str


class Elsewhere(Protocol):
    """Bytes outside of CPU memory, such as on a GPU; they are copied to it block by block."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice) -> Elsewhere: ...

    def copy_to(self, memory: memoryview) -> None:
        """Copy all bytes to CPU memory of the same size; any thread may call it."""


Part = memoryview | Elsewhere


class Abandoned(Exception):
    """A write was called off by its caller."""


def write(
    path: Path, parts: Sequence[Part], cancel: threading.Event | None = None, durable: bool = True
) -> FileRecord:
    """Write the parts in order as a new file. If it is not `durable`, a crash may damage it.

    Space is reserved first if the file system can do that: a full disk or quota is met before anything is
    written. Raises OSError (the caller removes the file), and Abandoned once `cancel` is set.
    """
    size = sum(len(part) for part in parts)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    direct = _open_direct(path, os.O_WRONLY) if size >= DIRECT_BYTES else None
    staging = _Staging()
    try:
        _reserve(fd, size)

        def write_block(block: tuple[int, list[Part]]) -> str:
            if cancel is not None and cancel.is_set():
                raise Abandoned
            return _write_block(
                fd if direct is None else direct, direct is not None, staging.get_view(), *block
            )

        digests = _map_parallel(write_block, list(_cut(parts)), NUM_WRITERS)
        if direct is not None:
            os.ftruncate(fd, size)  # the last block was written in whole units
        if durable:
            os.fsync(fd)
    finally:
        if direct is not None:
            os.close(direct)
        os.close(fd)  # its error counts: a network file system may report a quota only here
    return FileRecord(path.name, size, "".join(digests) or _hash_file(b""))


def record(path: Path) -> FileRecord:
    """Return the record of an existing file: reads every byte. Raises OSError."""
    with CheckedReader(path) as reader:
        digests = _map_parallel(lambda i: _hash_file(reader.block(i)), range(reader.num_blocks), NUM_READERS)
        return FileRecord(path.name, reader.size, "".join(digests) or _hash_file(b""))


def retry_once(path: Path, work: Callable[[], Any]) -> Any:
    """Call a read of `path`, and call it once more after a moment if the medium reports an error."""
    try:
        return work()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        logger.warning("%s could not be read (%s); it is read once more", path, error.strerror)
        time.sleep(AGAIN_S)
        return work()


def _call_or_damaged(path: Path, what: str, work: Callable[[], Any]) -> Any:
    """Call a read, twice if needed. Raises Damaged if the medium fails again, else OSError."""
    try:
        return retry_once(path, work)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise Damaged(f"{what} can't be read: {error.strerror}") from error


class CheckedReader:
    """One file, read in whole blocks that are checked against a record; without a record nothing is checked.

    Raises OSError, and Damaged with the file's name if the size or a block differs from the record.
    """

    def __init__(self, path: Path, expected: FileRecord | None = None) -> None:
        self.path = path
        self.expected = expected
        self._fd: int = _call_or_damaged(path, path.name, lambda: os.open(path, os.O_RDONLY))
        self.size = os.fstat(self._fd).st_size
        self.num_blocks = -(-self.size // BLOCK_BYTES)
        self._direct = _open_direct(path, os.O_RDONLY) if self.size >= DIRECT_BYTES else None
        self._cached = _find_cached_blocks(self._fd, self.size) if self._direct is not None else []
        self._staging = _Staging()
        self._kept: dict[int, np.ndarray] = {}  # blocks of small reads: the next one is mostly in them too
        if expected is not None and expected.size != self.size:
            self.__exit__()
            raise Damaged(f"{path.name} has {self.size} bytes, {expected.size} were written")

    def __enter__(self) -> CheckedReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)

    def block(self, index: int) -> memoryview:
        """Return block `index`, checked; valid until this thread asks for the next one."""
        start = index * BLOCK_BYTES
        size = min(BLOCK_BYTES, self.size - start)
        view = self._staging.get_view()
        what = f"{self.path.name}: bytes {start} to {start + size}"
        _call_or_damaged(self.path, what, lambda: self._load_block(index, view, size, start))
        view = view[:size]
        if self.expected is not None:
            digest = self.expected.xxh3[index * _DIGITS : (index + 1) * _DIGITS]
            if digest != _hash_file(view):
                raise Damaged(f"{what} differ from what was written: the checksums are not equal")
        return view

    def _load_block(self, index: int, view: memoryview, size: int, start: int) -> None:
        """Read a block past the page cache, or from the cache if all of the block is there."""
        if self._direct is not None and not self._cached[index]:
            try:
                if os.preadv(self._direct, [view[: _align(size)]], start) >= size:
                    return
            except OSError as error:
                if error.errno != errno.EINVAL:  # the file system needs another alignment
                    raise
        os.posix_fadvise(self._fd, start + NUM_READ_AHEAD * BLOCK_BYTES, BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
        done = 0
        while done < size:
            count = os.preadv(self._fd, [view[done:size]], start + done)
            if not count:
                raise Damaged(f"{self.path.name} ends too early, at byte {start + done}")
            done += count

    def check(self) -> None:
        if self.expected is not None and len(self.expected.xxh3) != _DIGITS * max(1, self.num_blocks):
            raise Damaged(f"{self.path.name} can't be checked: its list of checksums lacks some blocks")
        _map_parallel(lambda index: len(self.block(index)), range(self.num_blocks), NUM_READERS)

    def read(self, start: int, end: int) -> bytes:
        """Return a few bytes. Raises Damaged if the file ends before."""
        if end > self.size or start > end:
            raise Damaged(
                f"{self.path.name} has {self.size} bytes, but its bytes {start} to {end} are needed"
            )
        import numpy as np

        for index in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            if index not in self._kept:
                self._kept[index] = np.frombuffer(self.block(index), np.uint8).copy()
        target = np.empty(end - start, np.uint8)
        self.fill([(start, target)])
        return target.tobytes()

    def fill(self, wanted: Sequence[tuple[int, np.ndarray]]) -> None:
        """Read several ranges, each from its offset into its flat uint8 array, as many bytes as that has."""
        import numpy as np

        by_block: dict[int, list[tuple[int, np.ndarray]]] = {}
        for start, target in wanted:
            if start + len(target) > self.size:
                raise Damaged(f"{self.path.name} has {self.size} bytes, but {start + len(target)} are needed")
            last = -(-(start + len(target)) // BLOCK_BYTES) if len(target) else 0
            for index in range(start // BLOCK_BYTES, last):
                by_block.setdefault(index, []).append((start, target))

        def fill_block(index: int) -> None:
            block = self._kept[index] if index in self._kept else np.frombuffer(self.block(index), np.uint8)
            first, last = index * BLOCK_BYTES, index * BLOCK_BYTES + len(block)
            for start, target in by_block[index]:
                begin, end = max(start, first), min(start + len(target), last)
                target[begin - start : end - start] = block[begin - first : end - first]

        _map_parallel(fill_block, sorted(by_block), NUM_READERS)


def _cut(parts: Sequence[Part]) -> Iterator[tuple[int, list[Part]]]:
    """Yield (offset, pieces) of every block."""
    offset, block, room = 0, list[Part](), BLOCK_BYTES
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


def _write_block(fd: int, direct: bool, staging: memoryview, offset: int, pieces: list[Part]) -> str:
    """Write a block from one piece of memory; past the page cache in whole units. Return its checksum."""
    import numpy as np

    size = 0
    for piece in pieces:
        place = slice(size, size + len(piece))
        if isinstance(piece, memoryview):
            # NumPy copies without the lock of the interpreter.
            np.frombuffer(staging, np.uint8)[place] = np.frombuffer(piece, np.uint8)
        else:
            piece.copy_to(staging[place])
        size += len(piece)
    done, end = 0, _align(size) if direct else size
    while done < end:
        done += os.pwritev(fd, [staging[done:end]], offset + done)
    if not direct:
        _start_writeback(fd, offset, size)
    return _hash_file(staging[:size])


class _Staging(threading.local):
    """A block of memory for each thread, in huge pages if the kernel has them.

    A request past the page cache is split wherever its memory is not contiguous, which small pages soon are
    not (0.5 to 1.6 GB/s depending on fragmentation; 1.8 and more with huge pages).
    """

    def get_view(self) -> memoryview:
        if not hasattr(self, "own"):
            memory = mmap.mmap(-1, BLOCK_BYTES + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
            start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_BYTES
            self.own = memoryview(memory)[start : start + BLOCK_BYTES]
        return self.own


def _align(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


def _open_direct(path: Path, flags: int) -> int | None:
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None  # a file system without it


def _find_cached_blocks(fd: int, size: int) -> list[bool]:
    """Return, for each block of a file, whether all of it is in the page cache."""
    import numpy as np

    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with mmap.mmap(fd, size, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        vector = pages.ctypes.data_as(ctypes.c_char_p)
        failed = _libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), vector)
        del start  # else the mapping can't be closed
    per_block = BLOCK_BYTES // mmap.PAGESIZE
    blocks = np.split(pages & 1, range(per_block, len(pages), per_block))
    return [not failed and bool(block.all()) for block in blocks]


def _start_writeback(fd: int, offset: int, size: int) -> None:
    # A hint to the kernel, so that the final fsync finds little to do: errors are ignored.
    if hasattr(_libc, "sync_file_range"):
        where = ctypes.c_int64(offset), ctypes.c_int64(size)
        _libc.sync_file_range(fd, *where, ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def _reserve(fd: int, size: int) -> None:
    # the system call itself: the C library's substitute would write a byte into every block
    if not size or not hasattr(_libc, "fallocate"):
        return
    while _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _map_parallel(work: Callable[[Any], Any], items: Iterable[Any], num_threads: int) -> list[Any]:
    """Return results in order; the first error cancels the rest, with no work left running."""
    items = list(items)
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, items))


def _hash_file(data: Any) -> str:
    return xxhash.xxh3_64_hexdigest(data)
