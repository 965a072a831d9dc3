"""Rewards to credit, which log-probabilities are whose, and the policy loss: against the vectors of the
reference implementation and against hand-worked tokens.
"""

import pytest
import torch

from hpc_rl.algorithms.correction import Correction, choose_logprobs
from hpc_rl.algorithms.grpo import GRPO, Options, compute_credit
from hpc_rl.algorithms.normalization import Levels, number_groups
from hpc_rl.algorithms.token_batch import RewardBatch, TokenBatch
from hpc_rl.engines.base import MicroBatch
from hpc_rl.trainers.policy_loss import PolicyLoss

LOGP = torch.tensor([-1.0, -0.5, -2.0, -0.1, -0.7, -1.2, -0.3, -3.0])
PROX = torch.tensor([-1.2, -0.4, -1.5, -0.1, -0.2, -1.5, -0.3, -1.0])
OLD = torch.tensor([-1.1, -0.9, -1.5, -0.6, -0.2, -2.9, -0.3, -1.0])
ADV = torch.tensor([1.0, 1.0, -1.0, 2.0, -0.5, -0.5, -0.5, -3.0])
LOSS_MASK = torch.tensor([0, 1, 1, 1, 1, 1, 1, 0]).bool()
MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 0]]).bool()


def test_group_normalized_reward_at_every_token_of_the_trajectory() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    batch = RewardBatch(rewards, MASK, number_groups(4, 2))
    got = compute_credit(batch, Options(reward_norm=Levels("group", "group")))
    unit = 0.5 / (0.5 + 1e-5)
    torch.testing.assert_close(
        got, torch.tensor([[0, unit, unit, 0], [0, -unit, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    )


def test_bias_scaling_and_clip_come_before_the_normalization() -> None:
    options = Options(
        reward_bias=-1.0, reward_scaling=2.0, reward_clip=4.0, reward_norm=Levels("batch", None)
    )
    got = compute_credit(RewardBatch(torch.tensor([0.0, 9.0]), MASK[:2], number_groups(2, 2)), options)
    assert got.tolist() == [[0, -3, -3, 0], [0, 3, 0, 0]]  # shaped to -2 and 4


def test_advantage_norm_counts_tokens_not_rows() -> None:
    batch = RewardBatch(torch.tensor([3.0, 0.0]), MASK[:2], number_groups(2, 2))
    got = compute_credit(batch, Options(adv_norm=Levels("batch", None)))
    assert got.tolist() == [[0, 1, 1, 0], [0, -2, 0, 0]]


def test_reference_logprobs() -> None:
    servers, ours = [1.0], [2.0]
    assert choose_logprobs(servers, None, decoupled=False) == (servers, servers)
    assert choose_logprobs(servers, ours, decoupled=False) == (ours, ours)
    assert choose_logprobs(servers, ours, decoupled=True) == (ours, servers)
    with pytest.raises(ValueError, match=r"actor\.recompute_logprob true"):
        choose_logprobs(servers, None, decoupled=True)


def loss_of(batch: TokenBatch, **options) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the sums of a micro-batch, as the trainer computes them."""
    cap = options.pop("behav_imp_weight_cap", None)
    columns = {
        "fresh_mask": batch.mask_T,
        "prox": batch.prox_T,
        "behav": batch.behav_T,
        "credit": batch.credit_T,
        "loss_mask": batch.mask_T,
    }
    row_T = torch.zeros(len(batch.mask_T), dtype=torch.long)
    loss = PolicyLoss(GRPO, Options(**options), Correction(mode="mask", upper=cap))
    return loss.compute({"rl": 1.0}, False, MicroBatch(batch.logprobs_T, batch.entropy_T, columns, row_T))


def test_policy_loss_reports_sums_over_masked_tokens() -> None:
    logp = torch.tensor([0.0, 1.0, -3.0], requires_grad=True)
    behav = torch.tensor([0.0, 0.0, 9.0])
    mask = torch.tensor([True, True, False])
    credit, entropy = torch.tensor([1.0, 1.0, 5.0]), torch.tensor([0.5, 0.25, 7.0])
    loss, sums = loss_of(TokenBatch(logp, behav, behav, credit, mask, entropy))
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


def tokens(logp, prox, behav, credit, mask) -> TokenBatch:
    return TokenBatch(logp, prox, behav, credit, mask, entropy_T=torch.zeros_like(logp).detach())


def token_by_token(batch: TokenBatch, **options) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """Return the loss of each token, and what it adds to each sum, from micro-batches of one token."""
    made = []
    for t in range(len(batch.mask_T)):
        one = TokenBatch(*(None if column is None else column[t : t + 1] for column in batch))
        made.append(loss_of(one, **options))
    return torch.stack([loss for loss, _ in made]), {
        name: [float(sums[name]) for _, sums in made] for name in made[0][1]
    }


def close(got: torch.Tensor, want) -> None:
    torch.testing.assert_close(got.detach(), torch.tensor(want), atol=1e-5, rtol=0)


def test_decoupled_loss_without_options() -> None:
    batch = tokens(LOGP, PROX, OLD, ADV, LOSS_MASK)
    loss_T, sums_T = token_by_token(batch, eps_clip=0.2)
    close(loss_T, [0, -1.491825, 0.8, -3.297442, 0.4, 2.736974, 0.5, 0])
    assert sums_T["clip_ratio"] == [0, 0, 1, 0, 1, 0, 0, 0]
    loss, sums = loss_of(batch, eps_clip=0.2)
    close(loss / LOSS_MASK.sum(), -0.058716)
    assert (sums["clip_ratio"], sums["dual_clip_ratio"], sums["behave_dropped"]) == (2, 0, 0)


def test_behaviour_weight_above_the_cap_drops_the_token() -> None:
    batch = tokens(LOGP, PROX, OLD, ADV, LOSS_MASK)
    loss_T, sums_T = token_by_token(batch, eps_clip=0.2, behav_imp_weight_cap=2.0)
    close(loss_T, [0, -1.491825, 0.8, -3.297442, 0.4, 0.0, 0.5, 0])
    assert sums_T["behave_dropped"] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert sums_T["clip_ratio"] == [0, 0, 1, 0, 1, 0, 0, 0]
    loss, sums = loss_of(batch, eps_clip=0.2, behav_imp_weight_cap=2.0)
    close(loss / LOSS_MASK.sum(), -0.514878)
    assert (sums["behave_dropped"], sums["dual_clip_ratio"]) == (1, 0)


def test_on_policy_the_loss_is_the_mean_advantage() -> None:
    loss, _ = loss_of(tokens(LOGP, LOGP, LOGP, ADV, LOSS_MASK))
    close(loss / LOSS_MASK.sum(), -0.083333)


def test_clips_by_hand() -> None:
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 4.0])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    zero, mask = torch.zeros(5), torch.ones(5).bool()
    batch = tokens(ratio.log(), zero, zero, advantage, mask)
    loss_T, sums_T = token_by_token(batch, eps_clip=0.2, eps_clip_higher=0.3, c_clip=3.0)
    close(loss_T, [-1.3, -0.5, 1.5, 0.8, 3.0])
    assert sums_T["clip_ratio"] == [1, 0, 0, 1, 0]
    assert sums_T["dual_clip_ratio"] == [0, 0, 0, 0, 1]


def test_gradient_is_the_policy_gradient_on_policy_and_zero_where_clipped() -> None:
    logp = torch.tensor([0.0, 1.0, 5.0], requires_grad=True)
    zero = torch.zeros(3)
    batch = tokens(logp, zero, zero, torch.tensor([2.0, 1.0, 7.0]), torch.tensor([True, True, False]))
    loss_of(batch)[0].backward()
    close(logp.grad, [-2.0, 0.0, 0.0])


def test_unmasked_tokens_can_hold_anything() -> None:
    logp = torch.tensor([-1.0, 500.0], requires_grad=True)
    other = torch.tensor([-1.0, float("-inf")])
    batch = tokens(logp, other, other, torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    loss, sums = loss_of(batch, c_clip=2.0)
    loss.backward()
    close(token_by_token(batch, c_clip=2.0)[0], [-1.0, 0.0])
    close(logp.grad, [-1.0, 0.0])
    assert all(value.isfinite() for value in sums.values())


def test_empty_micro_batch() -> None:
    empty, mask = torch.zeros(0, requires_grad=True), torch.zeros(0).bool()
    batch = tokens(empty, empty.detach(), empty.detach(), empty.detach(), mask)
    loss, _ = loss_of(batch, c_clip=2.0, behav_imp_weight_cap=2.0)
    loss.backward()
    assert loss == 0


def test_a_dual_clip_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="c_clip must be above 1"):
        loss_of(tokens(LOGP, PROX, OLD, ADV, LOSS_MASK), c_clip=1.0)
