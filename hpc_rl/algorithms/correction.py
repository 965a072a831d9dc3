"""The off-policy correction: weights of tokens that another policy sampled than the one that is improved.

w = proximal / behaviour (the decoupled loss of Hilton et al., "Batch size invariance for policy
optimization", arXiv 2110.00641).
"""

from typing import TypeVar

import torch

T = TypeVar("T")


def choose_logprobs(inference: T, recomputed: T | None, decoupled: bool) -> tuple[T, T]:
    """Return (proximal, behaviour) log-probabilities.

    `inference` come from the servers, `recomputed` from the trainer at the start of the step. If `decoupled`,
    returns (recomputed, inference). Otherwise returns the recomputed ones twice, or the servers' if there are
    no recomputed ones. Raises ValueError if decoupled without recomputed ones.
    """
    if recomputed is None:
        if decoupled:
            raise ValueError("the decoupled loss needs recomputed log-probabilities")
        return inference, inference
    return recomputed, inference if decoupled else recomputed


def compute_weights(
    prox_T: torch.Tensor, behav_T: torch.Tensor, mask_T: torch.Tensor, cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of tokens, and whether each token is dropped.

    A token whose weight is above the cap has weight 0: it is dropped, not clamped, as in AReaL. Raises
    ValueError for a cap of 1 or less.
    """
    if cap is not None and cap <= 1:
        raise ValueError(f"behav_imp_weight_cap must be above 1, got {cap}")
    # masked before exp: no overflow at tokens that don't count
    weight_T = torch.where(mask_T, prox_T - behav_T, torch.zeros_like(prox_T)).exp()
    if cap is None:
        return weight_T, torch.zeros_like(mask_T)
    dropped_T = weight_T > cap
    return weight_T.masked_fill(dropped_T, 0.0), dropped_T
