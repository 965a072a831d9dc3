"""M2PO: the tokens that the policy changed most since they were sampled are left out.

Zheng et al., "Prosperity before Collapse", arXiv 2510.01161: the second moment of log proximal / behaviour of
the remaining tokens is below a threshold. AReaL selects within micro-batches; this page selects within the
train batch, so the result does not depend on micro-batches. The loss is GRPO's.
"""

from dataclasses import dataclass

import torch

from hpc_rl.algorithms import grpo
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.rewards import compute_credit


@dataclass(frozen=True, kw_only=True)
class Options(grpo.Options):
    """The largest second moment."""

    m2_threshold: float | None = 0.04


def select_tokens(log_weight_N: torch.Tensor, options: Options) -> torch.Tensor:
    """Return which tokens stay, bool [N].

    The largest squares leave until the mean of the others is below the threshold; the smallest one always
    stays.
    """
    kept_N = torch.ones(len(log_weight_N), dtype=torch.bool)
    if options.m2_threshold is None or not len(log_weight_N):
        return kept_N
    square_N, order_N = log_weight_N.double().square().sort()
    mean_N = square_N.cumsum(0) / torch.arange(1, len(square_N) + 1)
    num_kept = max(1, int((mean_N < options.m2_threshold).sum()))
    kept_N[order_N[num_kept:]] = False
    return kept_N


M2PO = Algorithm(
    options=Options,
    compute_credit=compute_credit,
    select_tokens=select_tokens,
    compute_loss=grpo.compute_loss,
)
