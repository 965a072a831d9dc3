"""`compat: areal`: the advantages of AReaL v0.3 as they are, known mistakes included; for comparisons, not for new work.

Where it differs from grpo.py: a completion counts as truncated if its row is the longest of the batch; GAE's recursion runs
through every token and not the model's own only; rows beyond the last whole group are divided by eps; the overlong penalty has no
bound; a missing reference model counts as log-probability 0, so that `kl_ctl` rewards improbable tokens.
"""

from __future__ import annotations

import torch

from hpc_rl.algorithms.advantages import gae, shape_rewards
from hpc_rl.algorithms.normalization import Levels, consecutive_groups, normalize


def overlong_penalty(
    lengths_B: torch.Tensor, max_new_tokens: int, overlong_tokens: int, factor: float
) -> torch.Tensor:
    """What to add to the rewards; below -factor for completions beyond the budget."""
    excess_B = lengths_B.float() - (max_new_tokens - overlong_tokens)
    return (-excess_B / overlong_tokens * factor).clamp(max=0.0)


def useful_rows(rewards_B: torch.Tensor, group_size: int) -> list[int]:
    """Rows that dynamic sampling keeps: all where the groups are not whole, and where no group would be left."""
    everything = list(range(len(rewards_B)))
    if len(rewards_B) % group_size:
        return everything
    rewards_GS = rewards_B.reshape(-1, group_size)
    equal_B = (rewards_GS == rewards_GS[:, :1]).all(1).repeat_interleave(group_size)
    return torch.nonzero(~equal_B).flatten().tolist() or everything


def advantages(
    rewards_B: torch.Tensor,
    mask_BT: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    group_size: int,
    reward_bias: float = 0.0,
    reward_scaling: float = 1.0,
    reward_clip: float = 20.0,
    reward_norm: Levels | None = None,
    adv_norm: Levels | None = None,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    token_rewards_BT: torch.Tensor | None = None,
    mask_no_eos_with_zero: bool = False,
) -> torch.Tensor:
    """Float32 [B, T], position t for token t itself (AReaL's are one to the left); 0 outside of the mask.

    A group is `group_size` consecutive rows. `lengths_B`: tokens of each row, prompt included.
    `token_rewards_BT`: kl.kl_rewards of the whole batch.
    """
    rewards_BT = torch.zeros(mask_BT.shape) if token_rewards_BT is None else token_rewards_BT.clone()
    shaped_B = shape_rewards(rewards_B, reward_bias, reward_scaling, reward_clip)
    group_B = consecutive_groups(len(rewards_B), group_size)
    if reward_norm is not None:
        shaped_B = normalize(shaped_B, reward_norm, group_B)
    if mask_no_eos_with_zero:
        shaped_B = torch.where(lengths_B == mask_BT.shape[1], torch.zeros_like(shaped_B), shaped_B)
    rows_B = torch.arange(len(shaped_B))
    rewards_BT[rows_B, lengths_B.long() - 1] += shaped_B
    advantages_BT = gae(rewards_BT, torch.ones_like(mask_BT), discount, gae_lambda)
    if adv_norm is not None:
        advantages_BT = normalize(advantages_BT, adv_norm, group_B, mask_BT)
    return torch.where(mask_BT, advantages_BT, torch.zeros_like(advantages_BT))
