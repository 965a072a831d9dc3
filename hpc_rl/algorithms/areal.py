"""`algorithm: areal`: the computation of AReaL v0.3 with its known mistakes, for comparisons only.

Differences from grpo.py: a completion counts as truncated if its row is the longest of the batch; the
recursion of GAE runs through every token, not only the model's own; a group is `group_size` consecutive rows,
unless environments sent groups of other sizes, which AReaL does not have; rows beyond the last whole group
are divided by eps; groups are dropped after the normalization, by penalized rewards; the overlong penalty has
no bound; a missing reference model has log-probability 0, so `kl_ctl` rewards improbable tokens;
log-probabilities are recomputed at temperature 1.
"""

import torch

from hpc_rl.algorithms import grpo, kl, rewards
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.grpo import Options, compute_loss
from hpc_rl.algorithms.normalization import normalize, number_groups
from hpc_rl.algorithms.token_batch import RewardBatch


def penalize_lengths(batch: RewardBatch, options: Options) -> torch.Tensor:
    """Return the overlong penalties; they have no lower bound."""
    if not options.overlong_reward_penalty:
        return torch.zeros(len(batch.rewards_B))
    assert options.overlong_tokens and options.overlong_penalty_factor is not None
    excess_B = batch.count_tokens().float() - (options.max_new_tokens - options.overlong_tokens)
    return (-excess_B / options.overlong_tokens * options.overlong_penalty_factor).clamp(max=0.0)


def keep_groups(batch: RewardBatch, options: Options) -> list[int]:
    """Return all rows: every group counts in the normalization."""
    return list(range(len(batch.rewards_B)))


def compute_kl_rewards(
    behav_BT: torch.Tensor, ref_BT: torch.Tensor | None, mask_BT: torch.Tensor, options: Options
) -> torch.Tensor:
    """Return the KL rewards; without a reference model, its log-probabilities are 0."""
    ref_BT = torch.zeros_like(behav_BT) if ref_BT is None else ref_BT
    return kl.compute_kl_rewards(behav_BT, ref_BT, mask_BT, options)


def compute_credit(batch: RewardBatch, options: Options) -> torch.Tensor:
    """Return float32 [B, T] of the whole batch, position t for token t (AReaL: one to the left)."""
    mask_BT, lengths_B, token_rewards_BT = batch.mask_BT, batch.lengths_B, batch.token_rewards_BT
    assert lengths_B is not None, "rewards are placed by the length of the row"
    shaped_B = rewards.shape_rewards(
        batch.rewards_B, options.reward_bias, options.reward_scaling, options.reward_clip
    )
    group_B = batch.group_B if batch.mixed_sizes else number_groups(len(shaped_B), batch.group_size)
    if options.reward_norm is not None:
        shaped_B = normalize(shaped_B, options.reward_norm, group_B, share_B=batch.share_B)
    if options.mask_no_eos_with_zero:
        shaped_B = torch.where(lengths_B == mask_BT.shape[1], torch.zeros_like(shaped_B), shaped_B)
    rewards_BT = torch.zeros(mask_BT.shape) if token_rewards_BT is None else token_rewards_BT.clone()
    rewards_BT[torch.arange(len(shaped_B)), lengths_B.long() - 1] += shaped_B
    credit_BT = rewards.compute_gae(
        rewards_BT, torch.ones_like(mask_BT), options.discount, options.gae_lambda
    )
    if options.adv_norm is not None:
        credit_BT = normalize(credit_BT, options.adv_norm, group_B, mask_BT)
    return torch.where(mask_BT, credit_BT, torch.zeros_like(credit_BT))


def select_rows(batch: RewardBatch, options: Options) -> list[int]:
    """Return the rows that dynamic sampling keeps: all if groups are incomplete or all groups are equal."""
    rows = list(range(len(batch.rewards_B)))
    if not options.dynamic_sampling:
        return rows
    if batch.mixed_sizes:
        return rewards.select_informative_rows(batch._replace(given_B=None), options)
    if len(rows) % batch.group_size:
        return rows
    rewards_GS = batch.rewards_B.reshape(-1, batch.group_size)
    equal_B = (rewards_GS == rewards_GS[:, :1]).all(1).repeat_interleave(batch.group_size)
    return torch.nonzero(~equal_B).flatten().tolist() or rows


AREAL = Algorithm(
    options=grpo.Options,
    penalize_lengths=penalize_lengths,
    select_groups=keep_groups,
    compute_kl_rewards=compute_kl_rewards,
    compute_credit=compute_credit,
    select_rows=select_rows,
    logprob_temperature=1.0,
    compute_loss=compute_loss,
)
