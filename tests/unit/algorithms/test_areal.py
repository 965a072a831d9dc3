"""`compat: areal` against AReaL's steps written out literally: padded, and shifted by one to the left."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rl.algorithms import areal
from hpc_rl.algorithms.grpo import Options
from hpc_rl.algorithms.normalization import Levels
from hpc_rl.algorithms.token_batch import RewardBatch


def literal(rewards, mask, lengths, old, ref, kl_ctl, discount, lam, no_eos_zero, clip) -> torch.Tensor:
    """Steps 2 to 5 as they are described, with the result moved back to the tokens themselves."""
    num_rows, width = mask.shape
    mask, old, ref = (torch.roll(x, -1, dims=-1) for x in (mask.float(), old, ref))
    old, ref = old * mask, ref * mask
    shaped = rewards.clamp(-clip, clip)
    per_token = -kl_ctl * (old - ref)
    advantages = torch.zeros(num_rows, width)
    for i in range(num_rows):
        length = int(lengths[i])
        per_token[i, length - 1] = 0
        per_token[i, max(length - 2, 0)] += 0 if no_eos_zero and length == width else shaped[i]
        carry = 0.0
        for t in reversed(range(width - 1)):
            carry = float(per_token[i, t]) + discount * lam * carry
            advantages[i, t] = carry
    return torch.roll(advantages * mask, 1, dims=-1)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.9, 1.0]),
    st.booleans(),
)
def test_advantages_equal_the_written_out_steps(num_rows, seed, kl_ctl, discount, no_eos_zero) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 12, (num_rows,), generator=generator)
    width = int(lengths.max())
    inside = torch.arange(width) < lengths[:, None]
    drawn = torch.rand(num_rows, width, generator=generator) < 0.6  # turns with gaps
    mask = drawn & inside & (torch.arange(width) > 0)
    old, ref = (torch.randn(num_rows, width, generator=generator) * mask for _ in range(2))
    rewards = torch.randn(num_rows, generator=generator) * 3
    want = literal(rewards, mask, lengths, old, ref, kl_ctl, discount, 0.95, no_eos_zero, 2.0)
    options = Options(
        reward_clip=2.0,
        discount=discount,
        gae_lambda=0.95,
        mask_no_eos_with_zero=no_eos_zero,
        kl_ctl=kl_ctl,
    )
    token_rewards = areal.compute_kl_rewards(old, ref, mask, options)
    batch = RewardBatch(rewards, mask, lengths_B=lengths, token_rewards_BT=token_rewards)
    got = areal.compute_credit(batch, options)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_overlong_vector() -> None:
    mask_BT = torch.arange(24) < torch.tensor([10, 16, 20, 24])[:, None]
    options = Options(
        overlong_reward_penalty=True, overlong_tokens=8, overlong_penalty_factor=1.0, max_new_tokens=20
    )
    added = areal.penalize_lengths(RewardBatch(torch.ones(4), mask_BT), options)
    assert (1 + added).tolist() == [1.0, 0.5, 0.0, -0.5]


def test_remainder_rows_are_scaled_by_a_hundred_thousand() -> None:
    mask = torch.tensor([[False, True]] * 3)
    lengths = torch.full((3,), 2)
    batch = RewardBatch(torch.tensor([0.0, 1.0, 1.0]), mask, lengths_B=lengths, group_size=2)
    got = areal.compute_credit(batch, Options(reward_norm=Levels("group", "group")))
    assert got[:, 1].tolist() == pytest.approx([-0.99998, 0.99998, 1e5], rel=1e-5)


def test_dynamic_sampling_keeps_all_if_none_is_left_or_whole() -> None:
    def kept(*rewards: float) -> list[int]:
        batch = RewardBatch(torch.tensor(rewards), torch.ones(len(rewards), 1).bool(), group_size=2)
        return areal.select_rows(batch, Options(dynamic_sampling=True))

    assert kept(1.0, 0.0, 1.0, 1.0) == [0, 1]
    assert kept(0.0, 0.0, 1.0, 1.0) == [0, 1, 2, 3]
    assert kept(1.0, 1.0, 0.0) == [0, 1, 2]
