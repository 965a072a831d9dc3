"""The file of one rank in a published version: its rectangles, each whole or as the values that changed.

A safetensors file. Rectangle `i` has the entry `i.values`, and `i.gaps` (U8 or U16) unless it is stored
whole; a rectangle without entries did not change. The header's metadata has `version`, JSON: {"format",
"rank", "rectangles": [{"name", "dtype", "offset", "shape", "whole_shape", "xxh3"}]}. `xxh3` is the checksum
of the rectangle's values in this version.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_rl.core import checked_file
from hpc_rl.core.checked_file import CheckedReader, FileRecord
from hpc_rl.core.errors import Damaged
from hpc_rl.weight_files.difference import (
    DTYPE_BYTES,
    GAP_TYPES,
    Changes,
    Rectangle,
    apply_changes,
    digest,
    find_changes,
)

FORMAT = 1
GAP_NAMES = {1: "U8", 2: "U16"}  # by bytes
ALIGN_BYTES = 64  # of the first array in a file


@dataclass(frozen=True)
class StoredRectangle:
    """A rectangle in one version: its checksum and its stored values."""

    rectangle: Rectangle
    xxh3: str  # of all its values in this version
    changes: Changes | None  # None if all values are stored
    values: np.ndarray  # `Rectangle.word` [n], all values or the changed ones

    @property
    def is_whole(self) -> bool:
        return self.changes is None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (self.changes.gaps.nbytes if self.changes else 0)

    def apply(self, whole: np.ndarray) -> None:
        """Bring the rectangle of a tensor, a flat array of `Rectangle.word`, to this version.

        The tensor must have the previous version, unless the rectangle is stored whole. Raises Damaged if the
        result has another checksum.
        """
        view = self.rectangle.view(whole)
        try:
            if self.changes is None:
                view[...] = self.values.reshape(self.rectangle.shape)
            else:
                apply_changes(self.rectangle, self.changes, whole)
        except ValueError as error:
            raise Damaged(f"the stored values do not fit tensor {self.rectangle.name}: {error}") from error
        if digest(view) != self.xxh3:
            part = f"tensor {self.rectangle.name} (part at {list(self.rectangle.offset)})"
            raise Damaged(f"{part} differs from the published one: its checksum is another")


def compare(rectangle: Rectangle, before: np.ndarray | None, after: np.ndarray) -> StoredRectangle:
    """Return the stored form of a rectangle: its changes or all of its values, whichever is smaller.

    Args:
        rectangle: Where the values are.
        before: The values in the previous version, flat, of type `Rectangle.word`; None stores all values.
        after: The new values. If all are stored, they are referenced, not copied.
    """
    checksum = digest(after)
    if before is not None:
        changes = find_changes(before, after)
        if changes.nbytes < after.nbytes:
            return StoredRectangle(rectangle, checksum, changes, changes.values)
    return StoredRectangle(rectangle, checksum, None, after)


def write(
    path: Path, rank: int, stored: list[StoredRectangle], cancel: threading.Event | None = None
) -> FileRecord:
    """Write the file of a rank. Raises OSError, and checked_file.Abandoned once `cancel` is set.

    A crash of the file server may damage it. Readers notice that, and the trainer's next start writes all
    values.
    """
    entries: dict[str, tuple[str, np.ndarray]] = {}
    for i, one in enumerate(stored):
        if one.changes is not None and len(one.values):
            entries[f"{i}.gaps"] = (GAP_NAMES[one.changes.gaps.itemsize], one.changes.gaps)
        if len(one.values):
            entries[f"{i}.values"] = (one.rectangle.dtype, one.values)
    rectangles = [vars(one.rectangle) | {"xxh3": one.xxh3} for one in stored]
    metadata = {"version": json.dumps({"format": FORMAT, "rank": rank, "rectangles": rectangles})}
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, (dtype, array) in entries.items():
        header[name] = {
            "dtype": dtype,
            "shape": [len(array)],
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    parts = [memoryview(len(text).to_bytes(8, "little") + text)]
    parts += [array.view(np.uint8).data for _, array in entries.values()]
    return checked_file.write(path, parts, cancel, durable=False)


def load(path: Path, rank: int, expected: FileRecord | None) -> Iterator[StoredRectangle]:
    """Yield the rectangles of a rank's file, checked against its record.

    Raises Damaged if the file differs from the written one, OSError.
    """
    with CheckedReader(path, expected) as reader:
        begin, header, rectangles = _load_metadata(reader, rank)
        for i, (rectangle, checksum) in enumerate(rectangles):
            values = _load_array(reader, begin, header.get(f"{i}.values"), rectangle.word)
            gaps_entry = header.get(f"{i}.gaps")
            gaps = _load_array(reader, begin, gaps_entry, _find_gap_type(reader, gaps_entry))
            is_whole = f"{i}.gaps" not in header and f"{i}.values" in header
            changes = None if is_whole or not rectangle.num_values else Changes(gaps, values)
            yield StoredRectangle(rectangle, checksum, changes, values)


def load_rectangles(path: Path, rank: int, expected: FileRecord | None) -> list[Rectangle]:
    """Return the rectangles of a rank's file, without their values. Raises Damaged, OSError."""
    try:
        with CheckedReader(path, expected) as reader:
            return [rectangle for rectangle, _ in _load_metadata(reader, rank)[2]]
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error


