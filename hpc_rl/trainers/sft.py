"""SFT: what one step is made of. Batch k is a pure function of (seed, k): a resumed run sees what an unbroken one sees."""

from __future__ import annotations

import numpy as np
import torch

from hpc_rl.algorithms.losses import supervised_loss
from hpc_rl.config.sections.experiment import SFTConfig, total_steps
from hpc_rl.datasets.order import locate
from hpc_rl.engines.base import MicroBatch, Sequences
from hpc_rl.engines.packing import balance
from hpc_rl.trainers import evaluate
from hpc_rl.trainers.run import Run

Rows = list[tuple[np.ndarray, np.ndarray]]  # (ids int32 [L], loss_mask bool [L])


class SFT:
    """The recipe of an SFT trial.

    Args:
        run: This incarnation.
        rows: All training sequences, in file order.
        held_out: Held-out sequences; None where there are none.
    """

    def __init__(self, run: Run, rows: Rows, held_out: Rows | None) -> None:
        assert isinstance(run.config, SFTConfig)
        self.run, self.rows, self.held_out = run, rows, held_out
        self.config = run.config
        self.total_steps = total_steps(run.config, len(rows))

    def batch(self, step: int) -> Rows:
        size = self.config.train_dataset.batch_size
        indexes = range((step - 1) * size, step * size)
        return [
            self.rows[locate(i, self.config.seed, len(self.rows), self.config.train_dataset.shuffle)[1]]
            for i in indexes
        ]

    def update(self, step: int, batch: Rows) -> None:
        stats = self.run.stats
        weight = max(1, sum(int(mask.sum()) for _, mask in batch))
        sums = self.run.engine.train_batch(
            share(batch, self.run), sequence_loss, float(weight), temperature=1.0
        )
        stats.value("num_tokens", sum(len(ids) for ids, _ in batch))
        for name in ("loss", "grad_norm", "lr", "update_successful"):
            stats.value(name, sums[name])

    def publish(self, step: int) -> None:
        """Nobody generates with the weights of an SFT trial."""

    def evaluate(self, step: int) -> dict[str, float | int | str] | None:
        """Mean loss on the held-out data, as `eval_loss` in the step's own line; before the first step there is no line."""
        if self.held_out is None or step == 0:
            return {}
        numbers = evaluate.held_out_loss(self.run.engine, share(self.held_out, self.run))
        self.run.stats.value("eval_loss", numbers["eval_loss"])
        return dict(numbers)

    def position(self, step: int) -> tuple[int, int]:
        return divmod(step * self.config.train_dataset.batch_size, len(self.rows))

    def frontier(self, step: int) -> dict[str, int]:
        """Batches are computed: the cursor says it all."""
        return {}

    def retain(self, step: int) -> None:
        """No data is kept for a generation: batches are computed."""


def share(rows: Rows, run: Run) -> Sequences:
    """This rank's rows, by length."""
    part = balance([len(ids) for ids, _ in rows], run.ranks.num)[run.ranks.rank]
    return Sequences([rows[i][0] for i in part], {"loss_mask": [rows[i][1] for i in part]})


def sequence_loss(batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return supervised_loss(batch.logprobs_T, batch.columns_T["loss_mask"])
