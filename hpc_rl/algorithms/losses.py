"""Losses: the clipped policy gradient (dual clip, decoupled behaviour weight), the supervised, that of pairs.

They return *sums*: the caller divides by a weight counted over the whole train batch, so that a loss does not
depend on how the batch was cut. An empty micro-batch is a valid input.
"""

from typing import NamedTuple

import torch


class TokenLoss(NamedTuple):
    """The policy loss of each token and its parts, all [T]; 0 or false outside of the mask."""

    loss_T: torch.Tensor  # with gradient
    ratio_T: torch.Tensor  # current over proximal policy
    weight_T: torch.Tensor  # proximal over behaviour policy, 0 where it was above the cap
    clipped_T: torch.Tensor
    dual_clipped_T: torch.Tensor
    dropped_T: torch.Tensor  # above the cap


def policy_token_loss(
    logprobs_T: torch.Tensor,
    prox_T: torch.Tensor,
    behav_T: torch.Tensor,
    advantages_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    behav_imp_weight_cap: float | None = None,
) -> TokenLoss:
    """Return PPO's clipped loss around the proximal policy, weighed by proximal over behaviour policy.

    -min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_higher) A) with r = current / proximal (Schulman et al.,
    arXiv 1707.06347, equation 7); for A < 0 bounded by -c_clip A (dual clip, Ye et al., arXiv 1912.09729);
    times proximal / behaviour (Hilton et al., arXiv 2110.00641). A token whose behaviour weight is above the
    cap has weight 0: it is dropped, not clamped. Raises ValueError for a `c_clip` or cap of 1 or less.
    """
    for name, bound in (("c_clip", c_clip), ("behav_imp_weight_cap", behav_imp_weight_cap)):
        if bound is not None and bound <= 1:
            raise ValueError(f"{name} must be above 1, got {bound}")
    zero = torch.zeros((), device=logprobs_T.device)
    # masked before exp: no overflow at tokens that don't count
    ratio_T = torch.where(mask_T, logprobs_T - prox_T, zero).exp()
    upper = 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher)
    plain_T = -advantages_T * ratio_T
    bounded_T = -advantages_T * ratio_T.clamp(1 - eps_clip, upper)
    loss_T = torch.maximum(plain_T, bounded_T)
    clipped_T = plain_T < bounded_T
    dual_clipped_T = torch.zeros_like(mask_T)
    if c_clip is not None:
        dual_T = advantages_T.sign() * c_clip * advantages_T
        dual_clipped_T = dual_T < loss_T
        loss_T = torch.minimum(loss_T, dual_T)
    weight_T = torch.where(mask_T, prox_T - behav_T, zero).exp()
    dropped_T = torch.zeros_like(mask_T)
    if behav_imp_weight_cap is not None:
        dropped_T = weight_T > behav_imp_weight_cap
        weight_T = torch.where(dropped_T, zero, weight_T)
    loss_T = loss_T * weight_T
    values = (loss_T, ratio_T, weight_T, clipped_T, dual_clipped_T, dropped_T)
    return TokenLoss._make(torch.where(mask_T, x, torch.zeros_like(x)) for x in values)


def token_sums(
    token: TokenLoss, entropy_T: torch.Tensor, behav_kl_T: torch.Tensor, mask_T: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return sums over the masked tokens, which a training log divides by `num_tokens`."""
    return {
        "num_tokens": mask_T.sum(),
        "entropy": torch.where(mask_T, entropy_T, torch.zeros_like(entropy_T)).sum(),
        "clip_ratio": token.clipped_T.sum(),
        "dual_clip_ratio": token.dual_clipped_T.sum(),
        "importance_weight": token.ratio_T.detach().sum(),
        "behave_imp_weight": token.weight_T.sum(),
        "behave_dropped": token.dropped_T.sum(),
        "behave_approx_kl": torch.where(mask_T, behav_kl_T, torch.zeros_like(behav_kl_T)).sum(),
    }


def supervised_loss(
    logprobs_T: torch.Tensor, mask_T: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the negative log-likelihood over the masked tokens, and their number."""
    return -torch.where(mask_T, logprobs_T, torch.zeros_like(logprobs_T)).sum(), {"num_tokens": mask_T.sum()}


def pairwise_loss(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of -log sigmoid(chosen - rejected) over pairs of scores, float32 [P].

    Also reports how many pairs are in order, and the sum of their margins. Bradley and Terry, "Rank Analysis
    of Incomplete Block Designs", 1952; as a loss of reward models in Ouyang et al., arXiv 2203.02155,
    equation 1.
    """
    margin_P = chosen_P - rejected_P
    sums = {"num_correct": (margin_P > 0).sum(), "margin": margin_P.detach().sum()}
    return -torch.nn.functional.logsigmoid(margin_P).sum(), sums
