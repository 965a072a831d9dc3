"""On-policy distillation: credit by hand, the zero gradient of an equal teacher, and the joint objective."""

import math

import pytest
import torch

from hpc_rl.algorithms.normalization import Levels
from hpc_rl.algorithms.opd import OPD, Options, compute_forward_kl
from hpc_rl.algorithms.sft_distill import SFT_DISTILL
from hpc_rl.algorithms.token_batch import RewardBatch, TokenBatch

# four completions of up to three tokens, of two prompts
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [0, 1, 1]], dtype=torch.bool)
POLICY = torch.tensor([[-1.0, -2.0, -0.5], [-1.0, -1.0, 0.0], [-3.0, -0.1, -0.2], [0.0, -2.0, -4.0]])
TEACHER = torch.tensor([[-0.5, -2.5, -0.5], [-3.0, -0.5, 9.0], [-3.0, -0.1, -0.7], [9.0, -1.0, -6.0]])
GAP = torch.tensor([[0.5, -0.5, 0.0], [-2.0, 0.5, 0.0], [0.0, 0.0, -0.5], [0.0, 1.0, -2.0]])
REWARDS = torch.tensor([1.0, 0.0, 2.0, 2.0])  # of group 1 all alike


def make_batch(**changes) -> RewardBatch:
    return RewardBatch(
        rewards_B=REWARDS,
        masks=MASK,
        group_B=torch.tensor([0, 0, 1, 1]),
        teacher_BT=TEACHER,
        logprobs_BT=POLICY,
    )._replace(**changes)


def make_tokens(credit_BT: torch.Tensor, logprobs_BT: torch.Tensor, prox_BT: torch.Tensor) -> TokenBatch:
    flat = [one.flatten() for one in (logprobs_BT, prox_BT, prox_BT, credit_BT, MASK, torch.zeros(4, 3))]
    return TokenBatch(*flat, row_T=torch.arange(4).repeat_interleave(3), teacher_T=TEACHER.flatten())


def test_the_credit_is_the_teachers_surprise_at_each_token():
    assert torch.allclose(OPD.compute_credit(make_batch(), Options()), GAP)
    half = Options(distill_loss_weight=0.5)
    assert torch.allclose(OPD.compute_credit(make_batch(), half), 0.5 * GAP)
    # the reward is not asked for
    silent = make_batch(rewards_B=torch.full((4,), float("nan")))
    assert torch.allclose(OPD.compute_credit(silent, Options()), GAP)


