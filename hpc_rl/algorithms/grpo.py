"""GRPO (and PPO without a critic) on one page: rewards -> advantages; log-probabilities -> loss.

    batch = RewardBatch(rewards_B, mask_BT, group_B)
    advantages_BT = grpo.compute_advantages(batch, reward_norm=Levels("group", "group"))
    prox, behav = grpo.choose_logprobs(inference, recomputed, decoupled=False)
    loss, sums = grpo.compute_policy_loss(TokenBatch(logprobs_T, prox_T, behav_T, …), eps_clip=0.2)

GRPO: Shao et al., "DeepSeekMath", arXiv 2402.03300. With other numbers the same functions are DAPO (higher
upper clip, dynamic sampling, overlong penalty; Yu et al., arXiv 2503.14476) and Dr.GRPO (no deviation,
constant divisor; Liu et al., arXiv 2503.20783).
"""

from typing import TypeVar

import torch

from hpc_rl.algorithms.advantages import compute_gae, place_rewards, shape_rewards
from hpc_rl.algorithms.base import RewardBatch, TokenBatch
from hpc_rl.algorithms.kl import compute_k3
from hpc_rl.algorithms.normalization import Levels, normalize

T = TypeVar("T")


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
) -> torch.Tensor:
    """Return float32 [B, T], 0 outside of the mask.

    Call it with the whole train batch, before rows are divided among ranks.
    """
    shaped_B = shape_rewards(batch.rewards_B, reward_bias, reward_scaling, reward_clip)
    if reward_norm is not None:
        shaped_B = normalize(shaped_B, reward_norm, batch.group_B)
    rewards_BT = place_rewards(shaped_B, batch.mask_BT)
    if batch.token_rewards_BT is not None:
        rewards_BT = rewards_BT + batch.token_rewards_BT
    advantages_BT = compute_gae(rewards_BT, batch.mask_BT, discount, gae_lambda)
    if adv_norm is None:
        return advantages_BT
    return normalize(advantages_BT, adv_norm, batch.group_B, batch.mask_BT)


def choose_logprobs(inference: T, recomputed: T | None, decoupled: bool) -> tuple[T, T]:
    """Return (proximal, behaviour) log-probabilities.

    `inference` come from the servers, `recomputed` from the trainer at the start of the step. If `decoupled`
    (Hilton et al., "Batch size invariance for policy optimization", arXiv 2110.00641), returns (recomputed,
    inference). Otherwise returns the recomputed ones twice, or the servers' if there are no recomputed ones.
    Raises ValueError if decoupled without recomputed ones.
    """
    if recomputed is None:
        if decoupled:
            raise ValueError("the decoupled loss needs recomputed log-probabilities")
        return inference, inference
    return recomputed, inference if decoupled else recomputed


def compute_policy_loss(
    batch: TokenBatch,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    behav_imp_weight_cap: float | None = None,
    beta: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the token losses and sums over the masked tokens to report.

    PPO's clipped loss around the proximal policy: -min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_higher) A)
    with r = current / proximal (Schulman et al., arXiv 1707.06347, equation 7); for A < 0 bounded by
    -c_clip A (dual clip, Ye et al., arXiv 1912.09729); times proximal / behaviour (Hilton et al., arXiv
    2110.00641). A token whose behaviour weight is above the cap has weight 0: it is dropped, not clamped.
    With `ref_T`, beta * k3 is added at each masked token, also at dropped ones; `kl_loss` reports k3 itself.
    `weights_T` weighs the loss, not the reported sums. Raises ValueError for a `c_clip` or cap of 1 or less.
    """
    for name, bound in (("c_clip", c_clip), ("behav_imp_weight_cap", behav_imp_weight_cap)):
        if bound is not None and bound <= 1:
            raise ValueError(f"{name} must be above 1, got {bound}")
    mask_T, advantages_T = batch.mask_T, batch.advantages_T

    def mask_tokens(values_T: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_T, values_T, torch.zeros_like(values_T))

    # masked before exp: no overflow at tokens that don't count
    ratio_T = mask_tokens(batch.logprobs_T - batch.prox_T).exp()
    upper = 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher)
    plain_T = -advantages_T * ratio_T
    bounded_T = -advantages_T * ratio_T.clamp(1 - eps_clip, upper)
    loss_T = torch.maximum(plain_T, bounded_T)
    clipped_T = plain_T < bounded_T
    dual_clipped_T = dropped_T = torch.zeros_like(mask_T)
    if c_clip is not None:
        dual_T = advantages_T.sign() * c_clip * advantages_T
        dual_clipped_T = dual_T < loss_T
        loss_T = torch.minimum(loss_T, dual_T)
    weight_T = mask_tokens(batch.prox_T - batch.behav_T).exp()
    if behav_imp_weight_cap is not None:
        dropped_T = weight_T > behav_imp_weight_cap
        weight_T = weight_T.masked_fill(dropped_T, 0.0)
    loss_T = mask_tokens(loss_T * weight_T)
    sums = {
        "num_tokens": mask_T.sum(),
        "entropy": mask_tokens(batch.entropy_T).sum(),
        "clip_ratio": mask_tokens(clipped_T).sum(),
        "dual_clip_ratio": mask_tokens(dual_clipped_T).sum(),
        "importance_weight": mask_tokens(ratio_T).detach().sum(),
        "behave_imp_weight": mask_tokens(weight_T).sum(),
        "behave_dropped": mask_tokens(dropped_T).sum(),
        "behave_approx_kl": mask_tokens(batch.behav_T - batch.logprobs_T.detach()).sum(),
    }
    if batch.ref_T is not None:
        kl_T = compute_k3(batch.logprobs_T, batch.ref_T, mask_T)
        loss_T = loss_T + beta * kl_T
        sums["kl_loss"] = kl_T.detach().sum()
    return (loss_T if batch.weights_T is None else loss_T * batch.weights_T).sum(), sums


def compute_token_weight(num_tokens: int, aggregation: str, max_new_tokens: int) -> float:
    """Return the weight of a token in a completion of `num_tokens`.

    The sum over the batch is then divided by its number of rows. `sequence_mean`: each completion has the
    same weight, as in the GRPO paper. `constant_length`: each token has the same weight, and the divisor does
    not depend on the samples, as in Dr.GRPO.
    """
    return 1.0 / max(1, num_tokens if aggregation == "sequence_mean" else max_new_tokens)
