"""GRPO (and PPO without a critic) on one page: rewards -> credit; log-probabilities -> loss.

    options = Options(reward_norm=Levels("group", "group"), eps_clip=0.2)
    credit_BT = compute_credit(RewardBatch(rewards_B, mask_BT, group_B), options)
    loss = compute_loss(TokenBatch(logprobs_T, prox_T, behav_T, credit_T, mask_T, entropy_T), options)

GRPO: Shao et al., "DeepSeekMath", arXiv 2402.03300. With other numbers the same functions are DAPO (higher
upper clip, dynamic sampling, overlong penalty; Yu et al., arXiv 2503.14476) and Dr.GRPO (no deviation,
constant divisor; Liu et al., arXiv 2503.20783).
"""

from dataclasses import dataclass

import torch

from hpc_rl.algorithms import token_batch
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.rewards import compute_credit
from hpc_rl.algorithms.token_batch import Loss, TokenBatch


@dataclass(frozen=True, kw_only=True)
class Options(token_batch.Options):
    """The clip ranges."""

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None


def compute_loss(tokens: TokenBatch, options: Options) -> Loss:
    """Return PPO's clipped loss around the proximal policy.

    -min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_higher) A) with r = current / proximal (Schulman et al.,
    arXiv 1707.06347, equation 7); for A < 0 bounded by -c_clip A (dual clip, Ye et al., arXiv 1912.09729).
    Raises ValueError for a `c_clip` of 1 or less.
    """
    if options.c_clip is not None and options.c_clip <= 1:
        raise ValueError(f"actor.c_clip must be above 1, got {options.c_clip}")
    # masked before exp: no overflow at tokens that don't count
    ratio_T = tokens.mask_tokens(tokens.logprobs_T - tokens.prox_T).exp()
    return clip_ratio(ratio_T, tokens.credit_T, tokens, options)


def clip_ratio(ratio_T: torch.Tensor, credit_T: torch.Tensor, tokens: TokenBatch, options: Options) -> Loss:
    """Return the clipped loss for a given ratio and credit of each token."""
    upper = 1 + (options.eps_clip if options.eps_clip_higher is None else options.eps_clip_higher)
    plain_T = -credit_T * ratio_T
    bounded_T = -credit_T * ratio_T.clamp(1 - options.eps_clip, upper)
    loss_T = torch.maximum(plain_T, bounded_T)
    clipped_T = plain_T < bounded_T
    dual_clipped_T = torch.zeros_like(tokens.mask_T)
    if options.c_clip is not None:
        dual_T = credit_T.sign() * options.c_clip * credit_T
        dual_clipped_T = dual_T < loss_T
        loss_T = torch.minimum(loss_T, dual_T)
    sums = {
        "clip_ratio": tokens.mask_tokens(clipped_T).sum(),
        "dual_clip_ratio": tokens.mask_tokens(dual_clipped_T).sum(),
        "importance_weight": tokens.mask_tokens(ratio_T).detach().sum(),
    }
    return Loss({"rl": tokens.mask_tokens(loss_T)}, sums)


GRPO = Algorithm(options=Options, compute_credit=compute_credit, compute_loss=compute_loss)
