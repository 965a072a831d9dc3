"""Experts in files: tensors of each, where transformers has one for all experts of a layer in memory. Pure.

So a rank reads what it has of its experts, where transformers would load all to merge them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from hpc_rl.engines.shared.pieces import Piece

Shapes = Mapping[str, tuple[int, ...]]
# gate, up and down projection of an expert in files, within a layer
FAMILIES = (
    ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight", "mlp.experts.{}.down_proj.weight"),
    (
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
        "block_sparse_moe.experts.{}.w2.weight",
    ),
)


def in_files(pieces: Iterable[Piece], names: Collection[str]) -> list[Piece]:
    """Return the same memory as pieces of the tensors in files, whose names are given."""
    return [part for piece in pieces for part in (_parts(piece, names) or [piece])]


def shapes_in_files(shapes: Shapes, names: Collection[str]) -> Shapes:
    """Return the shapes of the tensors in files that make up the given ones."""
    wholes = [
        Piece(name, torch.empty(shape, device="meta"), (0,) * len(shape), shape)
        for name, shape in shapes.items()
    ]
    return {part.name: part.shape for part in in_files(wholes, names)}


def _parts(piece: Piece, names: Collection[str]) -> list[Piece]:
    """Return nothing for a piece of another tensor, and for one that the files have by its name."""
    if piece.name in names or ".mlp." not in piece.name:
        return []
    layer, _, rest = piece.name.rpartition("mlp.")
    for gate, up, down in FAMILIES:
        if layer + gate.format(0) not in names:
            continue
        if rest == "gate.weight":
            router = layer + gate.partition("experts.")[0] + rest
            return [piece._replace(name=router)] if router in names else []
        if rest == "experts.gate_up_proj":
            return list(_experts(piece, [layer + gate, layer + up]))
        if rest == "experts.down_proj":
            return list(_experts(piece, [layer + down]))
    return []


def _experts(piece: Piece, templates: list[str]) -> Iterator[Piece]:
    """Yield what a piece of [experts, rows, width] has of each expert's tensors, one after another."""
    size = piece.shape[1] // len(templates)
    first, row, column = piece.offset
    for i, local in enumerate(piece.local):
        for j, template in enumerate(templates):
            begin, end = max(row, j * size), min(row + len(local), (j + 1) * size)
            if begin < end:
                rows = local[begin - row : end - row]
                offset, shape = (begin - j * size, column), (size, piece.shape[2])
                yield Piece(template.format(first + i), rows, offset, shape)
