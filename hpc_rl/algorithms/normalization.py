"""Normalization of rewards and advantages over the batch or over groups.

The deviation is taken around the chosen mean; without a mean it is a root mean square. Sums are float64,
because a batch has millions of tokens. The caller passes the whole batch; no process group is used.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

Level = Literal["batch", "group"] | None


class Levels(NamedTuple):
    """The levels of the mean and the deviation; None keeps the mean or the scale."""

    # GRPO takes the mean of the group (Shao et al., arXiv 2402.03300, section 4.1)
    mean: Level = "batch"
    # Dr.GRPO takes no deviation (Liu et al., arXiv 2503.20783)
    std: Level = "batch"
    eps: float = 1e-5  # added to the deviation
    # use the mean of the other entries, 0 if there are none (RLOO; Ahmadian et al., arXiv 2402.14740)
    leave_one_out: bool = False
    unbiased: bool = False  # the deviation divides by the count less one


NO_GROUP = -1


def normalize(
    x: torch.Tensor,
    levels: Levels,
    group_B: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    share_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (x - mean) / (std + eps) over the entries that `mask` selects, float32; 0 elsewhere.

    x: [B] or [B, T]. group_B: the group number of each row, int64 [B]; rows of NO_GROUP have group mean and
    deviation 0. By default each row is a group. share_B: the weight of each row in mean and deviation, float
    [B]; rows that share one entry have equal x and the sum 1. Raises ValueError for an unknown level.
    """
    if mask is None:
        mask = torch.ones_like(x, dtype=torch.bool)
    if group_B is None:
        group_B = torch.arange(len(x))
    x64 = torch.where(mask, x, torch.zeros_like(x)).double()
    counts = mask if share_B is None else mask * share_B.double().reshape(-1, *[1] * (x.dim() - 1))
    out = x64
    if levels.mean is not None:
        own = x64 if levels.leave_one_out else torch.zeros_like(x64)
        total, count = _sum_totals(x64, counts, levels.mean, group_B)
        out = out - (total - own) / (count - int(levels.leave_one_out)).clamp(min=1)
    if levels.std is not None:
        deviation = torch.where(mask, out, torch.zeros_like(out)).square()
        total, count = _sum_totals(deviation, counts, levels.std, group_B)
        out = out / ((total / (count - int(levels.unbiased)).clamp(min=1)).sqrt() + levels.eps)
    return torch.where(mask, out, torch.zeros_like(out)).float()


def _sum_totals(
    x: torch.Tensor, counts: torch.Tensor, level: Level, group_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the masked entries and their count, in shapes that broadcast against x.

    `counts` is a mask, or has weights in its place; x is 0 outside of it.
    """
    if counts.dtype != torch.bool:
        x = x * counts
    if level == "batch":
        return x.sum(), counts.sum()

    def per_row(values: torch.Tensor) -> torch.Tensor:
        row_B = values.reshape(len(values), -1).sum(1).double()
        return _sum_rows(row_B, level, group_B).reshape(-1, *[1] * (x.dim() - 1))

    return per_row(x), per_row(counts)


def _sum_rows(row_B: torch.Tensor, level: Level, group_B: torch.Tensor) -> torch.Tensor:
    """Return for each row the sum of the float64 numbers of the rows that count together with it, [B]."""
    if level == "batch":
        return row_B.sum().expand(len(row_B))
    if level != "group":
        raise ValueError(f"a normalization level must be batch, group or None, got {level!r}")
    member_B = group_B != NO_GROUP
    num_groups = int(group_B.max()) + 1 if len(group_B) else 0
    group_B0 = group_B.clamp(min=0)
    total_G = torch.zeros(max(1, num_groups), dtype=torch.float64).index_add_(0, group_B0, row_B * member_B)
    return total_G[group_B0] * member_B


def normalize_rows(
    rows: Sequence[np.ndarray], masks: Sequence[np.ndarray], levels: Levels, group_B: torch.Tensor
) -> None:
    """Do in place what `normalize` does, for ragged float32 rows with bool masks of the same lengths.

    One row at a time is copied. Sums are taken in another order than in `normalize`.
    """

    def sum_up(values: Iterable[float], level: Level) -> torch.Tensor:
        return _sum_rows(torch.tensor(list(values), dtype=torch.float64), level, group_B)

    counts = [int(np.count_nonzero(mask)) for mask in masks]
    mean_B, count_B = torch.zeros(len(rows), dtype=torch.float64), torch.ones(len(rows))
    if levels.mean is not None:
        entries = (row[mask].sum(dtype=np.float64) for row, mask in zip(rows, masks, strict=True))
        count_B = (sum_up(counts, levels.mean) - int(levels.leave_one_out)).clamp(min=1)
        mean_B = sum_up(entries, levels.mean) / count_B
    scale_B = torch.ones(len(rows), dtype=torch.float64)

    def center(i: int) -> np.ndarray:
        """Return the entries of a row without their mean, float64."""
        found = rows[i][masks[i]].astype(np.float64)
        own_share = 1 / float(count_B[i]) if levels.mean is not None and levels.leave_one_out else 0.0
        return found * (1 + own_share) - float(mean_B[i])

    if levels.std is not None:
        squares = (np.square(center(i)).sum() for i in range(len(rows)))
        number_B = (sum_up(counts, levels.std) - int(levels.unbiased)).clamp(min=1)
        scale_B = (sum_up(squares, levels.std) / number_B).sqrt() + levels.eps
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        row[mask] = center(i) / float(scale_B[i])


def number_groups(num_rows: int, group_size: int) -> torch.Tensor:
    """Return group numbers for groups of `group_size` consecutive rows, NO_GROUP for the remainder."""
    group_B = torch.arange(num_rows) // group_size
    group_B[num_rows // group_size * group_size :] = NO_GROUP
    return group_B
