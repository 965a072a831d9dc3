"""The values that change from one published version to the next, decoded while the engine still generates.

They are all values of a small model that changes everywhere, as in float32.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from hpc_rl.core.errors import Damaged
from hpc_rl.core.types import WeightVersion
from hpc_rl.weight_files.chain import VersionIndex, load_rank
from hpc_rl.weight_files.difference import Rectangle
from hpc_rl.weight_files.rank_file import StoredRectangle

logger = logging.getLogger(__name__)
MAX_WHOLE_BYTES = 64 << 20  # of a version with all values; larger ones are loaded from the node's copy
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class NewValues:
    """New values of a rectangle of a tensor."""

    rectangle: Rectangle
    positions: torch.Tensor | None  # int64 [n], in the flat tensor; None for all values of the rectangle
    values: torch.Tensor  # [n], in the type of the engine

    def write(self, tensor: torch.Tensor) -> None:
        """Overwrite values of the whole tensor, which is contiguous."""
        if self.positions is not None:
            tensor.view(-1).index_copy_(0, self.positions, self.values)
            return
        rectangle = self.rectangle
        place = tuple(
            slice(at, at + size) for at, size in zip(rectangle.offset, rectangle.shape, strict=True)
        )
        tensor[place].copy_(self.values.view(rectangle.shape))


@dataclass(frozen=True)
class PreparedChanges:
    """All values that differ between a version and its base; without a base, all values."""

    base: WeightVersion | None
    version: WeightVersion
    parts: list[NewValues] = field(repr=False)

    def fits(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Return whether each part belongs to a contiguous tensor of its shape."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor.is_contiguous()}
        return all(shapes.get(part.rectangle.name) == part.rectangle.whole_shape for part in self.parts)

    def covers(self, sizes: dict[str, int]) -> bool:
        """Return whether they replace all values of tensors with these numbers of values."""
        found = dict.fromkeys(sizes, 0)
        for part in self.parts:
            if part.positions is not None or part.rectangle.name not in found:
                return False
            found[part.rectangle.name] += part.rectangle.num_values
        return found == sizes


def load_changes(folder: Path, dtype: torch.dtype) -> PreparedChanges | None:
    """Return the changes of the version in a directory, in the type of the engine.

    Returns None for all values of a large model, or if the version can't be read: the node's copy has it too.
    """
    try:
        index = VersionIndex.read(folder)
        if index is None or (index.base is None and index.whole_bytes > MAX_WHOLE_BYTES):
            return None
        ranks = range(len(index.files))
        parts = [_decode(stored, dtype) for rank in ranks for stored in load_rank(folder, index, rank)]
    except (Damaged, OSError) as error:
        form = "the server can't read which values changed in weights %s, so it loads all values: %s"
        logger.warning(form, folder.name, error)
        return None
    return PreparedChanges(index.base, index.version, [part for part in parts if len(part.values)])


def _decode(stored: StoredRectangle, dtype: torch.dtype) -> NewValues:
    rectangle, positions = stored.rectangle, None
    if stored.changes is not None:
        positions = torch.from_numpy(rectangle.positions_in_whole(stored.changes.positions()))
    # the file's bytes can't be written, which PyTorch would warn about
    words = torch.from_numpy(np.array(stored.values).view(np.uint8))
    return NewValues(rectangle, positions, words.view(_DTYPES[rectangle.dtype]).to(dtype))
