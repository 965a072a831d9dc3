"""Rectangles of tensors: what a rank has of a model, by the Hugging Face names of its tensors.

They are what layouts and engines have in common: a checkpoint is read into the rectangles of a rank, and
recover state is saved as rectangles, to be read by any other layout.
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
        """Return where the rectangle is in the whole tensor."""
        ends = map(sum, zip(self.offset, self.local.shape, strict=True))
        return tuple(map(slice, self.offset, ends))


class StatePiece(NamedTuple):
    """A piece of a model or of an optimizer's moments; of replicas only one is saved, but all are loaded."""

    kind: Kind
    piece: Piece
    is_saved: bool = True

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.piece.name


def offset_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return where this rank's part of a distributed tensor begins; that of any other tensor at its begin.

    The last dimension of the mesh cuts first, as FSDP shards what tensor parallelism left of a parameter;
    each cuts as torch.chunk does.
    """
    offset, size = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        for dim in reversed(range(tensor.device_mesh.ndim)):
            at = cut_dimension(tensor.placements[dim])
            if at is not None:
                part = -(-size[at] // tensor.device_mesh.size(dim))
                first = min(tensor.device_mesh.get_local_rank(dim) * part, size[at])
                offset[at] += first
                size[at] = min(part, size[at] - first)
        found = tuple(tensor.to_local().shape)
        assert found == tuple(size), f"a part of {tuple(tensor.shape)} is {found}, expected {tuple(size)}"
    return tuple(offset)


def cut_dimension(placement: Placement) -> int | None:
    """Return which dimension of a tensor a placement cuts, if any."""
    # FSDP's own kind is private; it says that tensor parallelism has cut the same dimension before
    is_cut = isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard"
    return getattr(placement, "dim") if is_cut else None  # noqa: B009


def overlap(one: Piece, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """Return what a piece and a rectangle at `offset` of `shape` have in common, as slices of the whole."""
    part = tuple(
        slice(max(a.start, start), min(a.stop, start + size))
        for a, start, size in zip(one.slices(), offset, shape, strict=True)
    )
    return None if any(a.start >= a.stop for a in part) else part


def shifted(part: tuple[slice, ...], offset: tuple[int, ...]) -> tuple[slice, ...]:
    """Return slices of a whole tensor as those of a rectangle that begins at `offset`."""
    return tuple(slice(a.start - at, a.stop - at) for a, at in zip(part, offset, strict=True))


def flat_pieces(whole: Piece, start: int, flat: torch.Tensor) -> Iterator[Piece]:
    """Yield the rectangles of what a flat tensor has of a piece, as views of it.

    `flat` has the values of `whole` from position `start` on, in the order of rows; `whole.local` gives the
    shape only. Of two dimensions there are at most three: the rest of a row, rows, and the begin of one.
    """
    shape = tuple(whole.local.shape)
    if len(shape) <= 1:
        if flat.numel():
            yield Piece(whole.name, flat.view(flat.numel()), _moved(whole.offset, 0, start), whole.shape)
        return
    row = math.prod(shape[1:])
    done = 0
    while done < flat.numel():
        at, inside = divmod(start + done, row)
        left = flat.numel() - done
        if inside == 0 and left >= row:
            count = left // row
            rows = flat[done : done + count * row].view(count, *shape[1:])
            yield Piece(whole.name, rows, _moved(whole.offset, 0, at), whole.shape)
            done += count * row
            continue
        size = min(left, row - inside)
        inner = Piece(whole.name, whole.local[at], whole.offset[1:], whole.shape[1:])
        for part in flat_pieces(inner, inside, flat[done : done + size]):
            offset = (whole.offset[0] + at, *part.offset)
            yield Piece(whole.name, part.local.unsqueeze(0), offset, whole.shape)
        done += size


def _moved(offset: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*offset[:dim], offset[dim] + by, *offset[dim + 1 :]) if offset else ()
