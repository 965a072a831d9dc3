"""The composition: rewards to advantages, which log-probabilities are whose, and what is reported."""

import pytest
import torch

from hpc_rl.algorithms import grpo
from hpc_rl.algorithms.base import RewardBatch, TokenBatch
from hpc_rl.algorithms.normalization import Levels, consecutive_groups

MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 0]]).bool()


def test_group_normalized_reward_at_every_token_of_the_trajectory() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    batch = RewardBatch(rewards, MASK, consecutive_groups(4, 2))
    got = grpo.advantages(batch, reward_norm=Levels("group", "group"))
    unit = 0.5 / (0.5 + 1e-5)
    torch.testing.assert_close(
        got, torch.tensor([[0, unit, unit, 0], [0, -unit, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    )


def test_bias_scaling_and_clip_come_before_the_normalization() -> None:
    got = grpo.advantages(
        RewardBatch(torch.tensor([0.0, 9.0]), MASK[:2], consecutive_groups(2, 2)),
        reward_bias=-1.0,
        reward_scaling=2.0,
        reward_clip=4.0,
        reward_norm=Levels("batch", None),
    )
    assert got.tolist() == [[0, -3, -3, 0], [0, 3, 0, 0]]  # shaped to -2 and 4


def test_advantage_norm_counts_tokens_not_rows() -> None:
    batch = RewardBatch(torch.tensor([3.0, 0.0]), MASK[:2], consecutive_groups(2, 2))
    got = grpo.advantages(batch, adv_norm=Levels("batch", None))
    assert got.tolist() == [[0, 1, 1, 0], [0, -2, 0, 0]]


def test_reference_logprobs() -> None:
    servers, ours = [1.0], [2.0]
    assert grpo.reference_logprobs(servers, None, decoupled=False) == (servers, servers)
    assert grpo.reference_logprobs(servers, ours, decoupled=False) == (ours, ours)
    assert grpo.reference_logprobs(servers, ours, decoupled=True) == (ours, servers)
    with pytest.raises(ValueError, match="recomputed"):
        grpo.reference_logprobs(servers, None, decoupled=True)


def test_policy_loss_reports_sums_over_masked_tokens() -> None:
    logp = torch.tensor([0.0, 1.0, -3.0], requires_grad=True)
    behav = torch.tensor([0.0, 0.0, 9.0])
    mask = torch.tensor([True, True, False])
    advantages, entropy = torch.tensor([1.0, 1.0, 5.0]), torch.tensor([0.5, 0.25, 7.0])
    loss, sums = grpo.policy_loss(TokenBatch(logp, behav, behav, advantages, mask, entropy))
    assert loss.item() == pytest.approx(-1.0 - 1.2)
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(
        {
            "num_tokens": 2,
            "entropy": 0.75,
            "clip_ratio": 1,
            "dual_clip_ratio": 0,
            "importance_weight": 1 + 2.7182817,
            "behave_imp_weight": 2,
            "behave_dropped": 0,
            "behave_approx_kl": -1,
        }
    )
