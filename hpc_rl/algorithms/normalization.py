"""Normalization of rewards and advantages over the batch or over groups.

The deviation is the biased one, taken around the mean that was chosen: with no mean it is a root mean square. Sums run
in float64, because a batch has millions of tokens. There is no process group here: the caller passes the whole batch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Level = Literal["batch", "group"] | None


class Levels(NamedTuple):
    """Over what the mean and the deviation are taken; None leaves the mean or the scale alone."""

    mean: Level = "batch"
    std: Level = "batch"


def normalize(
    x: torch.Tensor, levels: Levels, group_size: int = 1, mask: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """(x - mean) / (std + eps) over the entries that `mask` selects; the others become 0.

    x: [B] or [B, T]; a group is `group_size` consecutive rows. Returns a new float32 tensor.
    Raises ValueError where a level is `group` and the rows are not whole groups.
    """
    if mask is None:
        mask = torch.ones_like(x, dtype=torch.bool)
    x64 = torch.where(mask, x, torch.zeros_like(x)).double()
    out = x64
    if levels.mean is not None:
        out = out - _average(x64, mask, levels.mean, group_size)
    if levels.std is not None:
        deviation = torch.where(mask, out, torch.zeros_like(out)).square()
        out = out / (_average(deviation, mask, levels.std, group_size).sqrt() + eps)
    return torch.where(mask, out, torch.zeros_like(out)).float()


def _average(x: torch.Tensor, mask: torch.Tensor, level: Level, group_size: int) -> torch.Tensor:
    """Mean of the masked entries (the others are 0 already), in a shape that broadcasts against x."""
    if level == "batch":
        return x.sum() / mask.sum().clamp(min=1)
    if level != "group":
        raise ValueError(f"a normalization level is batch, group or None, got {level!r}")
    check_whole_groups(len(x), group_size)
    totals = x.reshape(len(x), -1).sum(1).reshape(-1, group_size).sum(1)
    counts = mask.reshape(len(x), -1).sum(1).reshape(-1, group_size).sum(1).clamp(min=1)
    per_row = (totals / counts).repeat_interleave(group_size)
    return per_row.reshape(-1, *[1] * (x.dim() - 1))


def check_whole_groups(num_rows: int, group_size: int) -> None:
    """Raises ValueError unless the rows are whole groups: a remainder has no mean to be compared with."""
    if group_size < 1 or num_rows % group_size:
        raise ValueError(f"{num_rows} rows are not whole groups of {group_size}")
