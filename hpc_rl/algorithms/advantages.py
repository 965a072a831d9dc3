"""Rewards and advantages: scalars per trajectory in, per-token advantages out.

Tokens that the model did not generate (prompt, tool output, padding) are not time steps: the recursion of GAE
skips them. Position t belongs to token t itself. There is no critic, so values are 0.
"""

import torch

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


def compute_overlong_penalty(
    lengths_B: torch.Tensor, max_new_tokens: int, overlong_tokens: int, factor: float
) -> torch.Tensor:
    """Return the penalty on the rewards of completions that enter the last `overlong_tokens` of the budget.

    lengths_B: int64 [B], tokens of each completion. The penalty falls linearly from 0 to -factor at
    `max_new_tokens`: the soft overlong punishment of DAPO (Yu et al., arXiv 2503.14476, section 3.4).
    """
    excess_B = lengths_B.float() - (max_new_tokens - overlong_tokens)
    return (-excess_B / overlong_tokens * factor).clamp(-factor, 0.0)


def select_informative_rows(rewards_B: torch.Tensor, group_B: torch.Tensor, group_size: int) -> list[int]:
    """Return the rows of groups whose rewards differ; other groups teach nothing.

    This is the dynamic sampling of DAPO (arXiv 2503.14476, section 3.2). Its equation 11 considers only the
    answers, so the caller passes rewards without the overlong penalty. `group_B` has group numbers, int64
    [B]; `group_size` is not used.
    """
    flat = {g for g in group_B.unique().tolist() if len(rewards_B[group_B == g].unique()) == 1}
    return [row for row, group in enumerate(group_B.tolist()) if group not in flat]


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
    rewards_BT: torch.Tensor, mask_BT: torch.Tensor, discount: float = 1.0, gae_lambda: float = 1.0
) -> torch.Tensor:
    """Return generalized advantage estimates at the masked tokens, 0 elsewhere, as a new float32 [B, T].

    Over the masked tokens of a row: A_i = r_i + discount * lambda * A_{i+1} (Schulman et al., arXiv
    1506.02438, equation 16, with values of 0).
    """
    # move masked tokens to the end of their row, in order
    order_BT = torch.argsort(mask_BT.to(torch.uint8), dim=1, stable=True)
    valid_BT = mask_BT.gather(1, order_BT)
    ordered_BT = rewards_BT.float().gather(1, order_BT) * valid_BT
    sums_BT = _sum_discounted(ordered_BT, discount * gae_lambda) * valid_BT
    return torch.zeros_like(sums_BT).scatter_(1, order_BT, sums_BT)


def _sum_discounted(x_BT: torch.Tensor, decay: float) -> torch.Tensor:
    """Return y_t = x_t + decay * y_{t+1}, computed from the last column back, in blocks of columns."""
    out_BT = torch.empty_like(x_BT)
    carry_B1 = torch.zeros(len(x_BT), 1)
    exponent_K = torch.arange(BLOCK, dtype=torch.float64)
    gap_KK = (exponent_K[:, None] - exponent_K).clamp(min=0.0)  # [source, target]
    triangle_KK = torch.tril((decay**gap_KK).float())
    for end in range(x_BT.shape[1], 0, -BLOCK):
        start = max(end - BLOCK, 0)
        size = end - start
        reach_K = (decay ** torch.arange(size, 0, -1, dtype=torch.float64)).float()
        out_BT[:, start:end] = x_BT[:, start:end] @ triangle_KK[:size, :size] + carry_B1 * reach_K
        carry_B1 = out_BT[:, start : start + 1]
    return out_BT
