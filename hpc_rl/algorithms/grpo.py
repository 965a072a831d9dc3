"""GRPO (and PPO without a critic) on one page: rewards -> advantages; log-probabilities -> loss.

    advantages_BT = grpo.advantages(rewards_B, mask_BT, group_B=group_B, reward_norm=Levels("group", "group"))
    prox, behav   = grpo.reference_logprobs(inference, recomputed, decoupled=False)
    loss, sums    = grpo.policy_loss(logprobs_T, prox_T, behav_T, advantages_T, mask_T, entropy_T, eps_clip=0.2)

Rows are trajectories; group_B [B] has the group number of each. Left out: a critic.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from hpc_rl.algorithms.advantages import gae, place_rewards, shape_rewards
from hpc_rl.algorithms.kl import k3
from hpc_rl.algorithms.losses import policy_token_loss, token_sums
from hpc_rl.algorithms.normalization import Levels, normalize

T = TypeVar("T")


def advantages(
    rewards_B: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    group_B: torch.Tensor,
    reward_bias: float = 0.0,
    reward_scaling: float = 1.0,
    reward_clip: float = 20.0,
    reward_norm: Levels | None = None,
    adv_norm: Levels | None = None,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    token_rewards_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Float32 [B, T], 0 outside of the mask; to be called with the whole train batch, before it is shared out over ranks.

    `token_rewards_BT` (kl.kl_rewards) are added as they are, after the trajectory's reward was shaped and placed.
    """
    shaped_B = shape_rewards(rewards_B, reward_bias, reward_scaling, reward_clip)
    if reward_norm is not None:
        shaped_B = normalize(shaped_B, reward_norm, group_B)
    rewards_BT = place_rewards(shaped_B, mask_BT)
    if token_rewards_BT is not None:
        rewards_BT = rewards_BT + token_rewards_BT
    advantages_BT = gae(rewards_BT, mask_BT, discount, gae_lambda)
    return advantages_BT if adv_norm is None else normalize(advantages_BT, adv_norm, group_B, mask_BT)


def reference_logprobs(inference: T, recomputed: T | None, decoupled: bool) -> tuple[T, T]:
    """(proximal, behaviour) log-probabilities. `recomputed`: the trainer's own at the start of the step.

    Decoupled: clip around the recomputed ones, weigh by them over the servers'. Otherwise both are the recomputed ones, or the
    servers' where nothing was recomputed. Raises ValueError where decoupled has nothing recomputed.
    """
    if recomputed is None:
        if decoupled:
            raise ValueError("the decoupled loss needs recomputed log-probabilities")
        return inference, inference
    return recomputed, inference if decoupled else recomputed


def policy_loss(
    logprobs_T: torch.Tensor,
    prox_T: torch.Tensor,
    behav_T: torch.Tensor,
    advantages_T: torch.Tensor,
    mask_T: torch.Tensor,
    entropy_T: torch.Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    behav_imp_weight_cap: float | None = None,
    ref_T: torch.Tensor | None = None,
    beta: float = 0.0,
    weights_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the token losses (dropped tokens count with 0) and sums to report; see losses.py.

    With `ref_T`, beta * k3 is added at each masked token, dropped ones too, and `kl_loss` reports k3 itself. With `weights_T`
    (token_weights) each token counts with its weight; what is reported stays the plain sum.
    """
    token = policy_token_loss(
        logprobs_T,
        prox_T,
        behav_T,
        advantages_T,
        mask_T,
        eps_clip=eps_clip,
        eps_clip_higher=eps_clip_higher,
        c_clip=c_clip,
        behav_imp_weight_cap=behav_imp_weight_cap,
    )
    sums = token_sums(token, entropy_T, behav_T - logprobs_T.detach(), mask_T)
    loss_T = token.loss_T
    if ref_T is not None:
        kl_T = k3(logprobs_T, ref_T, mask_T)
        loss_T = loss_T + beta * kl_T
        sums["kl_loss"] = kl_T.detach().sum()
    return (loss_T if weights_T is None else loss_T * weights_T).sum(), sums


def token_weights(num_tokens: int, aggregation: str, max_new_tokens: int) -> float:
    """What a token of a completion with `num_tokens` counts, where the sum over the batch is then divided by its number of rows.

    `sequence_mean`: each completion counts the same, as GRPO was published. `constant_length`: a token counts the same in every
    completion, and the divisor does not depend on what was sampled (Dr.GRPO).
    """
    return 1.0 / max(1, num_tokens if aggregation == "sequence_mean" else max_new_tokens)
