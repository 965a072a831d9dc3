"""The two KL terms by hand."""

import math

import pytest
import torch

from hpc_rl.algorithms.kl import compute_kl_rewards, compute_reference_loss, estimate_kl
from hpc_rl.algorithms.normalization import Levels
from hpc_rl.algorithms.rewards import compute_credit
from hpc_rl.algorithms.token_batch import Options, RewardBatch, TokenBatch


def test_k1_is_a_reward_at_each_token_and_flows_back_through_the_credit() -> None:
    mask = torch.tensor([[False, True, True]])
    behav, ref = torch.tensor([[9.0, -1.0, -2.0]]), torch.tensor([[0.0, -1.5, -1.0]])
    rewards = compute_kl_rewards(behav, ref, mask, Options(kl_ctl=0.1))
    torch.testing.assert_close(
        rewards, torch.tensor([[0.0, -0.05, 0.1]])
    )  # more probable than the reference costs
    batch = RewardBatch(torch.tensor([1.0]), mask, torch.tensor([0]), token_rewards_BT=rewards)
    got = compute_credit(batch, Options(discount=0.5))
    torch.testing.assert_close(got, torch.tensor([[0.0, -0.05 + 0.5 * 1.1, 1.1]]))


def test_the_kl_reward_is_not_clipped_or_normalized_with_the_task_reward() -> None:
    mask = torch.tensor([[True], [True]])
    more = torch.tensor([[100.0], [0.0]])
    batch = RewardBatch(torch.tensor([3.0, 1.0]), mask, torch.tensor([0, 0]), token_rewards_BT=more)
    got = compute_credit(batch, Options(reward_norm=Levels("group", None)))
    assert got.tolist() == [[101.0], [-1.0]]


def test_k3_by_hand_with_its_gradient() -> None:
    logp = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    ref = torch.tensor([-1.5, -2.0, 900.0])
    mask = torch.tensor([True, True, False])
    values = estimate_kl(logp, ref, mask, "k3")
    torch.testing.assert_close(values.detach(), torch.tensor([math.exp(-0.5) + 0.5 - 1, 0.0, 0.0]))
    values.sum().backward()
    assert logp.grad.tolist() == pytest.approx([1 - math.exp(-0.5), 0.0, 0.0])  # pulls toward the reference


def test_beta_scales_k3_in_the_loss_and_the_report_is_without_beta() -> None:
    logp = torch.tensor([-1.0, -1.0])
    ref, mask, zero = torch.tensor([-1.5, -1.5]), torch.tensor([True, False]), torch.zeros(2)
    batch = TokenBatch(logp, logp, logp, torch.tensor([2.0, 2.0]), mask, zero, ref_T=ref)
    loss_T, sums = compute_reference_loss(batch, 0.25)
    kl = math.exp(-0.5) + 0.5 - 1
    assert loss_T.tolist() == pytest.approx([0.25 * kl, 0.0])
    assert sums["kl_loss"].item() == pytest.approx(kl)
