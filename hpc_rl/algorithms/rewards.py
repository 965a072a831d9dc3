"""Rewards to credit: scalars per trajectory in, credit per token out.

Tokens that the model did not generate (prompt, tool output, padding) are not time steps: the recursion of GAE
skips them. Position t belongs to token t itself.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpc_rl.algorithms.normalization import normalize
from hpc_rl.algorithms.token_batch import Options, RewardBatch

BLOCK = 128  # tokens per product with a triangular matrix of discounts


def shape_rewards(
    rewards_B: torch.Tensor, bias: float = 0.0, scaling: float = 1.0, clip: float = 20.0
) -> torch.Tensor:
    """Return (reward + bias) * scaling, clipped to plus and minus `clip`, as a new float32 [B]."""
    return ((rewards_B.float() + bias) * scaling).clamp(-clip, clip)


def compute_clipped_share(
    rewards_B: torch.Tensor, bias: float = 0.0, scaling: float = 1.0, clip: float = 20.0
) -> float:
    """Return the share of rewards that `shape_rewards` changes to `clip` or -`clip`."""
    if not len(rewards_B):
        return 0.0
    return float((((rewards_B.float() + bias) * scaling).abs() > clip).float().mean())


def penalize_lengths(batch: RewardBatch, options: Options) -> torch.Tensor:
    """Return the numbers to add to the rewards for the lengths of completions, float32 [B]."""
    total_B = torch.zeros(len(batch.rewards_B))
    if options.overlong_reward_penalty:
        total_B = total_B + compute_overlong_penalty(batch, options)
    if options.length_penalty:
        total_B = total_B + options.length_penalty * compare_lengths(batch)
    return total_B


def compare_lengths(batch: RewardBatch) -> torch.Tensor:
    """Return a number from 0.5 for the shortest completion of a group to -0.5 for the longest.

    The length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3): 0.5 - (len - min) / (max - min), and at
    most 0 for completions without a reward above 0. 0 in groups with a single length.
    """
    length_B = batch.count_tokens().float()
    result_B = torch.zeros_like(length_B)
    group_B = torch.arange(len(length_B)) if batch.group_B is None else batch.group_B
    for group in group_B.unique():
        rows_B = group_B == group
        shortest, longest = length_B[rows_B].aminmax()
        if longest > shortest:
            result_B[rows_B] = 0.5 - (length_B[rows_B] - shortest) / (longest - shortest)
    return torch.where(batch.rewards_B > 0, result_B, result_B.clamp(max=0.0))


def compute_overlong_penalty(batch: RewardBatch, options: Options) -> torch.Tensor:
    """Return the penalties of completions that enter the last `overlong_tokens` of the budget.

    The penalty falls linearly from 0 to -overlong_penalty_factor at `max_new_tokens`: the soft overlong
    punishment of DAPO (Yu et al., arXiv 2503.14476, section 3.4).
    """
    factor = options.overlong_penalty_factor
    assert options.overlong_tokens and factor is not None, "the configuration is refused without them"
    excess_B = batch.count_tokens().float() - (options.max_new_tokens - options.overlong_tokens)
    return (-excess_B / options.overlong_tokens * factor).clamp(-factor, 0.0)


def select_informative_rows(batch: RewardBatch, options: Options) -> list[int]:
    """Return the rows of groups whose rewards differ, because other groups teach nothing.

    This is the dynamic sampling of DAPO (arXiv 2503.14476, section 3.2). Its equation 11 considers only the
    answers, so it compares rewards without the length penalties. All rows without `dynamic_sampling`.
    """
    rows = range(len(batch.rewards_B))
    if not options.dynamic_sampling:
        return list(rows)
    given_B = batch.rewards_B if batch.given_B is None else batch.given_B
    group_B = torch.arange(len(given_B)) if batch.group_B is None else batch.group_B
    flat = {g for g in group_B.unique().tolist() if len(given_B[group_B == g].unique()) == 1}
    return [row for row in rows if int(group_B[row]) not in flat]


def select_finished_rows(batch: RewardBatch, options: Options) -> list[int]:
    """Return the rows that are not truncated; all rows without `mask_no_eos_with_zero`."""
    rows = range(len(batch.rewards_B))
    if not options.mask_no_eos_with_zero or batch.truncated_B is None:
        return list(rows)
    return [row for row in rows if not batch.truncated_B[row]]


def normalize_rewards(batch: RewardBatch, options: Options) -> torch.Tensor:
    """Return the rewards of the whole train batch, shaped and normalized by `reward_norm`, float32 [B]."""
    shaped_B = shape_rewards(
        batch.rewards_B, options.reward_bias, options.reward_scaling, options.reward_clip
    )
    if options.reward_norm is not None:
        shaped_B = normalize(shaped_B, options.reward_norm, batch.group_B, share_B=batch.share_B)
    return shaped_B


def spread_rewards(batch: RewardBatch, shaped_B: torch.Tensor, options: Options) -> torch.Tensor:
    """Return the credit of each token for given rewards of trajectories, float32 [B, T]."""
    rewards_BT = place_rewards(shaped_B, batch.mask_BT)
    if batch.token_rewards_BT is not None:
        rewards_BT = rewards_BT + batch.token_rewards_BT
    credit_BT = compute_gae(rewards_BT, batch.mask_BT, options.discount, options.gae_lambda, batch.values_BT)
    if options.adv_norm is None:
        return credit_BT
    return normalize(credit_BT, options.adv_norm, batch.group_B, batch.mask_BT)


@dataclass(frozen=True)
class SpreadCredit:
    """A `compute_credit` that spreads one number of each trajectory over its tokens by `spread_rewards`.

    `shape` returns these numbers, float32 [B], from the whole train batch, but not from its tensors [B, T].
    Without a critic the trainer calls `shape` only, and spreads the numbers over ragged rows.
    """

    shape: Callable[[RewardBatch, Any], torch.Tensor]

    def __call__(self, batch: RewardBatch, options: Any) -> torch.Tensor:
        """Return the credit of each token, float32 [B, T], 0 outside of the mask."""
        return spread_rewards(batch, self.shape(batch, options), options)


# rewards placed at the last token, spread by generalized advantage estimation, and normalized by `adv_norm`
compute_credit = SpreadCredit(normalize_rewards)


def place_rewards(rewards_B: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return float32 [B, T]: each reward at its row's last masked token, 0 elsewhere."""
    position_T = torch.arange(1, mask_BT.shape[1] + 1)
    none_B = torch.zeros(len(mask_BT), dtype=torch.long)
    last_B = (mask_BT * position_T).amax(1) if mask_BT.shape[1] else none_B
    rewards_BT = torch.zeros(mask_BT.shape, dtype=torch.float32)
    rows_B = last_B > 0
    rewards_BT[rows_B, last_B[rows_B] - 1] = rewards_B.float()[rows_B]
    return rewards_BT


