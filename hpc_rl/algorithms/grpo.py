"""GRPO (and PPO without a critic) on one page: rewards -> advantages; log-probabilities -> loss.

    batch = RewardBatch(rewards_B, mask_BT, group_B)
    advantages_BT = grpo.advantages(batch, reward_norm=Levels("group", "group"))
    prox, behav = grpo.reference_logprobs(inference, recomputed, decoupled=False)
    loss, sums = grpo.policy_loss(TokenBatch(logprobs_T, prox_T, behav_T, …), eps_clip=0.2)

GRPO: Shao et al., "DeepSeekMath", arXiv 2402.03300. With other numbers the same functions are DAPO (higher
upper clip, dynamic sampling, overlong penalty; Yu et al., arXiv 2503.14476) and Dr.GRPO (no deviation,
constant divisor; Liu et al., arXiv 2503.20783).
"""

from typing import TypeVar

import torch

from hpc_rl.algorithms.advantages import gae, place_rewards, shape_rewards
from hpc_rl.algorithms.base import RewardBatch, TokenBatch
from hpc_rl.algorithms.kl import k3
from hpc_rl.algorithms.losses import policy_token_loss, token_sums
from hpc_rl.algorithms.normalization import Levels, normalize

T = TypeVar("T")


def advantages(
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

    To be called with the whole train batch, before rows are shared out over ranks.
    """
    shaped_B = shape_rewards(batch.rewards_B, reward_bias, reward_scaling, reward_clip)
    if reward_norm is not None:
        shaped_B = normalize(shaped_B, reward_norm, batch.group_B)
    rewards_BT = place_rewards(shaped_B, batch.mask_BT)
    if batch.token_rewards_BT is not None:
        rewards_BT = rewards_BT + batch.token_rewards_BT
    advantages_BT = gae(rewards_BT, batch.mask_BT, discount, gae_lambda)
    if adv_norm is None:
        return advantages_BT
    return normalize(advantages_BT, adv_norm, batch.group_B, batch.mask_BT)


def reference_logprobs(inference: T, recomputed: T | None, decoupled: bool) -> tuple[T, T]:
    """Return (proximal, behaviour) log-probabilities.

    `inference`: the servers'. `recomputed`: the trainer's at the start of the step. Decoupled (Hilton et al.,
    "Batch size invariance for policy optimization", arXiv 2110.00641): the recomputed and the servers'.
    Otherwise both are the recomputed ones, or the servers' if there are none. Raises ValueError if decoupled
    without recomputed ones.
    """
    if recomputed is None:
        if decoupled:
            raise ValueError("the decoupled loss needs recomputed log-probabilities")
        return inference, inference
    return recomputed, inference if decoupled else recomputed


def policy_loss(
    batch: TokenBatch,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    behav_imp_weight_cap: float | None = None,
    beta: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the token losses and sums to report; see losses.py.

    With `ref_T`, beta * k3 is added at each masked token, also at dropped ones, and `kl_loss` reports k3
    itself. `weights_T` weighs the loss; what is reported stays the plain sum. Raises ValueError for a cap of
    1 or less.
    """
    token = policy_token_loss(
        batch.logprobs_T,
        batch.prox_T,
        batch.behav_T,
        batch.advantages_T,
        batch.mask_T,
        eps_clip=eps_clip,
        eps_clip_higher=eps_clip_higher,
        c_clip=c_clip,
        behav_imp_weight_cap=behav_imp_weight_cap,
    )
    sums = token_sums(token, batch.entropy_T, batch.behav_T - batch.logprobs_T.detach(), batch.mask_T)
    loss_T = token.loss_T
    if batch.ref_T is not None:
        kl_T = k3(batch.logprobs_T, batch.ref_T, batch.mask_T)
        loss_T = loss_T + beta * kl_T
        sums["kl_loss"] = kl_T.detach().sum()
    return (loss_T if batch.weights_T is None else loss_T * batch.weights_T).sum(), sums


def token_weights(num_tokens: int, aggregation: str, max_new_tokens: int) -> float:
    """Return the weight of a token in a completion of `num_tokens`.

    The sum over the batch is then divided by its rows. `sequence_mean`: each completion counts the same, as
    in the GRPO paper. `constant_length`: each token counts the same in every completion, and the divisor does
    not depend on what was sampled, as in Dr.GRPO.
    """
    return 1.0 / max(1, num_tokens if aggregation == "sequence_mean" else max_new_tokens)
