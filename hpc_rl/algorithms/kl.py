"""Two estimates of the divergence from the reference model: k1 as a reward at each token, k3 as a loss at each token.

k1 is `log p - log ref`, unbiased and of either sign; k3 is `ref / p - 1 - log(ref / p)`, never negative, with a gradient.
"""

from __future__ import annotations

import torch


def kl_rewards(
    behav_BT: torch.Tensor, ref_BT: torch.Tensor, mask_BT: torch.Tensor, coefficient: float
) -> torch.Tensor:
    """-coefficient * k1 at the masked tokens, 0 elsewhere: what to add to the rewards there."""
    k1_BT = behav_BT.float() - ref_BT.float()
    return torch.where(mask_BT, -coefficient * k1_BT, torch.zeros_like(k1_BT))


def k3(logprobs_T: torch.Tensor, ref_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """k3 at the masked tokens, 0 elsewhere; its gradient goes to `logprobs_T`."""
    gap_T = torch.where(
        mask_T, ref_T - logprobs_T, torch.zeros_like(logprobs_T)
    )  # masked before exp: nothing overflows
    return gap_T.exp() - gap_T - 1
