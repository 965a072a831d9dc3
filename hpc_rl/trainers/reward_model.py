"""Reward model: what one step is made of. Pairs of a chosen and a rejected sequence; the chosen one is to score higher.

The loss of a pair is -log sigmoid(score of chosen - score of rejected) (Bradley-Terry); a sequence is scored at its last token.
"""

from __future__ import annotations

import numpy as np
import torch

from hpc_rl.algorithms.losses import pairwise_loss
from hpc_rl.config.sections.experiment import RWConfig, total_steps
from hpc_rl.datasets.order import locate
from hpc_rl.engines.base import MicroBatch, Sequences
from hpc_rl.engines.packing import balance
from hpc_rl.trainers import evaluate
from hpc_rl.trainers.run import Run

Pairs = list[tuple[np.ndarray, np.ndarray]]  # (ids of chosen, ids of rejected), int32


class RewardModel:
    """The recipe of a reward-model trial.

    Args:
        run: This incarnation.
        pairs: All training pairs, in file order.
        held_out: Held-out pairs; None where there are none.
    """

    def __init__(self, run: Run, pairs: Pairs, held_out: Pairs | None) -> None:
        assert isinstance(run.config, RWConfig)
        self.run, self.pairs, self.held_out = run, pairs, held_out
        self.config = run.config
        self.total_steps = total_steps(run.config, len(pairs))

    def batch(self, step: int) -> Pairs:
        size = self.config.train_dataset.batch_size
        indexes = range((step - 1) * size, step * size)
        return [
            self.pairs[locate(i, self.config.seed, len(self.pairs), self.config.train_dataset.shuffle)[1]]
            for i in indexes
        ]

    def update(self, step: int, batch: Pairs) -> None:
        stats = self.run.stats
        sums = self.run.engine.train_batch(
            share(batch, self.run), pair_loss, float(len(batch)), temperature=1.0
        )
        stats.value("num_tokens", sum(len(chosen) + len(rejected) for chosen, rejected in batch))
        stats.value("accuracy", sums["num_correct"] / len(batch))
        stats.value("margin", sums["margin"] / len(batch))
        for name in ("loss", "grad_norm", "lr", "update_successful"):
            stats.value(name, sums[name])

    def publish(self, step: int) -> None:
        """Nobody generates with a reward model."""

    def evaluate(self, step: int) -> dict[str, float | int | str] | None:
        """Loss and accuracy on the held-out pairs, in the step's own line; before the first step there is no line."""
        if self.held_out is None or step == 0:
            return {}
        numbers = evaluate.held_out_preferences(self.run.engine, share(self.held_out, self.run))
        for name, value in numbers.items():
            self.run.stats.value(name, value)
        return dict(numbers)

    def position(self, step: int) -> tuple[int, int]:
        return divmod(step * self.config.train_dataset.batch_size, len(self.pairs))

    def frontier(self, step: int) -> dict[str, int]:
        """Batches are computed: the cursor says it all."""
        return {}

    def retain(self, step: int) -> None:
        """No data is kept for a generation: batches are computed."""


def share(pairs: Pairs, run: Run) -> Sequences:
    """This rank's pairs, by length: chosen and rejected in turn. Only the last token of a row is wanted."""
    part = balance([len(chosen) + len(rejected) for chosen, rejected in pairs], run.ranks.num)[run.ranks.rank]
    ids = [row for i in part for row in pairs[i]]
    return Sequences(ids, {"loss_mask": [np.arange(len(row)) == len(row) - 1 for row in ids]})


def pair_loss(batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    scores_P2 = batch.logprobs_T[batch.columns_T["loss_mask"]].reshape(-1, 2)
    return pairwise_loss(scores_P2[:, 0], scores_P2[:, 1])
