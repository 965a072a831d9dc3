"""Cuts a train batch into mini-batches and divides them among ranks. Pure, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hpc_rl.core.types import Trajectory
from hpc_rl.engines.shared.packing import balance


@dataclass(frozen=True)
class Known:
    """Log-probabilities computed before the update, float32 [L] by row number; None if not needed."""

    recomputed: dict[int, np.ndarray] | None
    reference: dict[int, np.ndarray] | None


@dataclass(frozen=True)
class ScoredRows:
    """Trajectories with their rewards, float32 [B], and the numbers of their groups, int64 [B]."""

    rows: list[Trajectory]
    given_B: torch.Tensor  # rewards from the reward function or the environment
    rewards_B: torch.Tensor  # with the overlong penalty
    group_B: torch.Tensor

    def select(self, kept: list[int]) -> ScoredRows:
        rows = [self.rows[i] for i in kept]
        return ScoredRows(rows, self.given_B[kept], self.rewards_B[kept], self.group_B[kept])


@dataclass(frozen=True)
class Minibatch:
    """One optimizer update. rows[data_rank] are row numbers of the batch."""

    rows: list[list[int]]
    loss_weight: float
    num_skipped: int


def is_useful(advantages: np.ndarray) -> bool:
    """Return whether a row can change the weights."""
    return bool(advantages.any())


def divide_rows(
    rows: list[Trajectory],
    advantages: list[np.ndarray],
    members: list[int],
    num_minibatches: int,
    num_data_ranks: int,
    *,
    keep_all: bool = False,
    weight_by_row: bool = False,
) -> list[Minibatch]:
    """Cut the rows `members` into mini-batches, and each of these into shares of the data ranks, by length.

    A row whose advantages are all exactly 0 adds nothing to the loss and the gradient. It is skipped, but
    counts in the loss weight; with `keep_all` it is kept, for a loss with another term. If a mini-batch has
    only such rows, the shortest is kept: the update happens, with gradient 0. The loss weight counts tokens,
    or rows with `weight_by_row`.
    """
    lengths = [len(row.ids) for row in rows]
    result = []
    for places in filter(None, balance([lengths[i] for i in members], num_minibatches)):
        part = [members[place] for place in places]
        weight = len(part) if weight_by_row else sum(int(rows[i].loss_mask.sum()) for i in part)
        useful = [i for i in part if keep_all or is_useful(advantages[i])]
        useful = useful or [min(part, key=lambda i: lengths[i])]
        by_rank = balance([lengths[i] for i in useful], num_data_ranks)
        per_rank = [[useful[j] for j in share] for share in by_rank]
        result.append(Minibatch(per_rank, float(max(1, weight)), len(part) - len(useful)))
    return result


def choose_advantages(row: Trajectory, computed: np.ndarray) -> np.ndarray:
    """Return the advantages sent by an environment, float32 [L], else the computed ones."""
    if row.zero_advantage:
        return np.zeros_like(computed)
    return choose_sent(row.advantages, computed) * row.loss_mask


def choose_sent(sent: np.ndarray | None, computed: np.ndarray) -> np.ndarray:
    return computed if sent is None else sent


def make_temperature_column(rows: list[Trajectory], default: float) -> dict[str, list[np.ndarray]]:
    """Return the column `temperature` of rows, float32 [L] each; {} if all were sampled at `default`.

    Greedy tokens (temperature 0) get temperature 1, at which servers report their log-probabilities.
    """
    if all(row.temperatures is None for row in rows):
        return {}
    sampled = (
        np.full(len(row.ids), default, np.float32) if row.temperatures is None else row.temperatures
        for row in rows
    )
    return {"temperature": [np.where(values > 0, values, np.float32(1.0)) for values in sampled]}


def pad_rows(rows: list[np.ndarray]) -> torch.Tensor:
    """Pad ragged rows with 0 (false) on the right; return one tensor [B, T]."""
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
