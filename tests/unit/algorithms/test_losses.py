"""The policy loss against the vectors of the reference implementation and against hand-worked tokens."""

import math

import pytest
import torch

from hpc_rl.algorithms.losses import pairwise_loss, policy_token_loss, supervised_loss

LOGP = torch.tensor([-1.0, -0.5, -2.0, -0.1, -0.7, -1.2, -0.3, -3.0])
PROX = torch.tensor([-1.2, -0.4, -1.5, -0.1, -0.2, -1.5, -0.3, -1.0])
OLD = torch.tensor([-1.1, -0.9, -1.5, -0.6, -0.2, -2.9, -0.3, -1.0])
ADV = torch.tensor([1.0, 1.0, -1.0, 2.0, -0.5, -0.5, -0.5, -3.0])
MASK = torch.tensor([0, 1, 1, 1, 1, 1, 1, 0]).bool()


def close(got: torch.Tensor, want) -> None:
    torch.testing.assert_close(got.detach(), torch.tensor(want), atol=1e-5, rtol=0)


def test_decoupled_loss_without_options() -> None:
    token = policy_token_loss(LOGP, PROX, OLD, ADV, MASK, eps_clip=0.2)
    close(token.loss_T, [0, -1.491825, 0.8, -3.297442, 0.4, 2.736974, 0.5, 0])
    close(token.loss_T.sum() / MASK.sum(), -0.058716)
    assert token.clipped_T.int().tolist() == [0, 0, 1, 0, 1, 0, 0, 0]
    assert not token.dual_clipped_T.any()
    assert not token.dropped_T.any()


def test_behaviour_weight_above_the_cap_drops_the_token() -> None:
    token = policy_token_loss(LOGP, PROX, OLD, ADV, MASK, eps_clip=0.2, behav_imp_weight_cap=2.0)
    close(token.loss_T, [0, -1.491825, 0.8, -3.297442, 0.4, 0.0, 0.5, 0])
    close(token.loss_T.sum() / MASK.sum(), -0.514878)
    assert token.dropped_T.int().tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert token.clipped_T.int().tolist() == [0, 0, 1, 0, 1, 0, 0, 0]
    assert not token.dual_clipped_T.any()


def test_on_policy_the_loss_is_the_mean_advantage() -> None:
    token = policy_token_loss(LOGP, LOGP, LOGP, ADV, MASK)
    close(token.loss_T.sum() / MASK.sum(), -0.083333)


def test_clips_by_hand() -> None:
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 4.0])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    zero, mask = torch.zeros(5), torch.ones(5).bool()
    token = policy_token_loss(
        ratio.log(), zero, zero, advantage, mask, eps_clip=0.2, eps_clip_higher=0.3, c_clip=3.0
    )
    close(token.loss_T, [-1.3, -0.5, 1.5, 0.8, 3.0])
    assert token.clipped_T.tolist() == [True, False, False, True, False]
    assert token.dual_clipped_T.tolist() == [False, False, False, False, True]


def test_gradient_is_the_policy_gradient_on_policy_and_zero_where_clipped() -> None:
    logp = torch.tensor([0.0, 1.0, 5.0], requires_grad=True)
    zero = torch.zeros(3)
    token = policy_token_loss(
        logp, zero, zero, torch.tensor([2.0, 1.0, 7.0]), torch.tensor([True, True, False])
    )
    token.loss_T.sum().backward()
    close(logp.grad, [-2.0, 0.0, 0.0])


def test_unmasked_tokens_can_hold_anything() -> None:
    logp = torch.tensor([-1.0, 500.0], requires_grad=True)
    other = torch.tensor([-1.0, float("-inf")])
    token = policy_token_loss(
        logp, other, other, torch.tensor([1.0, float("nan")]), torch.tensor([True, False]), c_clip=2.0
    )
    token.loss_T.sum().backward()
    close(token.loss_T, [-1.0, 0.0])
    close(logp.grad, [-1.0, 0.0])


def test_empty_micro_batch() -> None:
    empty, mask = torch.zeros(0, requires_grad=True), torch.zeros(0).bool()
    token = policy_token_loss(
        empty, empty.detach(), empty.detach(), empty.detach(), mask, c_clip=2.0, behav_imp_weight_cap=2.0
    )
    token.loss_T.sum().backward()
    assert token.loss_T.sum() == 0


@pytest.mark.parametrize("option", ["c_clip", "behav_imp_weight_cap"])
def test_bounds_that_make_no_sense_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be above 1"):
        policy_token_loss(LOGP, PROX, OLD, ADV, MASK, **{option: 1.0})


def test_supervised_loss_sums_over_the_mask() -> None:
    loss, sums = supervised_loss(torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([True, False, True]))
    assert loss == 5.0
    assert sums["num_tokens"] == 2


def test_pairs_by_hand() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0, 1.0], requires_grad=True), torch.tensor([1.0, 1.0, 1.0])
    loss, sums = pairwise_loss(chosen, rejected)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-1)) + math.log1p(math.exp(1)) + math.log(2))
    assert (sums["num_correct"].item(), sums["margin"].item()) == (1, 0.0)  # a tie is not in order
    loss.backward()
    assert chosen.grad.tolist() == pytest.approx([-1 / (1 + math.e), -math.e / (1 + math.e), -0.5])


def test_no_pairs() -> None:
    loss, sums = pairwise_loss(torch.zeros(0), torch.zeros(0))
    assert loss.item() == 0 and sums["num_correct"].item() == 0
