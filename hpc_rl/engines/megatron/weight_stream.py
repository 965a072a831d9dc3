"""Gathers whole tensors of the model on rank 0 from the parts of all ranks."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_rl.engines.megatron.weight_map import Rectangle
from hpc_rl.engines.shared import hf_io
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.engines.shared.pieces import Piece

Pieces = dict[str, list[Piece]]
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and sizes of a piece


@dataclass
class RankParameter:
    """A parameter of this rank's part of the model."""

    value: nn.Parameter
    rectangles: list[Rectangle]
    is_first: bool  # no earlier tensor rank or stage has the same values
    is_owned: bool  # no earlier data rank has them either

    def pieces(self) -> Iterator[Piece]:
        flat = self.value.detach().view(-1)
        for one in self.rectangles:
            values = flat[one.start : one.start + math.prod(one.sizes)].view(one.sizes)
            yield Piece(one.name, values, one.offset, one.shape)


class WeightStream:
    """Streams the tensors of a model to rank 0. Only names and shapes of `hf` are used."""

    def __init__(self, hf: Any, mesh: Mesh, parameters: list[RankParameter], dtype: torch.dtype) -> None:
        """Exchange which rank has which pieces. Collective."""
        self.hf, self.mesh, self.parameters, self.dtype = hf, mesh, parameters, dtype
        self.shapes = {name: tuple(one.shape) for name, one in hf.named_parameters()}
        boxes = {
            name: [(one.offset, tuple(one.local.shape)) for one in found]
            for name, found in self._list_owned().items()
        }
        self.owners: list[dict[str, list[Box]]] = [{} for _ in range(mesh.num_ranks)]
        dist.all_gather_object(self.owners, boxes)

    def buckets(
        self, bucket_bytes: int, merge: Callable[[Piece], Piece] = lambda piece: piece
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield lists of (name in checkpoints, CPU tensor) on rank 0, [] elsewhere. Collective.

        `merge` changes the values of pieces.
        """
        mine = {name: list(map(merge, pieces)) for name, pieces in self._list_owned().items()}
        shapes: dict[str, tuple[int, ...]] = {}
        size_bytes = 0
        for name, shape in self.shapes.items():
            shapes[name] = shape
            size_bytes += math.prod(shape) * self.dtype.itemsize
            if size_bytes >= bucket_bytes:
                yield _exchange_bucket(self.hf, self.mesh, mine, self.owners, shapes, self.dtype)
                shapes, size_bytes = {}, 0
        yield _exchange_bucket(self.hf, self.mesh, mine, self.owners, shapes, self.dtype)

    def _list_owned(self) -> Pieces:
        """Return the pieces that no earlier rank has, by name."""
        mine: Pieces = {}
        for one in self.parameters:
            for piece in one.pieces() if one.is_owned else ():
                mine.setdefault(piece.name, []).append(piece)
        return mine


def _exchange_bucket(
    hf: Any,
    mesh: Mesh,
    mine: Pieces,
    owners: list[dict[str, list[Box]]],
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> list[tuple[str, torch.Tensor]]:
    """Send this rank's pieces of some tensors in one message; on rank 0, receive the pieces of all others."""
    pieces = [piece for name in shapes for piece in mine.get(name, ())]
    if mesh.rank:
        if pieces:
            dist.send(torch.cat([piece.local.to(dtype).reshape(-1) for piece in pieces]), 0)
        return []
    wholes = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    for piece in pieces:
        wholes[piece.name][piece.slices()] = piece.local.to("cpu", dtype)
    theirs = [
        (rank, Piece(name, torch.empty(sizes, device="meta"), offset, shapes[name]))
        for rank in range(1, mesh.num_ranks)
        for name in shapes
        for offset, sizes in owners[rank].get(name, ())
    ]
    for rank, found in groupby(theirs, key=lambda one: one[0]):
        sent = [piece for _, piece in found]
        sizes = [piece.local.numel() for piece in sent]
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        message = torch.empty(sum(sizes), dtype=dtype, device=device)
        dist.recv(message, rank)
        for piece, values in zip(sent, message.cpu().split(sizes), strict=True):
            wholes[piece.name][piece.slices()] = values.view(piece.local.shape)
    return list(hf_io.convert_to_disk_names(hf, wholes).items())
