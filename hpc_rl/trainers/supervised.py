"""Supervised training: SFT and reward models share one recipe. What differs is a SupervisedTask.

Batch k is a pure function of (seed, k): a resumed run sees what an uninterrupted one sees.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.experiment import RWConfig, SFTConfig, total_steps
from hpc_rl.datasets.encode import load_pairs, load_sequences
from hpc_rl.datasets.order import locate
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.engines.base import Engine, LossFn, MicroBatch, Sequences, sum_over_data_ranks
from hpc_rl.engines.shared.packing import balance
from hpc_rl.trainers.run import Run

Row = tuple[np.ndarray, np.ndarray]
NEARLY_GREEDY = 1e-6  # temperature at which the most probable token has all of the probability


@dataclass(frozen=True)
class SupervisedTask:
    """What one kind of supervised training makes of its rows."""

    load: Callable[[DatasetConfig, Tokenizer], Any]  # reads a dataset into rows with a fingerprint
    num_tokens: Callable[[Row], int]
    encode: Callable[[list[Row]], Sequences]  # rows as sequences for the engine
    loss: LossFn  # of a micro-batch of these
    weight: Callable[[list[Row]], int]  # what the sum of the loss over a batch is divided by
    means: dict[str, str]  # metric -> sum of the loss function that is divided by the number of rows
    evaluate: Callable[[Engine, Sequences], dict[str, float]]  # metrics of held-out rows. Collective


class SupervisedRecipe:
    """The recipe of a supervised trial; its data is the whole dataset in memory, in file order."""

    def __init__(self, run: Run, task: SupervisedTask, rows: list[Row], held_out: list[Row] | None) -> None:
        assert isinstance(run.config, SFTConfig | RWConfig)
        self.run = run
        self.task = task
        self.rows = rows
        self.held_out = held_out
        self.config = run.config
        self.total_steps = total_steps(run.config, len(rows))

    def batch(self, step: int) -> list[Row]:
        dataset, seed = self.config.train_dataset, self.config.seed
        indexes = range((step - 1) * dataset.batch_size, step * dataset.batch_size)
        return [self.rows[locate(i, seed, len(self.rows), dataset.shuffle)[1]] for i in indexes]

    def update(self, step: int, batch: list[Row]) -> None:
        stats = self.run.stats
        weight = float(max(1, self.task.weight(batch)))
        sums = self.run.engine.train_batch(self._share(batch), self.task.loss, weight, temperature=1.0)
        stats.value("num_tokens", sum(map(self.task.num_tokens, batch)))
        for name, total in self.task.means.items():
            stats.value(name, sums[total] / len(batch))
        for name in ("loss", "grad_norm", "lr", "update_successful"):
            stats.value(name, sums[name])

    def publish(self, step: int) -> None:
        """No server generates with these weights."""

    def evaluate(self, step: int) -> dict[str, float | int | str] | None:
        """Evaluate on the held-out rows, into the step's line of metrics; none before the first step."""
        if self.held_out is None or step == 0:
            return {}
        numbers = self.task.evaluate(self.run.engine, self._share(self.held_out))
        for name, value in numbers.items():
            self.run.stats.value(name, value)
        return dict(numbers)

    def position(self, step: int) -> tuple[int, int]:
        return divmod(step * self.config.train_dataset.batch_size, len(self.rows))

    def frontier(self, step: int) -> dict[str, int]:
        """There is no batch log: batches follow from the step."""
        return {}

    def retain(self, step: int) -> None:
        """No data is kept for a generation."""

    def _share(self, rows: list[Row]) -> Sequences:
        """Return the rows of this data rank, balanced by length."""
        mesh = self.run.engine.mesh
        shares = balance([self.task.num_tokens(row) for row in rows], mesh.num_data_ranks)
        return self.task.encode([rows[i] for i in shares[mesh.data_rank]])


def sequences(rows: list[Row]) -> Sequences:
    """Encode (ids int32 [L], loss_mask bool [L]) rows."""
    return Sequences([ids for ids, _ in rows], {"loss_mask": [mask for _, mask in rows]})


def sequence_loss(batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the negative log-likelihood over the masked tokens, and their number."""
    mask_T = batch.columns_T["loss_mask"]
    loss_T = -torch.where(mask_T, batch.logprobs_T, torch.zeros_like(batch.logprobs_T))
    return loss_T.sum(), {"num_tokens": mask_T.sum()}


def held_out_loss(engine: Engine, rows: Sequences) -> dict[str, float]:
    """Return the mean negative log-likelihood of completion tokens, and the share that are the most probable.

    Collective.
    """
    total, right, count = 0.0, 0.0, 0.0
    both = zip(engine.logprobs(rows, 1.0), engine.logprobs(rows, NEARLY_GREEDY), strict=True)
    for (logprobs, greedy), mask in zip(both, rows.columns["loss_mask"], strict=True):
        total -= float(logprobs[mask].sum(dtype="float64"))
        right += int((greedy[mask] > -math.log(2)).sum())  # more probable than all others together
        count += int(mask.sum())
    total, right, count = sum_over_data_ranks(engine.mesh, [total, right, count])
    return {"eval_loss": total / max(1.0, count), "eval_token_accuracy": right / max(1.0, count)}


def pairs(rows: list[Row]) -> Sequences:
    """Encode (chosen ids, rejected ids) rows, int32, in turn; each sequence is scored at its last token."""
    ids = [sequence for row in rows for sequence in row]
    return Sequences(ids, {"loss_mask": [np.arange(len(row)) == len(row) - 1 for row in ids]})


def pair_loss(batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return pairwise_loss(batch.logprobs_T[batch.columns_T["loss_mask"]].reshape(-1, 2))


def pairwise_loss(scores_P2: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of -log sigmoid(chosen - rejected) over pairs of scores, float32 [P, 2].

    Also reports how many pairs are in order, and the sum of their margins. Bradley and Terry, "Rank Analysis
    of Incomplete Block Designs", 1952; as a loss of reward models in Ouyang et al., arXiv 2203.02155,
    equation 1.
    """
    margin_P = scores_P2[:, 0] - scores_P2[:, 1]
    sums = {"num_correct": (margin_P > 0).sum(), "margin": margin_P.detach().sum()}
    return -torch.nn.functional.logsigmoid(margin_P).sum(), sums


def held_out_preferences(engine: Engine, rows: Sequences) -> dict[str, float]:
    """Return the mean Bradley-Terry loss, and the share of pairs whose chosen sequence scores higher.

    Collective.
    """
    scored = zip(engine.logprobs(rows, 1.0), rows.columns["loss_mask"], strict=True)
    scores_P2 = torch.tensor([float(scores[mask].sum()) for scores, mask in scored]).reshape(-1, 2)
    loss, sums = pairwise_loss(scores_P2)
    numbers = [float(loss), float(sums["num_correct"]), float(len(scores_P2))]
    total, correct, count = sum_over_data_ranks(engine.mesh, numbers)
    return {"eval_loss": total / max(1.0, count), "eval_accuracy": correct / max(1.0, count)}


SFT = SupervisedTask(
    load=load_sequences,
    num_tokens=lambda row: len(row[0]),
    encode=sequences,
    loss=sequence_loss,
    weight=lambda rows: sum(int(mask.sum()) for _, mask in rows),
    means={},
    evaluate=held_out_loss,
)
REWARD_MODEL = SupervisedTask(
    load=load_pairs,
    num_tokens=lambda row: len(row[0]) + len(row[1]),
    encode=pairs,
    loss=pair_loss,
    weight=len,
    means={"accuracy": "num_correct", "margin": "margin"},
    evaluate=held_out_preferences,
)
