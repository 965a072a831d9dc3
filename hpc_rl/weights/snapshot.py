"""One rank's part of the published weights: a copy of the current values, compared with the previous copy.

A copy is made between two updates and blocks training; it is compared and written while training continues.
The two copies take turns, so a rank needs memory for two copies of its part in the published type.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hpc_rl.engines.base import Engine, PublishedPiece
from hpc_rl.weight_files.difference import Rectangle
from hpc_rl.weight_files.rank_file import StoredRectangle, compare

DENSE_SHARE = 0.5  # of the bytes; above it, all values are stored
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Difference:
    """One rank's part of a version."""

    stored: list[StoredRectangle]
    is_whole: bool  # all values are stored
    num_values: int
    num_changed: int  # at most: gaps that are too long also store unchanged values
    whole_bytes: int


@dataclass
class WeightSnapshot:
    """The values of this rank's rectangles, now and in the previous version."""

    engine: Engine
    pin: bool = False  # copy from a GPU to page-locked memory
    _rectangles: list[Rectangle] = field(default_factory=list)
    _now: list[np.ndarray] = field(default_factory=list)  # `Rectangle.word` [n] per rectangle
    _before: list[np.ndarray] = field(default_factory=list)  # empty: there is no previous version
    _buffers: list[torch.Tensor] = field(default_factory=list)  # uint8, the newest copy is in the first

    def take(self) -> None:
        """Copy the current values; the last copy becomes the previous version. Collective."""
        pieces = self.engine.list_published_pieces()
        if pieces is None:  # no rank knows the names in files of its part
            whole = {name: tensor for bucket in self.engine.weights() for name, tensor in bucket}
            pieces = [PublishedPiece.of_whole(name, tensor) for name, tensor in sorted(whole.items())]
        pieces = [piece for piece in pieces if piece.local.numel()]
        rectangles = [_describe(piece) for piece in pieces]
        if rectangles != self._rectangles or not self._buffers:
            size = sum(one.num_values * one.word.itemsize for one in rectangles)
            self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=self.pin) for _ in range(2)]
            self._rectangles, self._now = rectangles, []
        self._buffers.reverse()
        self._before = self._now
        self._now = _copy(pieces, rectangles, self._buffers[0])

    def list_parts(self) -> list[tuple[Rectangle, np.ndarray]]:
        """Return the newest copy of each rectangle, which the second `take` after it overwrites."""
        return list(zip(self._rectangles, self._now, strict=True))

    def compare(self, whole: bool) -> Difference:
        """Return all values, or the changes since the previous version if they are smaller."""
        num_bytes = sum(values.nbytes for values in self._now)
        before = self._before if not whole and self._before else [None] * len(self._now)
        pairs = list(zip(self._rectangles, before, self._now, strict=True))
        stored = [compare(*pair) for pair in pairs]
        if sum(one.nbytes for one in stored) > DENSE_SHARE * num_bytes:
            stored = [compare(rectangle, None, now) for rectangle, _, now in pairs]
        is_whole = all(one.is_whole for one in stored)
        return Difference(
            stored=stored,
            is_whole=is_whole,
            num_values=sum(one.num_values for one in self._rectangles),
            num_changed=sum(len(one.values) for one in stored),
            whole_bytes=num_bytes,
        )


def _describe(piece: PublishedPiece) -> Rectangle:
    return Rectangle(piece.name, DTYPES[piece.dtype], piece.offset, tuple(piece.local.shape), piece.shape)


def _copy(
    pieces: list[PublishedPiece], rectangles: list[Rectangle], buffer: torch.Tensor
) -> list[np.ndarray]:
    """Copy the pieces to CPU memory in their published types; return the values of each."""
    values, at = [], 0
    for piece, rectangle in zip(pieces, rectangles, strict=True):
        size = rectangle.num_values * rectangle.word.itemsize
        part = buffer[at : at + size]
        source = piece.local.detach()
        if source.is_cuda:  # convert there: fewer bytes to copy
            source = source.to(piece.dtype)
        part.view(piece.dtype).view(source.shape).copy_(source, non_blocking=True)
        values.append(part.numpy().view(rectangle.word))
        at += size
    if any(piece.local.is_cuda for piece in pieces):
        torch.cuda.synchronize()
    return values
