"""Two estimates of the divergence from the reference model: k1 as a reward, k3 as a loss, at each token.

k1 = log p - log ref is unbiased and of either sign; k3 = ref / p - 1 - log(ref / p) is never negative and has
a gradient. Names and derivation: Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html,
2020.
"""

import torch


def compute_kl_rewards(
    behav_BT: torch.Tensor, ref_BT: torch.Tensor, mask_BT: torch.Tensor, coefficient: float
) -> torch.Tensor:
    """Return the rewards -coefficient * k1 at the masked tokens, 0 elsewhere."""
    k1_BT = behav_BT.float() - ref_BT.float()
    return torch.where(mask_BT, -coefficient * k1_BT, torch.zeros_like(k1_BT))


def compute_k3(logprobs_T: torch.Tensor, ref_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Return k3 at the masked tokens, 0 elsewhere; its gradient goes to `logprobs_T`."""
    # masked before exp: nothing overflows
    gap_T = torch.where(mask_T, ref_T - logprobs_T, torch.zeros_like(logprobs_T))
    return gap_T.exp() - gap_T - 1
