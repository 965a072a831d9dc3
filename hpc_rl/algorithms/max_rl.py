"""MaxRL: credit (r - mean) / mean of the group, for rewards of 0 or more (arXiv 2602.02710). GRPO's loss."""

import torch

from hpc_rl.algorithms import grpo
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.normalization import Levels, normalize
from hpc_rl.algorithms.rewards import SpreadCredit, shape_rewards
from hpc_rl.algorithms.token_batch import RewardBatch


def compare_rewards(batch: RewardBatch, options: grpo.Options) -> torch.Tensor:
    """Return float32 [B]; 0 in groups whose mean is 0 or less. `reward_norm` has no effect."""
    shaped_B = shape_rewards(
        batch.rewards_B, options.reward_bias, options.reward_scaling, options.reward_clip
    )
    centered_B = normalize(shaped_B, Levels("group", None), batch.group_B, share_B=batch.share_B)
    mean_B = shaped_B - centered_B
    return torch.where(mean_B > 1e-6, centered_B / mean_B, torch.zeros_like(mean_B))


compute_credit = SpreadCredit(compare_rewards)
MAX_RL = Algorithm(options=grpo.Options, compute_credit=compute_credit, compute_loss=grpo.compute_loss)
