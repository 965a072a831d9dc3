"""Two estimates of the divergence from the reference model: k1 as a reward, k3 as a loss, at each token.

k1 = log p - log ref is unbiased and of either sign; k3 = ref / p - 1 - log(ref / p) is never negative and has
a gradient. Names and derivation: Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html,
2020.
"""

import torch

from hpc_rl.algorithms.base import Options, TokenBatch


def compute_kl_rewards(
    behav_BT: torch.Tensor, ref_BT: torch.Tensor | None, mask_BT: torch.Tensor, options: Options
) -> torch.Tensor:
    """Return the rewards -kl_ctl * k1 at the masked tokens, 0 elsewhere."""
    assert ref_BT is not None, "the configuration is refused without a reference model"
    k1_BT = behav_BT.float() - ref_BT.float()
    return torch.where(mask_BT, -options.kl_ctl * k1_BT, torch.zeros_like(k1_BT))


def compute_k3(logprobs_T: torch.Tensor, ref_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Return k3 at the masked tokens, 0 elsewhere; its gradient goes to `logprobs_T`."""
    # masked before exp: nothing overflows
    gap_T = torch.where(mask_T, ref_T - logprobs_T, torch.zeros_like(logprobs_T))
    return gap_T.exp() - gap_T - 1


def compute_reference_loss(tokens: TokenBatch, beta: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the component `ref_kl`, beta * k3 of each token, and the sum of k3 itself, `kl_loss`."""
    assert tokens.ref_T is not None
    kl_T = compute_k3(tokens.logprobs_T, tokens.ref_T, tokens.mask_T)
    return beta * kl_T, {"kl_loss": kl_T.detach().sum()}
