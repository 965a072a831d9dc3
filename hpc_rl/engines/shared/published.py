"""The part of a rank in a published version: its pieces by their names in checkpoint files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hpc_rl.engines.base import PublishedPiece
from hpc_rl.engines.shared import expert_files, hf_io
from hpc_rl.engines.shared.expert_files import Shapes
from hpc_rl.engines.shared.pieces import Piece


def name_pieces(
    hf: Any, shapes: Shapes, pieces: Iterable[Piece], dtype: torch.dtype
) -> list[PublishedPiece] | None:
    """Return pieces of parameters by their names in files; None if files merge or split them in another way.

    `shapes` has all parameters of the model, by their names in memory.
    """
    wholes = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    in_files = {name: tuple(one.shape) for name, one in hf_io.convert_to_disk_names(hf, wholes).items()}
    if in_files != dict(shapes):
        if expert_files.map_shapes_to_files(shapes, in_files) != in_files:
            return None
        pieces = expert_files.map_to_files(pieces, in_files)
    return [PublishedPiece(one.name, one.local, one.offset, one.shape, dtype) for one in pieces]
