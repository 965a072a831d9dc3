"""Rewards to credit: hand-worked rows, and the blocked recursion against the plain one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rl.algorithms.rewards import (
    compute_gae,
    penalize_lengths,
    place_rewards,
    select_informative_rows,
    shape_rewards,
)
from hpc_rl.algorithms.token_batch import Options, RewardBatch


def plain_gae(rewards, mask, discount, gae_lambda) -> torch.Tensor:
    """Token by token, from the end, over the masked tokens only."""
    out = torch.zeros(rewards.shape)
    for row in range(len(rewards)):
        carry = 0.0
        for t in reversed(range(rewards.shape[1])):
            if not mask[row, t]:
                continue
            carry = float(rewards[row, t]) + discount * gae_lambda * carry
            out[row, t] = carry
    return out


def test_shape_rewards_adds_scales_then_clips() -> None:
    rewards = torch.tensor([0.0, 1.0, 4.0])
    assert shape_rewards(rewards, bias=-0.5, scaling=10.0, clip=20.0).tolist() == [-5.0, 5.0, 20.0]
    assert rewards.tolist() == [0.0, 1.0, 4.0]


def test_overlong_penalty_is_bounded_below() -> None:
    mask_BT = torch.arange(24) < torch.tensor([10, 16, 20, 24])[:, None]
    options = Options(
        overlong_reward_penalty=True, overlong_tokens=8, overlong_penalty_factor=1.0, max_new_tokens=20
    )
    added = penalize_lengths(RewardBatch(torch.ones(4), mask_BT), options)
    assert (1.0 + added).tolist() == [1.0, 0.5, 0.0, 0.0]


def test_groups_of_equal_rewards_are_uninformative() -> None:
    rewards, group_B = torch.tensor([1.0, 1, 0, 1, 0, 0]), torch.tensor([0, 0, 1, 1, 2, 2])
    batch = RewardBatch(rewards, torch.ones(6, 1).bool(), group_B)
    assert select_informative_rows(batch, Options(dynamic_sampling=True)) == [2, 3]
    assert select_informative_rows(batch, Options()) == [0, 1, 2, 3, 4, 5]


def test_reward_goes_to_the_last_masked_token_of_a_row() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()
    assert place_rewards(torch.tensor([2.0, 3.0, 5.0]), mask).tolist() == [
        [0, 0, 2, 0],
        [0, 0, 0, 3],
        [0, 0, 0, 0],
    ]


def test_gae_by_hand_skips_tokens_that_the_model_did_not_make() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 1]]).bool()
    rewards = torch.tensor([[9.0, 0.0, 9.0, 0.0, 8.0]])
    # three tokens are left: 8 at the last, a half of it before, a half of that before
    assert compute_gae(rewards, mask, discount=0.5, gae_lambda=1.0).tolist() == [[0.0, 2.0, 0.0, 4.0, 8.0]]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 400),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 99),
)
def test_blocked_gae_equals_the_plain_recursion(rows, width, discount, gae_lambda, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    want = plain_gae(rewards, mask, discount, gae_lambda)
    torch.testing.assert_close(compute_gae(rewards, mask, discount, gae_lambda), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_batches_pass_through(shape) -> None:
    mask = torch.zeros(shape).bool()
    assert compute_gae(place_rewards(torch.zeros(shape[0]), mask), mask).shape == shape


def test_gae_with_values_by_hand() -> None:
    """Discount 0.5, lambda 0.5: d = [0 + 0.5*4 - 2, 1 + 0.5*6 - 4, 8 - 6] = [0, 0, 2]."""
    mask = torch.tensor([[0, 1, 0, 1, 1]]).bool()
    rewards = torch.tensor([[9.0, 0.0, 9.0, 1.0, 8.0]])
    values = torch.tensor([[7.0, 2.0, 7.0, 4.0, 6.0]])
    got = compute_gae(rewards, mask, 0.5, 0.5, values)
    assert got.tolist() == [[0, 0.125, 0, 0.5, 2.0]]
    zero = compute_gae(rewards, mask, 0.5, 0.5, torch.zeros_like(values))
    assert torch.equal(zero, compute_gae(rewards, mask, 0.5, 0.5))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.sampled_from(["random", "one run", "turns", "none"]),
    st.integers(0, 99),
)
def test_gae_with_values_equals_the_loop_over_columns(rows, width, kind, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(rows, width, generator=generator) for _ in range(2))
    position = torch.arange(width)
    mask = {
        "random": torch.rand(rows, width, generator=generator) < 0.6,
        "one run": position < torch.randint(0, width + 1, (rows, 1), generator=generator),
        "turns": (position // 7 % 2 == 0).expand(rows, width),
        "none": torch.zeros(rows, width).bool(),
    }[kind]
    want, advantage, value = torch.zeros(rows, width), torch.zeros(rows), torch.zeros(rows)
    for t in reversed(range(width)):
        is_step = mask[:, t]
        found = rewards[:, t] + 0.99 * value - values[:, t] + 0.99 * 0.95 * advantage
        advantage = torch.where(is_step, found, advantage)
        value = torch.where(is_step, values[:, t], value)
        want[:, t] = advantage * is_step
    torch.testing.assert_close(compute_gae(rewards, mask, 0.99, 0.95, values), want, atol=1e-4, rtol=1e-5)
