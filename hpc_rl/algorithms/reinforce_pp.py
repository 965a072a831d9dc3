"""REINFORCE++: credit normalized over the whole batch (Hu et al., arXiv 2501.03262). GRPO's loss.

With several trajectories per prompt, rewards first lose the mean of their group, which is the variant with a
baseline. The KL divergence from the reference model is a reward of each token (`kl_ctl`).
"""

import dataclasses

import torch

from hpc_rl.algorithms import grpo, rewards
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.normalization import Levels
from hpc_rl.algorithms.token_batch import RewardBatch


def center_rewards(batch: RewardBatch, options: grpo.Options) -> torch.Tensor:
    """Return the numbers to spread, float32 [B]; an explicit `reward_norm` replaces the mean of the group."""
    if options.reward_norm is None and batch.group_size > 1:
        options = dataclasses.replace(options, reward_norm=Levels("group", None))
    return rewards.normalize_rewards(batch, options)


compute_credit = rewards.SpreadCredit(center_rewards)
REINFORCE_PP = Algorithm(options=grpo.Options, compute_credit=compute_credit, compute_loss=grpo.compute_loss)
