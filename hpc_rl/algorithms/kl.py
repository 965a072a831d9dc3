"""Estimates of the divergence from the reference model at each token, as a reward or as a loss.

k1 = log p - log ref is unbiased and of either sign; k2 = k1^2 / 2 and k3 = ref / p - 1 - log(ref / p) are
never negative. As losses, k2 has the gradient of the divergence, and the mean gradient of k1 is 0. Names and
derivation: Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html, 2020.
"""

from typing import Literal

import torch

from hpc_rl.algorithms.token_batch import Options, TokenBatch


def compute_kl_rewards(
    behav_BT: torch.Tensor, ref_BT: torch.Tensor | None, mask_BT: torch.Tensor, options: Options
) -> torch.Tensor:
    """Return the rewards -kl_ctl * estimate at the masked tokens, 0 elsewhere."""
    assert ref_BT is not None, "the configuration is refused without a reference model"
    kl_BT = estimate_kl(behav_BT.float(), ref_BT.float(), mask_BT, options.kl_estimator)
    return torch.where(mask_BT, -options.kl_ctl * kl_BT, torch.zeros_like(kl_BT))


def estimate_kl(
    logprobs_T: torch.Tensor, ref_T: torch.Tensor, mask_T: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """Return the estimate at the masked tokens, 0 elsewhere; its gradient goes to `logprobs_T`."""
    # masked before exp: nothing overflows
    gap_T = torch.where(mask_T, ref_T - logprobs_T, torch.zeros_like(logprobs_T))
    if estimator == "k1":
        return -gap_T
    if estimator == "k2":
        return gap_T.square() / 2
    return gap_T.exp() - gap_T - 1


def compute_reference_loss(
    tokens: TokenBatch, beta: float, estimator: Literal["k1", "k2", "k3"] = "k3"
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the component `ref_kl`, beta * estimate of each token, and the sum without beta, `kl_loss`."""
    assert tokens.ref_T is not None
    kl_T = estimate_kl(tokens.logprobs_T, tokens.ref_T, tokens.mask_T, estimator)
    return beta * kl_T, {"kl_loss": kl_T.detach().sum()}
