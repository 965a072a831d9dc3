"""GRPO: what one step is made of. The batch comes from the rollout role, the weights go to the generation servers.

Everything that looks at the whole batch (shaping, advantages, the cut into mini-batches, loss weights) is computed on every
rank from the whole batch, before rows are shared out: nothing depends on the number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from hpc_rl.algorithms import grpo, kl
from hpc_rl.algorithms.normalization import Levels
from hpc_rl.config.root import GRPOConfig
from hpc_rl.config.train import NormConfig
from hpc_rl.engines.base import Engine, MicroBatch, Sequences
from hpc_rl.engines.packing import balance
from hpc_rl.errors import RoleFailed
from hpc_rl.rollout.client import RolloutClient
from hpc_rl.trainers import evaluate
from hpc_rl.trainers.run import Run, tokenizer_folder, total_steps
from hpc_rl.types import Batch, Trajectory
from hpc_rl.weights import disk
from hpc_rl.weights.publish import Publisher

logger = logging.getLogger(__name__)


class GRPO:
    """The recipe of a GRPO trial.

    Args:
        run: This incarnation.
        rollout: The rollout role.
        publisher: The generation servers; rank 0 only.
        num_prompts: Prompts of one epoch.
        reference: The frozen model of the KL terms; None where there are none.
    """

    def __init__(
        self,
        run: Run,
        rollout: RolloutClient,
        publisher: Publisher | None,
        num_prompts: int,
        reference: Engine | None = None,
    ) -> None:
        assert isinstance(run.config, GRPOConfig)
        self.run, self.rollout, self.publisher, self.num_prompts = run, rollout, publisher, num_prompts
        self.reference = reference
        self.config = run.config
        self.actor = run.config.actor
        self.total_steps = total_steps(run.config, num_prompts)
        temperature = self.actor.temperature if self.actor.temperature is not None else self.config.gconfig.temperature
        self.temperature = temperature or 1.0  # greedy: log-probabilities are those of the plain distribution

    def batch(self, step: int) -> Batch | None:
        return self.rollout.batch(step, self.run.lineage, self.run.stopping)

    def update(self, step: int, batch: Batch) -> None:
        rows = [trajectory for group in batch.groups for trajectory in group.trajectories]
        self._describe(step, rows)
        known = self._logprobs_of_all(rows) if self.reference is not None and self.actor.kl_ctl else None
        advantages = self._advantages(rows, known)
        keep_all = self.reference is not None and self.actor.beta > 0  # then a row without advantage has a gradient too
        minibatches = shares(rows, advantages, self.actor.ppo_n_minibatches, self.run.ranks.num, keep_all)
        mine = [minibatch.rows[self.run.ranks.rank] for minibatch in minibatches]
        known = known or self._logprobs(rows, [row for part in mine for row in part])
        for minibatch, part in zip(minibatches, mine, strict=True):
            sequences = self._sequences(rows, advantages, known, part)
            sums = self.run.engine.train_batch(sequences, self._loss, minibatch.loss_weight, self.temperature)
            self._report(sums, minibatch)

    def publish(self, step: int) -> None:
        version = self.run.version(step)
        trial = self.run.trial
        first = self.run.ranks.rank == 0
        folder = disk.begin(trial, version) if first else trial.published(str(version))
        self.run.engine.export(folder, tokenizer_folder(self.config), durable=False)
        if first and self.publisher is not None:
            result = self.publisher.publish(version, disk.finish(trial, version), self.run.stopping)
            self.run.stats.value("publish_servers", len(result.acknowledged))

    def evaluate(self, step: int) -> dict[str, float | int | str] | None:
        return evaluate.held_out_reward(self.run, self.rollout, step)

    def position(self, step: int) -> tuple[int, int]:
        return divmod(step * self.config.train_dataset.batch_size, self.num_prompts)

    def retain(self, step: int) -> None:
        self.rollout.retain(step)

    def _advantages(self, rows: list[Trajectory], known: Known | None) -> list[np.ndarray]:
        """float32 [L] per row, of the whole batch."""
        mask_BT = rectangle([row.loss_mask for row in rows])
        try:
            advantages_BT = grpo.advantages(
                torch.tensor([row.reward for row in rows], dtype=torch.float32),
                mask_BT,
                group_size=self.actor.group_size or self.config.gconfig.n_samples,
                reward_bias=self.actor.reward_bias,
                reward_scaling=self.actor.reward_scaling,
                reward_clip=self.actor.reward_clip,
                reward_norm=_levels(self.actor.reward_norm),
                adv_norm=_levels(self.actor.adv_norm),
                discount=self.actor.discount,
                gae_lambda=self.actor.gae_lambda,
                token_rewards_BT=self._kl_rewards(rows, mask_BT, known),
            )
        except ValueError as error:  # a workflow of the user's own made other groups than the configuration says
            raise RoleFailed(f"the batch can't be used: {error}") from error
        return [advantages_BT[i, : len(row.ids)].numpy() for i, row in enumerate(rows)]

    def _kl_rewards(self, rows: list[Trajectory], mask_BT: torch.Tensor, known: Known | None) -> torch.Tensor | None:
        if known is None or known.reference is None:
            return None
        behav = [self._prox_and_behav(rows, known, i)[1] for i in range(len(rows))]
        reference = [known.reference[i] for i in range(len(rows))]
        rewards_BT = kl.kl_rewards(rectangle(behav), rectangle(reference), mask_BT, self.actor.kl_ctl)
        self.run.stats.mean("kl_rewards", float(rewards_BT.sum(dtype=torch.float64)), int(mask_BT.sum()))
        return rewards_BT

    def _logprobs_of_all(self, rows: list[Trajectory]) -> Known:
        """For all rows on every rank, each rank having made a share: the rewards of the whole batch want them."""
        lengths = [len(row.ids) for row in rows]
        ranks = self.run.ranks
        mine = self._logprobs(rows, balance(lengths, ranks.num)[ranks.rank])
        return Known(*(None if part is None else ranks.whole(part, lengths) for part in (mine.recomputed, mine.reference)))

    def _logprobs(self, rows: list[Trajectory], mine: Iterable[int]) -> Known:
        """Of these rows, under the weights at the start of the step and under the reference model, where they are wanted."""
        numbers = list(mine)
        sequences = Sequences([rows[i].ids for i in numbers], {"loss_mask": [rows[i].loss_mask for i in numbers]})
        recompute = self.actor.recompute_logprob or self.actor.use_decoupled_loss
        made = [
            None if engine is None else dict(zip(numbers, engine.logprobs(sequences, self.temperature), strict=True))
            for engine in (self.run.engine if recompute else None, self.reference)
        ]
        return Known(*made)

    def _prox_and_behav(self, rows: list[Trajectory], known: Known, i: int) -> tuple[np.ndarray, np.ndarray]:
        again = None if known.recomputed is None else known.recomputed[i]
        return grpo.reference_logprobs(rows[i].logprobs, again, self.actor.use_decoupled_loss)

    def _sequences(self, rows: list[Trajectory], advantages: list[np.ndarray], known: Known, part: list[int]) -> Sequences:
        pairs = [self._prox_and_behav(rows, known, i) for i in part]
        columns = {
            "loss_mask": [rows[i].loss_mask for i in part],
            "advantages": [advantages[i] for i in part],
            "prox": [prox for prox, _ in pairs],
            "behav": [behav for _, behav in pairs],
        }
        if known.reference is not None and self.actor.beta:
            columns["ref"] = [known.reference[i] for i in part]
        return Sequences([rows[i].ids for i in part], columns)

    def _loss(self, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        columns = batch.columns_T
        return grpo.policy_loss(
            batch.logprobs_T,
            columns["prox"],
            columns["behav"],
            columns["advantages"],
            columns["loss_mask"],
            batch.entropy_T,
            eps_clip=self.actor.eps_clip,
            eps_clip_higher=self.actor.eps_clip_higher,
            c_clip=self.actor.c_clip,
            behav_imp_weight_cap=self.actor.behav_imp_weight_cap,
            ref_T=columns.get("ref"),
            beta=self.actor.beta,
        )

    def _report(self, sums: dict[str, float], minibatch: Minibatch) -> None:
        """Means over tokens (entropy, ratios) are over the rows that were computed; the loss is over all."""
        stats = self.run.stats
        tokens = sums.get("num_tokens", 0.0)
        for name in ("entropy", "clip_ratio", "dual_clip_ratio", "importance_weight", "behave_imp_weight", "behave_approx_kl"):
            stats.mean(name, sums.get(name, 0.0), tokens)
        if "kl_loss" in sums:
            stats.mean("kl_loss", sums["kl_loss"], tokens)
        stats.mean("loss", sums["loss"] * minibatch.loss_weight, minibatch.loss_weight)
        stats.mean("grad_norm", sums["grad_norm"], 1)
        stats.mean("update_successful", sums["update_successful"], 1)
        stats.value("lr", sums["lr"])
        stats.add("rows_skipped", minibatch.num_skipped)
        stats.add("behave_dropped", sums.get("behave_dropped", 0.0))

    def _describe(self, step: int, rows: list[Trajectory]) -> None:
        stats = self.run.stats
        staleness = [max(0, step - 1 - row.oldest_step()) for row in rows]
        for row, age in zip(rows, staleness, strict=True):
            stats.mean("reward", row.reward, 1)
            stats.mean("seq_len", len(row.ids), 1)
            stats.mean("truncated", float(row.finish_reason == "length"), 1)
            stats.mean("staleness_mean", age, 1)
        stats.value("staleness_max", max(staleness, default=0))
        stats.value("num_tokens", sum(len(row.ids) for row in rows))


def num_updates(config: GRPOConfig, num_prompts: int) -> int:
    """Optimizer updates of the whole trial: what the learning-rate schedule runs over."""
    rows = config.train_dataset.batch_size * config.gconfig.n_samples
    return total_steps(config, num_prompts) * min(config.actor.ppo_n_minibatches, rows)


@dataclass(frozen=True)
class Known:
    """Log-probabilities that were made before the update, float32 [L] by row number; None where nobody wants them."""

    recomputed: dict[int, np.ndarray] | None
    reference: dict[int, np.ndarray] | None


@dataclass(frozen=True)
class Minibatch:
    """One optimizer update: rows[rank] are row numbers of the batch; the loss weight counts the tokens of all its rows."""

    rows: list[list[int]]
    loss_weight: float
    num_skipped: int


def is_useful(advantages: np.ndarray) -> bool:
    """Whether a row can change the weights."""
    return bool(advantages.any())


def shares(
    rows: list[Trajectory], advantages: list[np.ndarray], num_minibatches: int, num_ranks: int, keep_all: bool = False
) -> list[Minibatch]:
    """Cut the batch into mini-batches, then each over the ranks, both by length.

    A row whose advantages are all exactly 0 adds exactly nothing to the loss and the gradient: it is not computed. It
    still counts in the loss weight. Where that is true of all rows one stays, for the update happens (with gradient 0).
    `keep_all`: the loss has another term, so every row is computed.
    """
    lengths = [len(row.ids) for row in rows]
    result = []
    for members in filter(None, balance(lengths, num_minibatches)):
        weight = sum(int(rows[i].loss_mask.sum()) for i in members)
        useful = [i for i in members if keep_all or is_useful(advantages[i])] or [min(members, key=lambda i: lengths[i])]
        parts = [[useful[j] for j in part] for part in balance([lengths[i] for i in useful], num_ranks)]
        result.append(Minibatch(parts, float(max(1, weight)), len(members) - len(useful)))
    return result


def rectangle(rows: list[np.ndarray]) -> torch.Tensor:
    """Ragged rows as one tensor [B, T], filled up with 0 (false) on the right."""
    out_BT = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype)
    for i, row in enumerate(rows):
        out_BT[i, : len(row)] = row
    return torch.from_numpy(out_BT)


def _levels(norm: NormConfig | None) -> Levels | None:
    return None if norm is None else Levels(norm.mean_level, norm.std_level)
