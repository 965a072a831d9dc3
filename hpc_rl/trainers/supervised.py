"""Supervised training: SFT, reward models and DPO share one recipe; a SupervisedTask is the difference.

Batch k is a pure function of (seed, k), so a resumed run gets the same batches as an uninterrupted one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.experiment import DPOConfig, RWConfig, SFTConfig, count_steps
from hpc_rl.datasets.encode import load_pairs, load_sequences
from hpc_rl.datasets.order import locate
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.engines.base import Engine, LossFn, MicroBatch, Sequences, sum_over_data_ranks
from hpc_rl.engines.shared.packing import balance
from hpc_rl.stats.idle import SKIPPED
from hpc_rl.trainers.run import Run
from hpc_rl.trainers.update_watch import UpdateWatch

Row = tuple[np.ndarray, ...]
NEARLY_GREEDY = 1e-6  # temperature at which the most probable token has probability 1


@dataclass(frozen=True)
class SupervisedTask:
    """The functions of one kind of supervised training."""

    load: Callable[[DatasetConfig, Tokenizer], Any]  # loads a dataset as rows with a fingerprint
    num_tokens: Callable[[Row], int]
    encode: Callable[[list[Row]], Sequences]  # converts rows to sequences for the engine; may be collective
    loss: LossFn  # of a micro-batch of these sequences
    weight: Callable[[list[Row]], int]  # divisor of the loss over a batch
    means: dict[str, str]  # metric -> sum from the loss function, to be divided by the number of rows
    evaluate: Callable[[Engine, Sequences], dict[str, float]]  # metrics of held-out rows; collective


class SupervisedRecipe:
    """The recipe of a supervised trial; its data is the whole dataset in memory, in file order."""

    def __init__(self, run: Run, task: SupervisedTask, rows: list[Row], held_out: list[Row] | None) -> None:
        assert isinstance(run.config, SFTConfig | RWConfig | DPOConfig)
        self.run = run
        self.task = task
        self.rows = rows
        self.held_out = held_out
        self.config = run.config
        self.total_steps = count_steps(run.config, len(rows))
        self._watch = UpdateWatch(run, run.config.model, self.total_steps)

    def batch(self, step: int) -> list[Row]:
        dataset, seed = self.config.train_dataset, self.config.seed
        indexes = range((step - 1) * dataset.batch_size, step * dataset.batch_size)
        return [self.rows[locate(i, seed, len(self.rows), dataset.shuffle)[1]] for i in indexes]

    def update(self, step: int, batch: list[Row]) -> None:
        """Train on a batch. Raises DataUnusable as UpdateWatch does."""
        stats = self.run.stats
        weight = float(max(1, self.task.weight(batch)))
        sums = self.run.engine.train_batch(self._share(batch), self.task.loss, weight, temperature=1.0)
        stats.value("num_tokens", sum(map(self.task.num_tokens, batch)))
        for name, total in self.task.means.items():
            stats.value(name, sums[total] / len(batch))
        for name in ("loss", "grad_norm", "lr", "update_successful"):
            stats.value(name, sums[name])
        if not sums["update_successful"]:
            stats.add(SKIPPED, 1)
        self._watch.see(step, 1, int(sums["update_successful"]))

    def publish(self, step: int) -> None:
        """Do nothing: no server generates with these weights."""

    def evaluate(self, step: int) -> dict[str, float | int | str] | None:
        """Evaluate on the held-out rows; add the metrics to the step's line. Not before the first step."""
        if self.held_out is None or step == 0:
            return {}
        numbers = self.task.evaluate(self.run.engine, self._held_out_share)
        for name, value in numbers.items():
            self.run.stats.value(name, value)
        return dict(numbers)

    def position(self, step: int) -> tuple[int, int]:
        return divmod(step * self.config.train_dataset.batch_size, len(self.rows))

    def frontier(self, step: int) -> dict[str, int]:
        """Return {}: batches follow from the step, so there is no batch log."""
        return {}

    def retain(self, step: int) -> None:
        """Do nothing: generations need no other data."""

    @cached_property
    def _held_out_share(self) -> Sequences:
        return self._share(self.held_out or [])

    def _share(self, rows: list[Row]) -> Sequences:
        """Return the rows of this data rank, balanced by length."""
        mesh = self.run.engine.mesh
        shares = balance([self.task.num_tokens(row) for row in rows], mesh.num_data_ranks)
        return self.task.encode([rows[i] for i in shares[mesh.data_rank]])


