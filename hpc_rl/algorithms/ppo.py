"""PPO with a critic (Schulman et al., arXiv 1707.06347): credit from values, and the loss of the critic.

The credit is generalized advantage estimation on `values_BT`. The policy's loss is GRPO's.
"""

import dataclasses

import torch

from hpc_rl.algorithms import grpo
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.rewards import compute_credit
from hpc_rl.algorithms.token_batch import Options, RewardBatch


def compute_returns(batch: RewardBatch, options: Options) -> torch.Tensor:
    """Return the targets of the critic, float32 [B, T]: the credit before `adv_norm`, plus the values."""
    assert batch.values_BT is not None, "PPO needs a critic"
    credit_BT = compute_credit(batch, dataclasses.replace(options, adv_norm=None))
    return torch.where(batch.mask_BT, credit_BT + batch.values_BT, torch.zeros_like(credit_BT))


def compute_value_loss(
    values_T: torch.Tensor,
    old_values_T: torch.Tensor,
    returns_T: torch.Tensor,
    mask_T: torch.Tensor,
    eps_clip: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of the critic of each token, 0 outside of the mask, and sums to report.

    The larger of (v - R)^2 / 2 and (v' - R)^2 / 2, where v' is v within `eps_clip` of the value before the
    update: the clip of OpenAI's baselines and of AReaL, which the paper does not have.
    """
    gap_T = torch.where(mask_T, values_T - old_values_T, torch.zeros_like(values_T))
    bounded_T = old_values_T + gap_T.clamp(-eps_clip, eps_clip)
    plain_T, clipped_T = ((one_T - returns_T).square() / 2 for one_T in (values_T, bounded_T))
    loss_T = torch.where(mask_T, torch.maximum(plain_T, clipped_T), torch.zeros_like(values_T))
    sums = {
        "value_clip_ratio": (mask_T & (clipped_T > plain_T)).sum(),
        "value_loss": loss_T.detach().sum(),
    }
    return loss_T, sums


PPO = Algorithm(
    options=grpo.Options,
    needs=frozenset({"critic"}),
    compute_credit=compute_credit,
    compute_loss=grpo.compute_loss,
)
