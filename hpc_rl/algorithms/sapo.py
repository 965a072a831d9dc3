"""SAPO: a smooth gate on the ratio in place of the clip.

Gao et al., "Soft Adaptive Policy Optimization", arXiv 2511.20347.
"""

from dataclasses import dataclass

import torch

from hpc_rl.algorithms import token_batch
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.rewards import compute_credit
from hpc_rl.algorithms.token_batch import Loss, TokenBatch


@dataclass(frozen=True, kw_only=True)
class Options(token_batch.Options):
    """The temperatures of the gate, for positive and for negative credit."""

    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05


def compute_loss(tokens: TokenBatch, options: Options) -> Loss:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A, with r = current / proximal and tau by the sign of A.

    At r = 1 the gradient is the one of -r A.
    """
    ratio_T = tokens.mask_tokens(tokens.logprobs_T - tokens.prox_T).exp()
    tau_T = torch.full_like(ratio_T, options.sapo_tau_neg).masked_fill(
        tokens.credit_T > 0, options.sapo_tau_pos
    )
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1))
    sums = {"importance_weight": tokens.mask_tokens(ratio_T).detach().sum()}
    return Loss({"rl": tokens.mask_tokens(-gate_T * tokens.credit_T)}, sums)


SAPO = Algorithm(options=Options, compute_credit=compute_credit, compute_loss=compute_loss)
