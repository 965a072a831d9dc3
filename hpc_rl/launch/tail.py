"""The end of a text file, and what is appended to it from there on. Bytes that are not UTF-8 are shown as such, never fatal."""

from __future__ import annotations

from pathlib import Path

BLOCK = 64 << 10


def last_lines(path: Path, num_lines: int) -> list[str]:
    """The last lines of a file, without reading the rest of it; empty where it is missing."""
    return Tail(path, num_lines).poll()


class Tail:
    """Follows one file: the first poll gives its last `num_lines` lines, the next ones what is new. Whole lines only."""

    def __init__(self, path: Path, num_lines: int) -> None:
        self.path = path
        self._num_lines = num_lines
        self._offset: int | None = None  # of the first byte not given yet

    def poll(self, to_the_end: bool = True) -> list[str]:
        """New lines. With `to_the_end` the first poll also gives a last line that has no line feed yet."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if self._offset is None:
                    return self._first(file, size, to_the_end)
                if size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return _lines(complete)

    def _first(self, file, size: int, to_the_end: bool) -> list[str]:
        data, start = b"", size
        while start > 0 and data.count(b"\n") <= self._num_lines:
            start = max(0, start - BLOCK)
            file.seek(start)
            data = file.read(size - start)
        if not to_the_end:
            data = data[: data.rfind(b"\n") + 1]
        self._offset = start + len(data)
        return _lines(data)[-self._num_lines :] if self._num_lines else []


def _lines(data: bytes) -> list[str]:
    return data.decode(errors="backslashreplace").splitlines()
