"""Normalization of rewards and advantages over the batch or over groups.

The deviation is taken around the mean that was chosen: with no mean it is a root mean square. Sums run in float64,
because a batch has millions of tokens. There is no process group here: the caller passes the whole batch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Level = Literal["batch", "group"] | None


class Levels(NamedTuple):
    """Over what the mean and the deviation are taken; None leaves the mean or the scale alone.

    leave_one_out: each entry's mean is that of the others (0 where there is no other). unbiased: the deviation divides by one
    less than the count.
    """

    mean: Level = "batch"
    std: Level = "batch"
    eps: float = 1e-5
    leave_one_out: bool = False
    unbiased: bool = False


def normalize(
    x: torch.Tensor,
    levels: Levels,
    group_size: int = 1,
    mask: torch.Tensor | None = None,
    remainder: bool = False,
) -> torch.Tensor:
    """(x - mean) / (std + eps) over the entries that `mask` selects; the others become 0.

    x: [B] or [B, T]; a group is `group_size` consecutive rows. Returns a new float32 tensor.
    Raises ValueError where a level is `group` and the rows are not whole groups; with `remainder` (compat: areal) the rows beyond
    the last whole group have mean and deviation 0 instead.
    """
    if mask is None:
        mask = torch.ones_like(x, dtype=torch.bool)
    if "group" in levels and not remainder:
        check_whole_groups(len(x), group_size)
    x64 = torch.where(mask, x, torch.zeros_like(x)).double()
    out = x64
    if levels.mean is not None:
        own = x64 if levels.leave_one_out else torch.zeros_like(x64)
        total, count = _totals(x64, mask, levels.mean, group_size)
        out = out - (total - own) / (count - int(levels.leave_one_out)).clamp(min=1)
    if levels.std is not None:
        deviation = torch.where(mask, out, torch.zeros_like(out)).square()
        total, count = _totals(deviation, mask, levels.std, group_size)
        out = out / ((total / (count - int(levels.unbiased)).clamp(min=1)).sqrt() + levels.eps)
    return torch.where(mask, out, torch.zeros_like(out)).float()


def _totals(
    x: torch.Tensor, mask: torch.Tensor, level: Level, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the masked entries (the others are 0 already) and their count, in shapes that broadcast against x."""
    if level == "batch":
        return x.sum(), mask.sum()
    if level != "group":
        raise ValueError(f"a normalization level is batch, group or None, got {level!r}")
    whole = len(x) // group_size * group_size

    def per_row(values: torch.Tensor) -> torch.Tensor:
        sums = (
            values[:whole]
            .reshape(whole, -1)
            .sum(1)
            .reshape(-1, group_size)
            .sum(1)
            .repeat_interleave(group_size)
        )
        rest = torch.zeros(len(x) - whole, dtype=sums.dtype)
        return torch.cat([sums, rest]).reshape(-1, *[1] * (x.dim() - 1))

    return per_row(x), per_row(mask)


def check_whole_groups(num_rows: int, group_size: int) -> None:
    """Raises ValueError unless the rows are whole groups: a remainder has no mean to be compared with."""
    if group_size < 1 or num_rows % group_size:
        raise ValueError(f"{num_rows} rows are not whole groups of {group_size}")
