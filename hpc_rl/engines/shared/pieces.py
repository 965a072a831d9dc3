"""Rectangles of tensors: a rank's part of a model, by the Hugging Face names of the tensors.

All layouts and engines use them: checkpoints are loaded into the rectangles of a rank, and recover state is
saved as rectangles, so any other layout can load it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement, Shard

Kind = Literal["model", "exp_avg", "exp_avg_sq"]


class Piece(NamedTuple):
    """Memory for a rectangle of the tensor `name`, from `offset` on (one index per dimension)."""

    name: str
    local: torch.Tensor  # of the rectangle's shape, with any strides
    offset: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole tensor

    def slices(self) -> tuple[slice, ...]:
        """Return the position of the rectangle in the whole tensor."""
        ends = map(sum, zip(self.offset, self.local.shape, strict=True))
        return tuple(map(slice, self.offset, ends))


class StatePiece(NamedTuple):
    """A piece of a model or of an optimizer's moments. Only one of its replicas is saved; all are loaded."""

    kind: Kind
    piece: Piece
    is_saved: bool = True

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.piece.name


def find_offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the offset of this rank's part of a distributed tensor; zeros for any other tensor.

    The last dimension of the mesh cuts first, because FSDP shards the parts of tensor parallelism. Each
    dimension cuts as torch.chunk does.
    """
    offset, size = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        for dim in reversed(range(tensor.device_mesh.ndim)):
            at = find_cut_dimension(tensor.placements[dim])
            if at is not None:
                part = -(-size[at] // tensor.device_mesh.size(dim))
                first = min(tensor.device_mesh.get_local_rank(dim) * part, size[at])
                offset[at] += first
                size[at] = min(part, size[at] - first)
        found = tuple(tensor.to_local().shape)
        assert found == tuple(size), f"a part of {tuple(tensor.shape)} is {found}, expected {tuple(size)}"
    return tuple(offset)


def find_cut_dimension(placement: Placement) -> int | None:
    """Return the dimension of a tensor that a placement cuts, if any."""
    # FSDP's own class is private; it means that tensor parallelism has cut the same dimension before
    is_cut = isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard"
    return getattr(placement, "dim") if is_cut else None  # noqa: B009


def find_overlap(one: Piece, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """Return the overlap of a piece and a rectangle at `offset` of `shape`, as slices of the whole tensor."""
    part = tuple(
        slice(max(a.start, start), min(a.stop, start + size))
        for a, start, size in zip(one.slices(), offset, shape, strict=True)
    )
    return None if any(a.start >= a.stop for a in part) else part


def shift_slices(part: tuple[slice, ...], offset: tuple[int, ...]) -> tuple[slice, ...]:
    """Convert slices of a whole tensor to slices of a rectangle that begins at `offset`."""
    return tuple(slice(a.start - at, a.stop - at) for a, at in zip(part, offset, strict=True))


def split_flat(whole: Piece, start: int, flat: torch.Tensor) -> Iterator[Piece]:
    """Split a flat tensor with values of a piece into rectangles, as views.

    `flat` has the values of `whole` from position `start` on, in row-major order; only the shape of
    `whole.local` is used. Two dimensions give at most three rectangles: the end of a row, whole rows, and
    the beginning of a row.
    """
    shape = tuple(whole.local.shape)
    if len(shape) <= 1:
        if flat.numel():
            yield Piece(
                whole.name, flat.view(flat.numel()), _move_offset(whole.offset, 0, start), whole.shape
            )
        return
    row = math.prod(shape[1:])
    done = 0
    while done < flat.numel():
        at, inside = divmod(start + done, row)
        left = flat.numel() - done
        if inside == 0 and left >= row:
            count = left // row
            rows = flat[done : done + count * row].view(count, *shape[1:])
            yield Piece(whole.name, rows, _move_offset(whole.offset, 0, at), whole.shape)
            done += count * row
            continue
        size = min(left, row - inside)
        inner = Piece(whole.name, whole.local[at], whole.offset[1:], whole.shape[1:])
        for part in split_flat(inner, inside, flat[done : done + size]):
            offset = (whole.offset[0] + at, *part.offset)
            yield Piece(whole.name, part.local.unsqueeze(0), offset, whole.shape)
        done += size


def _move_offset(offset: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*offset[:dim], offset[dim] + by, *offset[dim + 1 :]) if offset else ()
