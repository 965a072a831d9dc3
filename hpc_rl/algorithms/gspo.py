"""GSPO: one ratio for a whole sequence.

Zheng et al., "Group Sequence Policy Optimization", arXiv 2507.18071.
s = exp(mean over the sequence of log current - log proximal), equation 7. `GSPO` clips s, equation 5; its
tokens share the mean of their credit, as in AReaL. `GSPO_TOKEN` is the variant of section 4.3, equations 13
and 14: s has the gradient of each token, and each token has its own credit. Both have the same gradient if
the credit is the same for all tokens of a sequence.
"""

import torch

from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.grpo import Options, clip_ratio
from hpc_rl.algorithms.rewards import compute_credit
from hpc_rl.algorithms.token_batch import Loss, TokenBatch


def compute_loss(tokens: TokenBatch, options: Options) -> Loss:
    """Return the clipped loss of the ratio of sequences."""
    ratio_T = _compute_sequence_ratio(tokens)
    return clip_ratio(ratio_T, tokens.average_rows(tokens.credit_T), tokens, options)


def compute_token_loss(tokens: TokenBatch, options: Options) -> Loss:
    """Return the clipped loss of the ratio of sequences with the gradient of tokens."""
    own_T = tokens.mask_tokens(tokens.logprobs_T)
    ratio_T = _compute_sequence_ratio(tokens).detach() * (own_T - own_T.detach()).exp()
    return clip_ratio(ratio_T, tokens.credit_T, tokens, options)


def _compute_sequence_ratio(tokens: TokenBatch) -> torch.Tensor:
    return tokens.average_rows(tokens.logprobs_T - tokens.prox_T).exp()


GSPO = Algorithm(options=Options, compute_credit=compute_credit, compute_loss=compute_loss)
GSPO_TOKEN = Algorithm(options=Options, compute_credit=compute_credit, compute_loss=compute_token_loss)
