"""CISPO: the ratio is a clipped weight without gradient, so no token loses its gradient.

MiniMax, "MiniMax-M1", arXiv 2506.13585, equations 4 and 5.
"""

from dataclasses import dataclass

from hpc_rl.algorithms import token_batch
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.rewards import compute_credit
from hpc_rl.algorithms.token_batch import Loss, TokenBatch


@dataclass(frozen=True, kw_only=True)
class Options(token_batch.Options):
    """The bounds of the weight: 1 - eps_clip (1 means no lower bound) and 1 + eps_clip_higher."""

    eps_clip: float = 1.0
    eps_clip_higher: float | None = 4.0


def compute_loss(tokens: TokenBatch, options: Options) -> Loss:
    """Return -weight * credit * log current, with weight = clip(current / proximal) without gradient."""
    upper = 1 + (options.eps_clip if options.eps_clip_higher is None else options.eps_clip_higher)
    ratio_T = tokens.mask_tokens(tokens.logprobs_T.detach() - tokens.prox_T).exp()
    weight_T = ratio_T.clamp(1 - options.eps_clip, upper)
    loss_T = tokens.mask_tokens(-weight_T * tokens.credit_T * tokens.logprobs_T)
    sums = {
        "clip_ratio": tokens.mask_tokens(weight_T != ratio_T).sum(),
        "importance_weight": tokens.mask_tokens(ratio_T).sum(),
    }
    return Loss({"rl": loss_T}, sums)


CISPO = Algorithm(options=Options, compute_credit=compute_credit, compute_loss=compute_loss)
