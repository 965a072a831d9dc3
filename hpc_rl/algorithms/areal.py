"""`algorithm: areal`: the advantages of AReaL v0.3 with their known mistakes, for comparisons only.

Differences from grpo.py: a completion counts as truncated if its row is the longest of the batch; the
recursion of GAE runs through every token, not only the model's own; a group is `group_size` consecutive rows,
unless environments sent groups of other sizes, which AReaL does not have; rows beyond the last whole group
are divided by eps; the overlong penalty has no bound; a missing reference model has log-probability 0, so
`kl_ctl` rewards improbable tokens.
"""

import torch

from hpc_rl.algorithms.advantages import compute_gae, shape_rewards
from hpc_rl.algorithms.base import RewardBatch
from hpc_rl.algorithms.normalization import Levels, normalize, number_groups


def compute_overlong_penalty(
    lengths_B: torch.Tensor, max_new_tokens: int, overlong_tokens: int, factor: float
) -> torch.Tensor:
    """Return the penalty on the rewards; below -factor for completions beyond the budget."""
    excess_B = lengths_B.float() - (max_new_tokens - overlong_tokens)
    return (-excess_B / overlong_tokens * factor).clamp(max=0.0)


def select_informative_rows(rewards_B: torch.Tensor, group_B: torch.Tensor, group_size: int) -> list[int]:
    """Return the rows that dynamic sampling keeps: all if groups are incomplete or all groups are equal."""
    everything = list(range(len(rewards_B)))
    if len(rewards_B) % group_size:
        return everything
    rewards_GS = rewards_B.reshape(-1, group_size)
    equal_B = (rewards_GS == rewards_GS[:, :1]).all(1).repeat_interleave(group_size)
    return torch.nonzero(~equal_B).flatten().tolist() or everything


def compute_advantages(
    batch: RewardBatch,
    *,
    reward_bias: float = 0.0,
    reward_scaling: float = 1.0,
    reward_clip: float = 20.0,
    reward_norm: Levels | None = None,
    adv_norm: Levels | None = None,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    zero_truncated: bool = False,
) -> torch.Tensor:
    """Return float32 [B, T] of the whole batch, position t for token t (AReaL: one to the left)."""
    mask_BT, lengths_B, token_rewards_BT = batch.mask_BT, batch.lengths_B, batch.token_rewards_BT
    assert lengths_B is not None, "rewards are placed by the length of the row"
    shaped_B = shape_rewards(batch.rewards_B, reward_bias, reward_scaling, reward_clip)
    group_B = batch.group_B if batch.mixed_sizes else number_groups(len(shaped_B), batch.group_size)
    if reward_norm is not None:
        shaped_B = normalize(shaped_B, reward_norm, group_B)
    if zero_truncated:
        shaped_B = torch.where(lengths_B == mask_BT.shape[1], torch.zeros_like(shaped_B), shaped_B)
    rewards_BT = torch.zeros(mask_BT.shape) if token_rewards_BT is None else token_rewards_BT.clone()
    rewards_BT[torch.arange(len(shaped_B)), lengths_B.long() - 1] += shaped_B
    advantages_BT = compute_gae(rewards_BT, torch.ones_like(mask_BT), discount, gae_lambda)
    if adv_norm is not None:
        advantages_BT = normalize(advantages_BT, adv_norm, group_B, mask_BT)
    return torch.where(mask_BT, advantages_BT, torch.zeros_like(advantages_BT))
