"""Maps the experts of a model in memory to the tensors in checkpoint files. Pure.

Files have separate tensors for each expert; transformers 5 merges the experts of a layer into one tensor.
With this mapping a rank reads only its part of the experts, while transformers would load and merge all of
them.
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


def map_to_files(pieces: Iterable[Piece], names: Collection[str]) -> list[Piece]:
    """Return the same memory as pieces of the tensors in files; `names` are the names in the files."""
    return [part for piece in pieces for part in (_split_piece(piece, names) or [piece])]


def map_shapes_to_files(shapes: Shapes, names: Collection[str]) -> Shapes:
    """Return the shapes of the tensors in files that correspond to the tensors of a model."""
    wholes = [
        Piece(name, torch.empty(shape, device="meta"), (0,) * len(shape), shape)
        for name, shape in shapes.items()
    ]
    return {part.name: part.shape for part in map_to_files(wholes, names)}


def _split_piece(piece: Piece, names: Collection[str]) -> list[Piece]:
    """Return the pieces by names in files; [] if the files have the tensor itself or it has no experts."""
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
            return list(_split_experts(piece, [layer + gate, layer + up]))
        if rest == "experts.down_proj":
            return list(_split_experts(piece, [layer + down]))
    return []


def _split_experts(piece: Piece, templates: list[str]) -> Iterator[Piece]:
    """Split a piece of [experts, rows, width] into pieces of each expert's tensors."""
    size = piece.shape[1] // len(templates)
    first, row, column = piece.offset
    for i, local in enumerate(piece.local):
        for j, template in enumerate(templates):
            begin, end = max(row, j * size), min(row + len(local), (j + 1) * size)
            if begin < end:
                rows = local[begin - row : end - row]
                offset, shape = (begin - j * size, column), (size, piece.shape[2])
                yield Piece(template.format(first + i), rows, offset, shape)
