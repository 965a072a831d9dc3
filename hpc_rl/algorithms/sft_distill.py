"""Distillation on the teacher's samples, on one page: cross-entropy on the tokens that a teacher sampled.

Kim and Rush, "Sequence-Level Knowledge Distillation", arXiv 1606.07947, section 3.2, with samples in place of
the beam.
"""

import torch

from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.opd import keep_groups
from hpc_rl.algorithms.token_batch import Loss, Options, RewardBatch, TokenBatch


def compute_credit(batch: RewardBatch, options: Options) -> torch.Tensor:
    """Return 1 for each sampled token, float32 [B, T]: all count alike, whatever their reward."""
    return batch.mask_BT.float()


def compute_loss(tokens: TokenBatch, options: Options) -> Loss:
    """Return the cross-entropy -log policy of each token. A credit of 0 leaves a token out."""
    return Loss({"ce": tokens.mask_tokens(-tokens.logprobs_T * tokens.credit_T)}, {})


SFT_DISTILL = Algorithm(
    needs=frozenset({"distillation"}),
    select_groups=keep_groups,
    compute_credit=compute_credit,
    compute_loss=compute_loss,
)