def compute_gae(
    rewards_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    values_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return generalized advantage estimates at the masked tokens, 0 elsewhere, as a new float32 [B, T].

    Over the masked tokens of a row: d_i = r_i + discount * V_{i+1} - V_i, with V = 0 after the last one, and
    A_i = d_i + discount * lambda * A_{i+1} (Schulman et al., arXiv 1506.02438, equations 11 and 16). Without
    `values_BT`, V is 0.
    """
    num_rows, width = mask_BT.shape
    count_B = mask_BT.sum(1)
    end_B = count_B.cumsum(0)  # of a row's masked tokens, among all of them
    at_N = mask_BT.reshape(-1).nonzero().squeeze(1)
    # Compact the masked tokens of each row to its end, in order.
    most = int(count_B.max()) if num_rows else 0
    shift_B = most * torch.arange(1, num_rows + 1) - end_B
    place_N = torch.arange(len(at_N)) + shift_B.repeat_interleave(count_B)
    delta_N = rewards_BT.reshape(-1)[at_N].float()
    if values_BT is not None:
        own_N = values_BT.reshape(-1)[at_N].float()
        next_N = torch.nn.functional.pad(own_N[1:], (0, int(len(own_N) > 0)))
        next_N[end_B[count_B > 0] - 1] = 0.0
        delta_N = delta_N + discount * next_N - own_N
    ordered_BT = torch.zeros(num_rows * most)
    ordered_BT[place_N] = delta_N
    sums_BT = sum_discounted(ordered_BT.view(num_rows, most), discount * gae_lambda)
    out = torch.zeros(num_rows * width)
    out[at_N] = sums_BT.reshape(-1)[place_N]
    return out.view(num_rows, width)


@functools.lru_cache(maxsize=8)
def _make_powers(decay: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decay^(source - target) below the diagonal, [BLOCK, BLOCK], and decay^BLOCK to decay^1."""
    exponent_K = torch.arange(BLOCK, dtype=torch.float64)
    gap_KK = (exponent_K[:, None] - exponent_K).clamp(min=0.0)  # [source, target]
    reach_K = decay ** torch.arange(BLOCK, 0, -1, dtype=torch.float64)
    return torch.tril((decay**gap_KK).float()), reach_K.float()


def sum_discounted(x_BT: torch.Tensor, decay: float) -> torch.Tensor:
    """Return y_t = x_t + decay * y_{t+1}, computed from the last column back, in blocks of columns."""
    out_BT = torch.empty_like(x_BT)
    carry_B1 = torch.zeros(len(x_BT), 1)
    triangle_KK, reach_K = _make_powers(decay)
    for end in range(x_BT.shape[1], 0, -BLOCK):
        start = max(end - BLOCK, 0)
        size = end - start
        block_BK = x_BT[:, start:end] @ triangle_KK[:size, :size]
        out_BT[:, start:end] = block_BK.addcmul_(carry_B1, reach_K[BLOCK - size :])
        carry_B1 = out_BT[:, start : start + 1]
    return out_BT
