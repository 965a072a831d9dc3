"""On-policy distillation on one page: a teacher's log-probabilities -> credit -> GRPO's loss.

The policy samples, and a teacher gives the log-probabilities of the sampled tokens. Each token's credit is
log teacher - log policy, whose mean is the negative reverse divergence -KL(policy || teacher) at this token
(Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649; as a credit: Thinking
Machines, "On-Policy Distillation"). Rewards may be added: the joint objective of KDRL (Xu et al., arXiv
2506.02208).

The teacher of self-distillation is the policy itself with a demonstration in its prompt (Shenfeld et al.,
arXiv 2601.19897). The computation is the same.
"""

from dataclasses import dataclass

import torch

from hpc_rl.algorithms import grpo, rewards
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.base import Loss, RewardBatch, TokenBatch


@dataclass(frozen=True, kw_only=True)
class Options(grpo.Options):
    """The clip ranges, and the weights of the two credits; options of section `distillation`."""

    rl_loss_weight: float = 0.0
    distill_loss_weight: float = 1.0


def keep_groups(batch: RewardBatch, options: Options) -> list[int]:
    """Return all rows: a teacher has something to say where rewards are equal."""
    return list(range(len(batch.rewards_B)))


def compute_credit(batch: RewardBatch, options: Options) -> torch.Tensor:
    """Return rl_loss_weight * A + distill_loss_weight * (log teacher - log policy), float32 [B, T].

    A is GRPO's credit. The policy is the one at the start of the step. Both terms are constants: the gradient
    comes from the ratio of the loss alone.
    """
    assert batch.teacher_BT is not None and batch.logprobs_BT is not None, "needs a teacher"
    gap_BT = torch.where(batch.mask_BT, batch.teacher_BT - batch.logprobs_BT, 0.0)
    credit_BT = options.distill_loss_weight * gap_BT
    if options.rl_loss_weight:
        credit_BT = credit_BT + options.rl_loss_weight * rewards.compute_credit(batch, options)
    return credit_BT


def compute_loss(tokens: TokenBatch, options: Options) -> Loss:
    """Return GRPO's loss, and the divergence KL(policy || teacher) as a sum to report."""
    assert tokens.teacher_T is not None, "needs a teacher"
    loss = grpo.compute_loss(tokens, options)
    divergence_T = tokens.mask_tokens(tokens.logprobs_T.detach() - tokens.teacher_T)
    return Loss(loss.components_T, {**loss.sums, "teacher_kl": divergence_T.sum()})


OPD = Algorithm(
    options=Options,
    needs=frozenset({"distillation"}),
    select_groups=keep_groups,
    compute_credit=compute_credit,
    compute_loss=compute_loss,
)
