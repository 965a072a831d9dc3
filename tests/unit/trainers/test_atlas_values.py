"""`--preset atlas` gives ATLAS's own numbers on-policy: advantages, the KL estimate, the token loss and its
reduction.
"""

import pytest
import torch

from hpc_rl.algorithms import grpo, kl
from hpc_rl.algorithms.normalization import number_groups
from hpc_rl.algorithms.token_batch import RewardBatch, TokenBatch
from hpc_rl.config.load.load import load
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.rules.check import check
from hpc_rl.trainers.algorithm_options import make_options
from hpc_rl.trainers.minibatches import compute_token_weight

WORDS = [
    "experiment_name=e",
    "trial_name=t",
    "train_dataset.path=/d",
    "train_dataset.batch_size=4",
    "actor.path=/m",
]


@pytest.fixture
def config() -> GRPOConfig:
    return check(load([], [*WORDS, "learning_rate=1e-6"], presets=["atlas"]), files=False).config


@pytest.mark.parametrize(
    ("rewards", "wanted"),
    [
        ([1.0, 0, 0, 1], [0.865875, -0.865875, -0.865875, 0.865875]),
        ([0.857143, 0.375, -1.0, 0.0], [1.014235, 0.402294, -1.342870, -0.073660]),
    ],
)
def test_credit(config, rewards, wanted):
    mask_BT = torch.tensor([[False, True, True]] * 4)
    batch = RewardBatch(torch.tensor(rewards), mask_BT, number_groups(len(rewards), 4))
    got_BT = grpo.compute_credit(batch, make_options(grpo.GRPO, config))
    torch.testing.assert_close(got_BT, torch.tensor(wanted)[:, None] * mask_BT, atol=1e-5, rtol=0)


def test_token_loss_and_kl(config):
    logprobs_T, one = torch.tensor([-1.0]), torch.tensor([True])
    behav_T, advantage_T, ref_T = logprobs_T.clone(), torch.tensor([0.865875]), torch.tensor([-1.2])
    batch = TokenBatch(logprobs_T, behav_T, behav_T, advantage_T, one, torch.zeros(1), ref_T=ref_T)
    loss = grpo.compute_loss(batch, make_options(grpo.GRPO, config)).components_T["rl"]
    term, sums = kl.compute_reference_loss(batch, config.actor.beta)
    assert float(sums["kl_loss"]) == pytest.approx(0.0187308, abs=1e-6)
    assert float(loss + term) == pytest.approx(-0.865126, abs=1e-6)


def test_a_completion_counts_the_same_whatever_its_length(config):
    assert [compute_token_weight(length, config.actor.loss_aggregation, 256) for length in (1, 4)] == [
        1.0,
        0.25,
    ]
    assert (config.actor.kl_ctl, config.actor.ppo_n_minibatches) == (0, 1)
