"""Read the end of a text file, and wait for space on a full disk or quota.

A process that waits for space loses nothing: it keeps its unwritten data in memory.
"""

import difflib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
FULL = (errno.ENOSPC, errno.EDQUOT)
_SHARED = (
    "nfs", "nfs4", "lustre", "gpfs", "mmfs", "beegfs", "wekafs", "ceph", "panfs", "pvfs2", "orangefs", "cifs",
    "smb3", "afs", "9p", "virtiofs", "daos",
)  # fmt: skip
AWAY_S = 60.0  # seconds that a mount may be away after a restart: the inputs were there before
PAUSE_S = (0.5, 10.0)  # between two tries: first, longest


def format_size(num_bytes: float) -> str:
    """Return a size as text, in the largest unit (of 1024) that makes it at least 0.1."""
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20)):
        if num_bytes >= size / 10:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KB"


def is_full(error: BaseException | None) -> bool:
    """Return whether an error reports a full disk or an exceeded quota."""
    return isinstance(error, OSError) and error.errno in FULL


def yield_pauses() -> Iterator[float]:
    """Yield the seconds to wait before each further try."""
    pause_s, longest_s = PAUSE_S
    while True:
        yield pause_s
        pause_s = min(longest_s, 2 * pause_s)


def wait_for_path(path: Path, until: float) -> bool:
    """Return whether a path exists, or appears before that time of the monotonic clock."""
    for pause_s in yield_pauses():
        try:
            found = path.exists()
        except OSError:  # of a file server that is away
            found = False
        if found or time.monotonic() >= until:
            return found
        time.sleep(pause_s)
    raise AssertionError("pauses don't end")


def tell_full(what: str, error: object, where: Path) -> None:
    logger.error("DISK FULL: %s can't be written (%s). The trial waits: make room in %s", what, error, where)


def tell_room(what: str) -> None:
    logger.warning("disk space is available again, and %s is written: the trial continues", what)


class Room:
    """Writes of one process below `where`. They wait for disk space; after `closing` they fail instead."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.closing = threading.Event()
        self.waiting = False  # a write waits now

    def write(self, what: str, work: Callable[[], Result]) -> Result:
        """Call `work`, repeatedly while the disk is full; the caller blocks meanwhile. Raises OSError."""
        for pause_s in yield_pauses():
            try:
                result = work()
            except OSError as error:
                if not is_full(error) or self.closing.is_set():
                    raise
                if not self.waiting:
                    tell_full(what, error, self.where)
                self.waiting = True
                self.closing.wait(pause_s)
                continue
            if self.waiting:
                tell_room(what)
            self.waiting = False
            return result
        raise AssertionError("pauses don't end")


_TAIL_BLOCK_BYTES = 64 << 10


def load_last_lines(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a file, without reading the rest; an empty list for a missing file."""
    return Tail(path, num_lines).poll()


class Tail:
    """Follows a file: the first poll returns its last `num_lines` lines, later polls return new lines."""

    def __init__(self, path: Path, num_lines: int) -> None:
        self.path = path
        self._num_lines = num_lines
        self._offset: int | None = None  # of the first byte not returned yet

    def poll(self, to_the_end: bool = True) -> list[str]:
        """Return new whole lines; with `to_the_end` the first poll also returns an incomplete last line."""
        try:
            if not self.path.is_file():
                return []
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if self._offset is None:
                    return self._poll_first(file, size, to_the_end)
                if size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return _lines(complete)

    def _poll_first(self, file, size: int, to_the_end: bool) -> list[str]:
        data, start = b"", size
        while start > 0 and data.count(b"\n") <= self._num_lines:
            start = max(0, start - _TAIL_BLOCK_BYTES)
            file.seek(start)
            data = file.read(size - start)
        if not to_the_end:
            data = data[: data.rfind(b"\n") + 1]
        self._offset = start + len(data)
        return _lines(data)[-self._num_lines :] if self._num_lines else []


def _lines(data: bytes) -> list[str]:
    return data.decode(errors="backslashreplace").splitlines()


Row = dict[str, Any]


class JsonLines:
    """A file of JSON lines that one writer appends to, read incrementally.

    A line counts once it is complete; lines that are not JSON objects (torn by a kill) are skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._offset = 0

    def poll(self) -> list[Row]:
        """Return the new rows; `rows` has all of them."""
        try:
            if not self.path.is_file():  # a device may never end, a pipe may have no writer
                return []
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:  # another file under this name
                    self._offset, self.rows = 0, []
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        new = [row for row in map(_parse_object, complete.splitlines()) if row is not None]
        self.rows.extend(new)
        return new


def _parse_object(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def find_similar_file(path: Path) -> str:
    """Return a similar name in the same directory, for a misspelt path; else an empty text."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return near[0] if near and len(path.stem) > 2 else ""


def is_shared(kind: str) -> bool:
    """Return whether mounts of this type are remote, so that all nodes may have the same files."""
    return kind in _SHARED or (kind.startswith("fuse") and kind not in ("fuseblk", "fuse.fuse-overlayfs"))


def mount_of(path: Path, table: Path = Path("/proc/self/mountinfo")) -> tuple[str, list[str]]:
    """Return type and options of the mount of a path; empty if the mount table is unreadable."""
    real, longest, kind, options = os.path.realpath(path), 0, "", [""]
    try:
        lines = table.read_text(errors="replace").splitlines()
    except OSError:
        return "", []
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, more = left.split(), right.split()
        if len(fields) < 6 or len(more) < 3:
            continue
        point = fields[4].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # Of two mounts on one point the later one hides the other.
        if inside and len(point) >= longest:
            longest, kind, options = len(point), more[0], [*fields[5].split(","), *more[2].split(",")]
    return kind, options
