"""On-policy distillation on one page: a teacher's log-probabilities -> credit -> GRPO's loss.

The policy samples, and a teacher gives the log-probabilities of the sampled tokens. Each token's credit is
log teacher - log policy, whose mean is the negative reverse divergence -KL(policy || teacher) at this token
(Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649; as a credit: Thinking
Machines, "On-Policy Distillation"). Rewards may be added: the joint objective of KDRL (Xu et al., arXiv
2506.02208).

With `top_k`, the teacher teaches by the forward divergence KL(teacher || policy) over its most probable
tokens instead: a term of the loss, whose gradient reaches all of them, and not the sampled token alone. The
other tokens count as one class.

The teacher of self-distillation is the policy itself with a demonstration in its prompt (Shenfeld et al.,
arXiv 2601.19897). The computation is the same.
"""

from dataclasses import dataclass

import torch

from hpc_rl.algorithms import grpo, rewards
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.token_batch import Loss, RewardBatch, TokenBatch

SMALLEST_REST = 1e-6  # of the policy's probability of all other tokens: its logarithm must be finite


@dataclass(frozen=True, kw_only=True)
class Options(grpo.Options):
    """The clip ranges, and the weights of the two credits; options of section `distillation`."""

    rl_loss_weight: float = 0.0
    distill_loss_weight: float = 1.0
    top_k: int = 0


def keep_groups(batch: RewardBatch, options: Options) -> list[int]:
    """Return all rows: a teacher has something to say where rewards are equal."""
    return list(range(len(batch.rewards_B)))


def compute_credit(batch: RewardBatch, options: Options) -> torch.Tensor:
    """Return rl_loss_weight * A + distill_loss_weight * (log teacher - log policy), float32 [B, T].

    A is GRPO's credit. The policy is the one at the start of the step. Both terms are constants: the gradient
    comes from the ratio of the loss alone. With `top_k` the second term is in the loss.
    """
    assert batch.teacher_BT is not None and batch.logprobs_BT is not None, "needs a teacher"
    gap_BT = torch.where(batch.mask_BT, batch.teacher_BT - batch.logprobs_BT, 0.0)
    credit_BT = (0.0 if options.top_k else options.distill_loss_weight) * gap_BT
    if options.rl_loss_weight:
        credit_BT = credit_BT + options.rl_loss_weight * rewards.compute_credit(batch, options)
    return credit_BT


def compute_loss(tokens: TokenBatch, options: Options) -> Loss:
    """Return GRPO's loss, with `top_k` the forward divergence, and both divergences as sums to report."""
    assert tokens.teacher_T is not None, "needs a teacher"
    loss = grpo.compute_loss(tokens, options)
    divergence_T = tokens.mask_tokens(tokens.logprobs_T.detach() - tokens.teacher_T)
    components_T, sums = dict(loss.components_T), {**loss.sums, "teacher_kl": divergence_T.sum()}
    if options.top_k:
        assert tokens.teacher_top_TK is not None and tokens.policy_top_TK is not None, "needs likely tokens"
        forward_T = tokens.mask_tokens(compute_forward_kl(tokens.teacher_top_TK, tokens.policy_top_TK))
        components_T["ref_kl"] = options.distill_loss_weight * forward_T
        sums["teacher_forward_kl"] = forward_T.detach().sum()
    return Loss(components_T, sums)


def compute_forward_kl(teacher_TK: torch.Tensor, policy_TK: torch.Tensor) -> torch.Tensor:
    """Return KL(teacher || policy) of each position over K tokens and the class of all others, float32 [T].

    The arguments are log-probabilities of the K tokens. A teacher's -inf stands for no token.
    """
    is_token_TK = teacher_TK > -torch.inf
    share_TK = teacher_TK.exp()
    gap_TK = (teacher_TK - policy_TK).masked_fill(~is_token_TK, 0.0)
    rest_T = (1 - share_TK.sum(1)).clamp(min=0)
    policy_rest_T = (1 - policy_TK.exp().masked_fill(~is_token_TK, 0.0).sum(1)).clamp(min=SMALLEST_REST)
    return (share_TK * gap_TK).sum(1) + torch.xlogy(rest_T, rest_T) - rest_T * policy_rest_T.log()


OPD = Algorithm(
    options=Options,
    needs=frozenset({"distillation"}),
    select_groups=keep_groups,
    compute_credit=compute_credit,
    compute_loss=compute_loss,
)
