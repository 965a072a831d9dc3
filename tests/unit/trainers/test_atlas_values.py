"""`--preset atlas` gives ATLAS's own numbers on-policy: advantages, the KL estimate, the token loss and its
reduction.
"""

import pytest
import torch

from hpc_rl.algorithms import grpo
from hpc_rl.algorithms.base import RewardBatch, TokenBatch
from hpc_rl.algorithms.normalization import number_groups
from hpc_rl.config.load.load import load
from hpc_rl.config.options.training import PPOActorConfig
from hpc_rl.config.rules.check import check
from hpc_rl.trainers.grpo_recipe import make_levels

WORDS = [
    "experiment_name=e",
    "trial_name=t",
    "train_dataset.path=/d",
    "train_dataset.batch_size=4",
    "actor.path=/m",
]


@pytest.fixture
def actor() -> PPOActorConfig:
    return check(load([], [*WORDS, "learning_rate=1e-6"], presets=["atlas"]), files=False).config.actor


@pytest.mark.parametrize(
    ("rewards", "wanted"),
    [
        ([1.0, 0, 0, 1], [0.865875, -0.865875, -0.865875, 0.865875]),
        ([0.857143, 0.375, -1.0, 0.0], [1.014235, 0.402294, -1.342870, -0.073660]),
    ],
)
def test_advantages(actor, rewards, wanted):
    mask_BT = torch.tensor([[False, True, True]] * 4)
    how = {
        "reward_norm": make_levels(actor.reward_norm),
        "adv_norm": make_levels(actor.adv_norm),
        "discount": actor.discount,
    }
    batch = RewardBatch(torch.tensor(rewards), mask_BT, number_groups(len(rewards), 4))
    got_BT = grpo.compute_advantages(batch, gae_lambda=actor.gae_lambda, **how)
    torch.testing.assert_close(got_BT, torch.tensor(wanted)[:, None] * mask_BT, atol=1e-5, rtol=0)


def test_token_loss_and_kl(actor):
    logprobs_T, one = torch.tensor([-1.0]), torch.tensor([True])
    behav_T, advantage_T, ref_T = logprobs_T.clone(), torch.tensor([0.865875]), torch.tensor([-1.2])
    batch = TokenBatch(logprobs_T, behav_T, behav_T, advantage_T, one, torch.zeros(1), ref_T=ref_T)
    loss, sums = grpo.compute_policy_loss(batch, eps_clip=actor.eps_clip, beta=actor.beta)
    assert float(sums["kl_loss"]) == pytest.approx(0.0187308, abs=1e-6)
    assert float(loss) == pytest.approx(-0.865126, abs=1e-6)


def test_a_completion_counts_the_same_whatever_its_length(actor):
    assert [grpo.compute_token_weight(length, actor.loss_aggregation, 256) for length in (1, 4)] == [
        1.0,
        0.25,
    ]
    assert (actor.kl_ctl, actor.ppo_n_minibatches) == (0, 1)
