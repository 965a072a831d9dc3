"""The critic of PPO: a second trained model, which predicts the rest of the reward at each token.

The value of a token is the score of the model at the token before it: what is expected before the token is
known. So all columns for the critic are moved one token to the left.
"""

from dataclasses import dataclass

import numpy as np
import torch

from hpc_rl.algorithms.ppo import compute_returns, compute_value_loss
from hpc_rl.algorithms.token_batch import Options, RewardBatch
from hpc_rl.config.options.training import PPOCriticConfig
from hpc_rl.core.types import Trajectory
from hpc_rl.engines.base import Engine, MicroBatch, Sequences
from hpc_rl.engines.shared.packing import balance
from hpc_rl.stats.tracker import Tracker
from hpc_rl.trainers.minibatches import divide_rows, pad_rows
from hpc_rl.trainers.ranks import Ranks


@dataclass(frozen=True)
class Critic:
    """A critic with its engine, for the recipe."""

    engine: Engine
    config: PPOCriticConfig
    ranks: Ranks
    updates_per_step: int  # that the learning-rate schedule counts

    def compute_values(self, rows: list[Trajectory]) -> torch.Tensor:
        """Return the values of the generated tokens, float32 [B, T], 0 elsewhere. Collective."""
        lengths = [len(row.ids) for row in rows]
        mesh = self.engine.mesh
        mine = balance(lengths, mesh.num_data_ranks)[mesh.data_rank]
        masks = [move_left(rows[i].loss_mask) for i in mine]
        scores = self.engine.logprobs(Sequences([rows[i].ids for i in mine], {"loss_mask": masks}), 1.0)
        values = {i: move_right(one) for i, one in zip(mine, scores, strict=True)}
        whole = self.ranks.whole(values if mesh.is_data_leader else {}, lengths)
        return pad_rows([whole[i] for i in range(len(rows))])

    def update(
        self, rows: list[Trajectory], rewards: RewardBatch | None, options: Options, stats: Tracker
    ) -> int:
        """Train on a batch, with `rewards.values_BT` from before the update; return the successful updates.

        `rewards` is None without rows. Collective.
        """
        if rewards is None or rewards.values_BT is None:
            self.engine.pass_updates(self.updates_per_step)
            return 0
        returns_BT = compute_returns(rewards, options)
        self._report_values(rewards, returns_BT, stats)
        members = list(range(len(rows)))
        if self.config.mask_no_eos_with_zero:
            members = [i for i in members if rows[i].finish_reason != "length"]
        masks = [move_left(row.loss_mask) for row in rows]
        minibatches = divide_rows(
            rows,
            masks,
            members,
            self.config.ppo_n_minibatches,
            self.engine.mesh.num_data_ranks,
            masks={"rl": masks},
        )
        num_successful = 0
        for minibatch in minibatches:
            mine = minibatch.rows[self.engine.mesh.data_rank]
            columns = {"loss_mask": [masks[i] for i in mine]}
            for name, of_all_BT in (("values", rewards.values_BT), ("returns", returns_BT)):
                columns[name] = [move_left(of_all_BT[i, : len(rows[i].ids)].numpy()) for i in mine]
            sequences = Sequences([rows[i].ids for i in mine], columns)
            sums = self.engine.train_batch(sequences, self.compute_loss, minibatch.loss_weight, 1.0)
            for name in ("value_loss", "value_clip_ratio"):
                stats.mean(name, sums[name], sums["num_tokens"])
            stats.mean("critic_grad_norm", sums["grad_norm"], 1)
            stats.mean("critic_update_successful", sums["update_successful"], 1)
            stats.value("critic_lr", sums["lr"])
            num_successful += int(sums["update_successful"])
        self.engine.pass_updates(max(0, self.updates_per_step - len(minibatches)))
        return num_successful

    def compute_loss(self, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the sum of the clipped value losses of a micro-batch, and sums to report."""
        columns = batch.columns_T
        mask_T = columns["loss_mask"]
        loss_T, sums = compute_value_loss(
            batch.logprobs_T, columns["values"], columns["returns"], mask_T, self.config.eps_clip
        )
        return loss_T.sum(), {**sums, "num_tokens": mask_T.sum()}

    def _report_values(self, rewards: RewardBatch, returns_BT: torch.Tensor, stats: Tracker) -> None:
        assert rewards.values_BT is not None
        returns_N = returns_BT[rewards.mask_BT].double()
        values_N = rewards.values_BT[rewards.mask_BT].double()
        if not len(returns_N):
            return
        stats.value("returns", float(returns_N.mean()))
        stats.value("values", float(values_N.mean()))
        if variance := float(returns_N.var(unbiased=False)):
            left = float((returns_N - values_N).var(unbiased=False))
            stats.value("explained_variance", 1 - left / variance)


def move_left(values: np.ndarray) -> np.ndarray:
    """Return the value of each next token; 0 (false) at the last one."""
    return np.append(values[1:], np.zeros(1, values.dtype))


def move_right(values: np.ndarray) -> np.ndarray:
    """Return the value of each previous token; 0 (false) at the first one."""
    return np.insert(values[:-1], 0, 0)