def test_a_joint_credit_adds_the_one_of_the_rewards():
    options = Options(rl_loss_weight=1.0, distill_loss_weight=0.1, reward_norm=Levels("group", None))
    # rewards minus the mean of their group: 0.5, -0.5, 0, 0 at every token of the row
    of_rewards = torch.tensor([[0.5, 0.5, 0.5], [-0.5, -0.5, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert torch.allclose(OPD.compute_credit(make_batch(), options), of_rewards + 0.1 * GAP)
    # groups whose rewards are alike still learn from the teacher
    assert OPD.select_groups(make_batch(), Options(dynamic_sampling=True)) == [0, 1, 2, 3]


def test_a_teacher_that_is_the_policy_has_a_gradient_of_exactly_0():
    policy = POLICY.clone().requires_grad_()
    credit = OPD.compute_credit(make_batch(teacher_BT=POLICY), Options())
    loss = OPD.compute_loss(make_tokens(credit, policy, POLICY), Options())
    loss.components_T["rl"].sum().backward()
    assert policy.grad is not None and not policy.grad.any()


def test_the_gradient_is_the_one_of_the_reverse_divergence():
    """At ratio 1, d/d log pi of the loss is -(log teacher - log pi): the score-function gradient."""
    policy = POLICY.clone().requires_grad_()
    credit = OPD.compute_credit(make_batch(), Options())
    loss = OPD.compute_loss(make_tokens(credit, policy, POLICY), Options())
    loss.components_T["rl"].sum().backward()
    assert torch.allclose(policy.grad, -GAP)
    # the sum of log pi - log teacher over the ten tokens
    assert float(loss.sums["teacher_kl"]) == pytest.approx(3.0)


def test_the_expected_gradient_lowers_the_divergence_of_a_categorical_policy():
    """The exact mean over samples equals the gradient of KL(policy || teacher), by autograd."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.0], requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0, 0.5]), 0)
    policy = torch.log_softmax(logits, 0)
    divergence = (policy.exp() * (policy - teacher)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    credit = OPD.compute_credit(
        RewardBatch(torch.zeros(4), torch.ones(4, 1, dtype=torch.bool), teacher_BT=teacher[:, None],
                    logprobs_BT=policy.detach()[:, None]),
        Options(),
    )  # fmt: skip
    tokens = TokenBatch(
        policy, policy.detach(), policy.detach(), credit[:, 0], torch.ones(4, dtype=torch.bool), policy.detach(),
        teacher_T=teacher,
    )  # fmt: skip
    per_sample = OPD.compute_loss(tokens, Options()).components_T["rl"]
    (found,) = torch.autograd.grad((policy.detach().exp() * per_sample).sum(), logits)
    assert torch.allclose(found, expected, atol=1e-6)


def make_top_tokens(teacher: list[list[float]], policy: list[list[float]], **changes) -> TokenBatch:
    """Return one completion whose positions have these probabilities of the two likely tokens."""
    zeros = torch.zeros(len(teacher))
    tokens = TokenBatch(zeros, zeros, zeros, zeros, zeros == 0, zeros, teacher_T=zeros)
    of_policy = torch.tensor(policy).log().requires_grad_()
    return tokens._replace(teacher_top_TK=torch.tensor(teacher).log(), policy_top_TK=of_policy, **changes)


# 0.5 log 2 + 0.25 log 1 + 0.25 log 0.5; equal; 0.6 log 2 + 0.4 log(4/7): one token only;
# 0.9 log 9 + 0.1 log(1/9): nothing is left for others
TOP_TEACHER = [[0.5, 0.25], [0.7, 0.2], [0.6, 0.0], [0.9, 0.1]]
TOP_POLICY = [[0.25, 0.25], [0.7, 0.2], [0.3, 0.5], [0.1, 0.9]]
TOP_KL = [0.25 * math.log(2), 0.0, 0.6 * math.log(2) + 0.4 * math.log(4 / 7), 0.8 * math.log(9)]


def test_the_forward_divergence_counts_other_tokens_as_one_class():
    options = Options(top_k=2, distill_loss_weight=0.5)
    tokens = make_top_tokens(TOP_TEACHER, TOP_POLICY)
    loss = OPD.compute_loss(tokens, options)
    assert loss.components_T["ref_kl"].tolist() == pytest.approx([0.5 * one for one in TOP_KL], abs=1e-6)
    assert float(loss.sums["teacher_forward_kl"]) == pytest.approx(sum(TOP_KL), abs=1e-6)
    masked = make_top_tokens(TOP_TEACHER, TOP_POLICY, mask_T=torch.tensor([True, False, False, False]))
    assert OPD.compute_loss(masked, options).components_T["ref_kl"][1:].tolist() == [0, 0, 0]
    # the credit of the sampled token does not count as well
    assert not OPD.compute_credit(make_batch(), Options(top_k=2)).any()
    with_reward = Options(top_k=2, rl_loss_weight=1.0, reward_norm=Levels("group", None))
    assert OPD.compute_credit(make_batch(), with_reward)[0].tolist() == pytest.approx([0.5] * 3)


def test_the_gradient_of_the_forward_divergence_is_the_one_of_autograd():
    """Of logits over five tokens; it is 0 where the policy equals the teacher."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, generator=generator, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(4, 5, generator=generator), 1)
    top = teacher.topk(2)

    def join(logprobs: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of the two tokens, and of all others."""
        best = logprobs.exp().gather(1, top.indices)
        return torch.cat([best, 1 - best.sum(1, keepdim=True)], 1)

    policy = torch.log_softmax(logits, 1)
    want = (join(teacher) * (join(teacher).log() - join(policy).log())).sum()
    found = compute_forward_kl(top.values, policy.gather(1, top.indices)).sum()
    assert float(found.detach()) == pytest.approx(float(want.detach()), abs=1e-5)
    grads = [torch.autograd.grad(one, logits, retain_graph=True)[0] for one in (found, want)]
    assert torch.allclose(*grads, atol=1e-5)
    same = teacher.clone().requires_grad_()
    equal = compute_forward_kl(top.values, torch.log_softmax(same, 1).gather(1, top.indices)).sum()
    assert torch.allclose(torch.autograd.grad(equal, same)[0], torch.zeros(4, 5), atol=1e-6)


def test_samples_of_a_teacher_are_learned_by_cross_entropy():
    batch = RewardBatch(rewards_B=torch.zeros(4), masks=MASK)
    credit = SFT_DISTILL.compute_credit(batch, SFT_DISTILL.options())
    loss = SFT_DISTILL.compute_loss(make_tokens(credit, POLICY, POLICY), SFT_DISTILL.options())
    assert set(loss.components_T) == {"ce"}
    # 3.5 + 2 + 3.3 + 6
    assert float(loss.components_T["ce"].sum()) == pytest.approx(14.8)
