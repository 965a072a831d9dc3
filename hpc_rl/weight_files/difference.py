"""Differences between two versions of a model's weights: the values that changed, and their positions.

A rank compares the rectangles that it owns with its previous publication, byte by byte, and keeps the changed
values. Applying a difference overwrites bytes, so it is exact and may be repeated. This module knows neither
files nor ranks.

Positions count the values of a rectangle in row-major order. They are stored as gaps: the number of unchanged
values before each stored one, as uint8 or uint16, whichever is smaller for the rectangle. A gap that is too
long for the type is cut: some unchanged values are stored too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

GAP_TYPES = (np.dtype(np.uint8), np.dtype(np.uint16))
CHUNK_VALUES = 1 << 22  # compared at once: the temporary array stays in the cache
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # an unsigned type for each size of a value
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of a tensor, by the tensor's name in a Hugging Face checkpoint."""

    name: str
    dtype: str  # as safetensors names it
    offset: tuple[int, ...]  # of its first value, one index per dimension
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]  # of the tensor

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def word(self) -> np.dtype[Any]:
        """The unsigned type of compared and stored values."""
        return np.dtype(WORDS[DTYPE_BYTES[self.dtype]])

    def view(self, whole: np.ndarray) -> np.ndarray:
        """Return the rectangle's values in a tensor, as a view. `whole` is flat, of type `word`."""
        ends = tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))
        place: tuple[Any, ...] = (..., *map(slice, self.offset, ends))
        return whole.reshape(self.whole_shape)[place]

    def positions_in_whole(self, positions: np.ndarray) -> np.ndarray:
        """Return positions in the rectangle, int64 [n], as positions in the flat tensor."""
        if self.shape[1:] == self.whole_shape[1:]:
            return positions + (self.offset[0] * math.prod(self.shape[1:]) if self.shape else 0)
        indices = np.unravel_index(positions, self.shape)
        shifted = tuple(index + start for index, start in zip(indices, self.offset, strict=True))
        return np.ravel_multi_index(shifted, self.whole_shape)


@dataclass(frozen=True)
class Changes:
    """The changed values of a rectangle. Empty arrays if nothing changed."""

    gaps: np.ndarray  # uint8 or uint16 [n]
    values: np.ndarray  # `Rectangle.word` [n]

    @property
    def nbytes(self) -> int:
        return self.gaps.nbytes + self.values.nbytes

    def positions(self) -> np.ndarray:
        """Return the positions of the values in the rectangle, int64 [n], ascending."""
        return np.cumsum(self.gaps.astype(np.int64) + 1) - 1


def find_changes(before: np.ndarray, after: np.ndarray) -> Changes:
    """Compare two versions of a rectangle, flat arrays of one unsigned type and length, bit by bit."""
    if before.shape != after.shape or before.dtype != after.dtype or before.ndim != 1:
        raise ValueError(
            f"two versions of a tensor differ in type or shape: {before.dtype} {before.shape}, "
            f"{after.dtype} {after.shape}"
        )
    starts = range(0, len(after), CHUNK_VALUES)
    parts = [
        np.flatnonzero(before[at : at + CHUNK_VALUES] != after[at : at + CHUNK_VALUES]) + at for at in starts
    ]
    positions = np.concatenate(parts) if parts else np.empty(0, np.int64)
    gaps = np.diff(positions, prepend=-1) - 1
    sizes = [
        (len(gaps) + int(_count_cuts(gaps, kind).sum())) * (kind.itemsize + after.itemsize)
        for kind in GAP_TYPES
    ]
    kind = GAP_TYPES[int(np.argmin(sizes))]
    return _store_changes(positions, gaps, after, kind)


def _count_cuts(gaps: np.ndarray, kind: np.dtype[Any]) -> np.ndarray:
    """Return, per gap, the number of unchanged values that cut it into gaps of a type."""
    return gaps >> (8 * kind.itemsize)


def _store_changes(
    positions: np.ndarray, gaps: np.ndarray, after: np.ndarray, kind: np.dtype[Any]
) -> Changes:
    cuts = _count_cuts(gaps, kind)
    if cuts.any():
        longest = np.iinfo(kind).max
        ends = np.cumsum(cuts + 1) - 1
        short = np.full(len(gaps) + cuts.sum(), longest, np.int64)
        short[ends] = gaps - cuts * (longest + 1)
        gaps, positions = short, np.cumsum(short + 1) - 1
    return Changes(gaps.astype(kind), after[positions])


def apply_changes(rectangle: Rectangle, changes: Changes, whole: np.ndarray) -> None:
    """Overwrite the changed values in a tensor, a flat array of `Rectangle.word`.

    Raises ValueError if the changes do not fit the rectangle; then nothing was written.
    """
    positions = changes.positions()
    if len(changes.gaps) != len(changes.values) or changes.values.dtype != rectangle.word:
        counts = f"{len(changes.gaps)} positions and {len(changes.values)} values of {changes.values.dtype}"
        raise ValueError(
            f"the changes have {counts}; allowed: one value of type {rectangle.word} for each position"
        )
    if len(positions) and positions[-1] >= rectangle.num_values:
        last = rectangle.num_values - 1
        raise ValueError(f"a changed value is at position {positions[-1]}, allowed: 0 to {last}")
    whole[rectangle.positions_in_whole(positions)] = changes.values


def digest(values: np.ndarray) -> str:
    """Return the xxh3 (64 bits, hex) of an array's values in row-major order."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values).data)
