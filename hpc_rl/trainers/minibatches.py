"""Cuts a train batch into mini-batches and divides them among ranks. Pure, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hpc_rl.algorithms.rewards import place_rewards
from hpc_rl.core.types import Trajectory
from hpc_rl.engines.shared.packing import balance


@dataclass(frozen=True)
class Known:
    """Log-probabilities computed before the update, float32 [L] by row number; None if not needed."""

    recomputed: dict[int, np.ndarray] | None
    reference: dict[int, np.ndarray] | None

    def select(self, part: range) -> Known:
        """Return the log-probabilities of consecutive rows, by their numbers among these."""
        return Known(
            *(
                None if one is None else {j: one[i] for j, i in enumerate(part)}
                for one in (self.recomputed, self.reference)
            )
        )


@dataclass(frozen=True)
class ScoredRows:
    """Trajectories with their rewards, float32 [B], and the numbers of their groups, int64 [B]."""

    rows: list[Trajectory]
    given_B: torch.Tensor  # rewards from the reward function or the environment
    rewards_B: torch.Tensor  # with the length penalties
    group_B: torch.Tensor
    set_B: torch.Tensor  # int64, numbers of their data sets in a mixture

    def select(self, kept: list[int]) -> ScoredRows:
        of_rows = (self.given_B[kept], self.rewards_B[kept], self.group_B[kept], self.set_B[kept])
        return ScoredRows([self.rows[i] for i in kept], *of_rows)


@dataclass(frozen=True)
class Minibatch:
    """One optimizer update. rows[data_rank] are row numbers of the batch."""

    rows: list[list[int]]
    divisors: dict[str, float]  # of each component of the loss
    num_skipped: int

    @property
    def loss_weight(self) -> float:
        return self.divisors["rl"]


def is_useful(credit: np.ndarray) -> bool:
    """Return whether a row can change the weights."""
    return bool(credit.any())


def divide_rows(
    rows: list[Trajectory],
    credit: Sequence[np.ndarray],
    members: list[int],
    num_minibatches: int,
    num_data_ranks: int,
    *,
    keep_all: bool = False,
    weight_by_row: bool = False,
    masks: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> list[Minibatch]:
    """Cut the rows `members` into mini-batches, and each of these into shares of the data ranks, by length.

    A row whose credit is exactly 0 everywhere adds nothing to the loss and the gradient. It is skipped, but
    counts in the divisors; with `keep_all` it is kept, for a loss with another term. If a mini-batch has
    only such rows, the shortest is kept: the update happens, with gradient 0. `masks` has the tokens of each
    component of the loss, bool [L] by row; by default, `rl` has all generated tokens. The divisor of a
    component is its number of tokens, or of rows with `weight_by_row`.
    """
    masks = masks or {"rl": [row.loss_mask for row in rows]}
    lengths = [len(row.ids) for row in rows]
    result = []
    for places in filter(None, balance([lengths[i] for i in members], num_minibatches)):
        part = [members[place] for place in places]
        divisors: dict[str, float] = {}
        for name, of_rows in masks.items():
            same = next((known for known in divisors if masks[known] is of_rows), None)
            counts = [] if same else [int(np.count_nonzero(of_rows[i])) for i in part]
            weight = sum(map(bool, counts)) if weight_by_row else sum(counts)
            divisors[name] = divisors[same] if same else float(max(1, weight))
        useful = [i for i in part if keep_all or is_useful(credit[i])]
        useful = useful or [min(part, key=lambda i: lengths[i])]
        by_rank = balance([lengths[i] for i in useful], num_data_ranks)
        per_rank = [[useful[j] for j in share] for share in by_rank]
        result.append(Minibatch(per_rank, divisors, len(part) - len(useful)))
    return result


def choose_credit(row: Trajectory, computed: np.ndarray) -> np.ndarray:
    """Return the advantages sent by an environment, float32 [L], else the computed credit."""
    if row.zero_advantage:
        return np.zeros_like(computed)
    return choose_sent(row.advantages, computed) * row.loss_mask


def choose_sent(sent: np.ndarray | None, computed: np.ndarray) -> np.ndarray:
    return computed if sent is None else sent


def compute_token_weight(num_tokens: int, aggregation: str, max_new_tokens: int) -> float:
    """Return the weight of a token in a completion of `num_tokens`.

    The sum over the batch is then divided by its number of rows. `sequence_mean`: each completion has the
    same weight, as in the GRPO paper. `constant_length`: each token has the same weight, and the divisor does
    not depend on the samples, as in Dr.GRPO (Liu et al., arXiv 2503.20783).
    """
    return 1.0 / max(1, num_tokens if aggregation == "sequence_mean" else max_new_tokens)


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


def split_rows(flat_N: torch.Tensor, rows: list[Trajectory]) -> list[np.ndarray]:
    """Return values of all tokens of all rows as one array per row."""
    ends = np.cumsum([len(row.ids) for row in rows])
    return np.split(flat_N.numpy(), ends[:-1])


def move_rewards_to_turns(rows: list[Trajectory], mask_BT: torch.Tensor) -> torch.Tensor:
    """Return what moves rewards from the last generated tokens to the turns that got them, float32 [B, T].

    Each row of the result has the sum 0, and is 0 without `turn_rewards`.
    """
    nothing = (np.zeros(len(row.ids), np.float32) for row in rows)
    given_BT = pad_rows(
        [
            zero if row.turn_rewards is None else row.turn_rewards
            for row, zero in zip(rows, nothing, strict=True)
        ]
    )
    return given_BT - place_rewards(given_BT.sum(1), mask_BT)


def pad_rows(rows: list[np.ndarray]) -> torch.Tensor:
    """Pad ragged rows with 0 (false) on the right; return one tensor [B, T]."""
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