def make_sequences(rows: list[Row]) -> Sequences:
    """Encode (ids int32 [L], loss_mask bool [L]) rows."""
    return Sequences([ids for ids, _ in rows], {"loss_mask": [mask for _, mask in rows]})


def compute_sequence_loss(batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the negative log-likelihood over the masked tokens, and their number."""
    mask_T = batch.columns_T["loss_mask"]
    loss_T = -torch.where(mask_T, batch.logprobs_T, torch.zeros_like(batch.logprobs_T))
    return loss_T.sum(), {"num_tokens": mask_T.sum()}


def evaluate_loss(engine: Engine, rows: Sequences) -> dict[str, float]:
    """Return the mean negative log-likelihood of completion tokens, and the share of most probable tokens.

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


def make_pairs(rows: list[Row]) -> Sequences:
    """Encode (chosen ids, rejected ids) rows, int32, alternately; scores are at the last tokens."""
    ids = [sequence for row in rows for sequence in row]
    return Sequences(ids, {"loss_mask": [np.arange(len(row)) == len(row) - 1 for row in ids]})


def compute_pair_loss(batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return compute_pairwise_loss(batch.logprobs_T[batch.columns_T["loss_mask"]].reshape(-1, 2))


def compute_pairwise_loss(scores_P2: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of -log sigmoid(chosen - rejected) over pairs of scores, float32 [P, 2].

    Also reports the number of correctly ordered pairs and the sum of the margins. Bradley and Terry, "Rank
    Analysis of Incomplete Block Designs", 1952; as a loss of reward models in Ouyang et al., arXiv
    2203.02155, equation 1.
    """
    margin_P = scores_P2[:, 0] - scores_P2[:, 1]
    sums = {"num_correct": (margin_P > 0).sum(), "margin": margin_P.detach().sum()}
    return -torch.nn.functional.logsigmoid(margin_P).sum(), sums


def evaluate_preferences(engine: Engine, rows: Sequences) -> dict[str, float]:
    """Return the mean Bradley-Terry loss, and the share of pairs whose chosen sequence scores higher.

    Collective.
    """
    scored = zip(engine.logprobs(rows, 1.0), rows.columns["loss_mask"], strict=True)
    scores_P2 = torch.tensor([float(scores[mask].sum()) for scores, mask in scored]).reshape(-1, 2)
    loss, sums = compute_pairwise_loss(scores_P2)
    numbers = [float(loss), float(sums["num_correct"]), float(len(scores_P2))]
    total, correct, count = sum_over_data_ranks(engine.mesh, numbers)
    return {"eval_loss": total / max(1.0, count), "eval_accuracy": correct / max(1.0, count)}


SFT = SupervisedTask(
    load=load_sequences,
    num_tokens=lambda row: len(row[0]),
    encode=make_sequences,
    loss=compute_sequence_loss,
    weight=lambda rows: sum(int(mask.sum()) for _, mask in rows),
    means={},
    evaluate=evaluate_loss,
)
REWARD_MODEL = SupervisedTask(
    load=load_pairs,
    num_tokens=lambda row: len(row[0]) + len(row[1]),
    encode=make_pairs,
    loss=compute_pair_loss,
    weight=len,
    means={"accuracy": "num_correct", "margin": "margin"},
    evaluate=evaluate_preferences,
)