def _load_metadata(
    reader: CheckedReader, rank: int
) -> tuple[int, dict[str, Any], list[tuple[Rectangle, str]]]:
    """Return the offset of the arrays, the header's entries, and the rectangles with their checksums."""
    begin, header = _load_header(reader)
    path = reader.path
    try:
        described = json.loads(header.pop("__metadata__")["version"])
        if (described["format"], described["rank"]) != (FORMAT, rank):
            came = f"rank {described['rank']} in format {described['format']}"
            raise Damaged(f"{path} is from trainer {came}, expected: rank {rank} in format {FORMAT}")
        return begin, header, [(_parse_rectangle(one), str(one["xxh3"])) for one in described["rectangles"]]
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path} is not a file of published weights: {error!r}") from error


def _load_header(reader: CheckedReader) -> tuple[int, dict[str, Any]]:
    try:
        begin = 8 + int.from_bytes(reader.read(0, 8), "little")
        header = json.loads(reader.read(8, begin))
    except ValueError as error:
        raise Damaged(
            f"{reader.path} has no safetensors header, so it is damaged or another kind of file: {error}"
        ) from error
    if not isinstance(header, dict):
        raise Damaged(f"{reader.path} has no safetensors header, so it is damaged or another kind of file")
    return begin, header


def _parse_rectangle(record: dict[str, Any]) -> Rectangle:
    sizes = (tuple(map(int, record[key])) for key in ("offset", "shape", "whole_shape"))
    if record["dtype"] not in DTYPE_BYTES:
        raise ValueError(f"unknown type {record['dtype']!r}")
    rectangle = Rectangle(str(record["name"]), record["dtype"], *sizes)
    ends = [start + size for start, size in zip(rectangle.offset, rectangle.shape, strict=True)]
    if min(rectangle.offset, default=0) < 0 or any(
        end > size for end, size in zip(ends, rectangle.whole_shape, strict=True)
    ):
        part = f"offset {list(rectangle.offset)}, shape {list(rectangle.shape)}"
        whole = list(rectangle.whole_shape)
        raise ValueError(f"a part of tensor {rectangle.name} ({part}) exceeds its shape {whole}")
    return rectangle


def _find_gap_type(reader: CheckedReader, entry: dict[str, Any] | None) -> np.dtype[Any]:
    stored = "U8" if entry is None else entry.get("dtype")
    for kind in GAP_TYPES:
        if GAP_NAMES[kind.itemsize] == stored:
            return kind
    raise Damaged(f"{reader.path} is damaged: its positions of changed values have the unknown type {stored}")


def _load_array(
    reader: CheckedReader, begin: int, entry: dict[str, Any] | None, word: np.dtype[Any]
) -> np.ndarray:
    if entry is None:
        return np.empty(0, word)
    try:
        start, end = entry["data_offsets"]
        array = np.empty((end - start) // word.itemsize, word)
        target = array.view(np.uint8)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{reader.path} has a damaged header: {error!r}") from error
    reader.fill([(begin + start, target)])
    return array
