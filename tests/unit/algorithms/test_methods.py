"""Each algorithm by hand: four rows of three tokens, the first two with credit 1, the others with -1."""

import math

import pytest
import torch

from hpc_rl.algorithms import cispo, gspo, m2po, ppo, sapo
from hpc_rl.algorithms.correction import Correction
from hpc_rl.algorithms.grpo import GRPO
from hpc_rl.algorithms.grpo import Options as Clip
from hpc_rl.algorithms.token_batch import Options, RewardBatch, TokenBatch
from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.trainers.algorithm_options import load_algorithm

WORDS = [
    "experiment_name=e",
    "trial_name=t",
    "train_dataset.path=/d",
    "train_dataset.batch_size=4",
    "gconfig.n_samples=2",
    "actor.path=/m",
]
RATIO = [1.5, 1.0, 0.5, 1.0, 2.0, 1.0, 0.5, 0.5, 0.5, 1.0, 1.0, 8.0]
SIGN = [1.0] * 6 + [-1.0] * 6
ROWS = torch.arange(4).repeat_interleave(3)


def tokens_of(ratio: list[float], credit: list[float], row_T: torch.Tensor) -> TokenBatch:
    logprobs_T = torch.tensor(ratio).log().requires_grad_()
    zero_T, mask_T = torch.zeros(len(ratio)), torch.ones(len(ratio)).bool()
    return TokenBatch(logprobs_T, zero_T, zero_T, torch.tensor(credit), mask_T, zero_T, row_T)


def loss_and_gradient(algorithm, options, tokens: TokenBatch) -> tuple[list[float], list[float]]:
    loss_T = algorithm.compute_loss(tokens, options).components_T["rl"]
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), tokens.logprobs_T)
    return loss_T.tolist(), gradient_T.tolist()


@pytest.mark.parametrize(
    ("algorithm", "options", "wanted", "gradient"),
    [
        pytest.param(
            GRPO,
            Clip(eps_clip=0.2),
            [-1.2, -1, -0.5, -1, -1.2, -1, 0.8, 0.8, 0.8, 1, 1, 8],
            [0, -1, -0.5, -1, 0, -1, 0, 0, 0, 1, 1, 8],
            id="grpo",
        ),
        pytest.param(  # ratios of the sequences: 0.75^(1/3), 2^(1/3), 0.5, 2
            gspo.GSPO,
            Clip(eps_clip=0.2),
            [-0.9085603] * 3 + [-1.2] * 3 + [0.8] * 3 + [2.0] * 3,
            [-0.9085603] * 3 + [0.0] * 6 + [2.0] * 3,
            id="gspo",
        ),
        pytest.param(
            gspo.GSPO_TOKEN,
            Clip(eps_clip=0.2),
            [-0.9085603] * 3 + [-1.2] * 3 + [0.8] * 3 + [2.0] * 3,
            [-0.9085603] * 3 + [0.0] * 6 + [2.0] * 3,
            id="gspo_token",
        ),
        pytest.param(  # -clip(r, 0, 2) A log r
            cispo.CISPO,
            cispo.Options(eps_clip=1.0, eps_clip_higher=1.0),
            [-0.6081977, 0, 0.3465736, 0, -1.3862944, 0, *[-0.3465736] * 3, 0, 0, 4.1588831],
            [-1.5, -1, -0.5, -1, -2, -1, 0.5, 0.5, 0.5, 1, 1, 2],
            id="cispo",
        ),
        pytest.param(  # gradient 4 s (1 - s) r A for the gate's value s
            sapo.SAPO,
            sapo.Options(sapo_tau_pos=1.0, sapo_tau_neg=2.0),
            [-2.4898373, -2, -1.5101627, -2, -2.9242343, -2, *[0.5378828] * 3, 1, 1, 1.9999983],
            [-1.4100223, -1, -0.4700074, -1, -1.5728955, -1, *[0.3932239] * 3, 1, 1, 0.0000266],
            id="sapo",
        ),
    ],
)
def test_the_loss_of_each_token_and_its_gradient(algorithm, options, wanted, gradient):
    found = loss_and_gradient(algorithm, options, tokens_of(RATIO, SIGN, ROWS))
    assert found[0] == pytest.approx(wanted, abs=1e-6)
    assert found[1] == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("algorithm", [gspo.GSPO, gspo.GSPO_TOKEN])
def test_sequences_of_one_token_make_gspo_grpo(algorithm):
    alone = tokens_of(RATIO, [0.5 * value for value in SIGN], torch.arange(12))
    options = Clip(eps_clip=0.2, eps_clip_higher=0.3, c_clip=3.0)
    assert loss_and_gradient(algorithm, options, alone) == loss_and_gradient(GRPO, options, alone)


def test_gspo_by_token_has_the_credit_of_each_token():
    """The ratio of the sequence is 2; the mean credit of 3, 0 and 0 is 1."""
    tokens = tokens_of([1.0, 1.0, 8.0], [3.0, 0.0, 0.0], torch.zeros(3, dtype=torch.long))
    wide = Clip(eps_clip=0.2, eps_clip_higher=9.0)
    assert loss_and_gradient(gspo.GSPO, wide, tokens)[0] == pytest.approx([-2.0] * 3)
    assert loss_and_gradient(gspo.GSPO_TOKEN, wide, tokens) == (
        pytest.approx([-6.0, 0, 0]),
        pytest.approx([-6.0, 0, 0]),
    )


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [(GRPO, Clip()), (gspo.GSPO, Clip()), (cispo.CISPO, cispo.Options()), (sapo.SAPO, sapo.Options())],
)
def test_at_the_proximal_policy_every_loss_has_the_policy_gradient(algorithm, options):
    tokens = tokens_of([1.0] * 12, SIGN, ROWS)
    assert loss_and_gradient(algorithm, options, tokens)[1] == pytest.approx([-value for value in SIGN])


def test_m2po_drops_the_largest_squares_until_the_mean_is_below_the_threshold():
    """Means of the sorted squares: 0.01 up to nine tokens, then 0.018, 0.0391, 0.0767."""
    log_weight_N = torch.tensor([0.7, *[-0.1] * 9, -0.5, 0.3])
    for threshold, dropped in ((0.08, []), (0.04, [0]), (0.02, [0, 10]), (0.015, [0, 10, 11])):
        kept_N = m2po.select_tokens(log_weight_N, m2po.Options(m2_threshold=threshold))
        assert (~kept_N).nonzero().flatten().tolist() == dropped
    assert m2po.select_tokens(log_weight_N, m2po.Options(m2_threshold=1e-9)).sum() == 1
    assert m2po.select_tokens(torch.zeros(12), m2po.Options(m2_threshold=1e-9)).all()


def credit_of(name: str, rewards: list[float], *words: str) -> list[float]:
    """Return the credit of the first token of each row, with the defaults of the algorithm."""
    config = check(load([], [*WORDS, f"actor.algorithm={name}", *words], profiles=[]), files=False).config
    algorithm, options = load_algorithm(config)
    mask_BT = torch.ones(len(rewards), 3).bool()
    group_B = torch.arange(len(rewards)) // config.gconfig.n_samples
    batch = RewardBatch(torch.tensor(rewards), mask_BT, group_B, group_size=config.gconfig.n_samples)
    credit_BT = algorithm.compute_credit(batch, options)
    assert (credit_BT == credit_BT[:, :1]).all()
    return credit_BT[:, 0].tolist()


@pytest.mark.parametrize(
    ("name", "rewards", "credit"),
    [
        ("dapo", [1, 0, 3, 1], [1, -1, 1, -1]),
        ("dr_grpo", [1, 0, 3, 1], [0.5, -0.5, 1, -1]),
        ("gspo", [1, 0, 3, 1], [1, -1, 1, -1]),
        ("cispo", [1, 0, 3, 1], [1, -1, 1, -1]),
        ("sapo", [1, 0, 3, 1], [1, -1, 1, -1]),
        ("m2po", [1, 0, 3, 1], [1, -1, 1, -1]),
        # the deviation of 0.5, -0.5, 1, -1 is sqrt(0.625)
        ("lite_ppo", [1, 0, 3, 1], [0.632456, -0.632456, 1.264911, -1.264911]),
        ("rloo", [1, 0, 3, 1], [1, -1, 2, -2]),
        ("max_rl", [1, 0, 3, 1], [1, -1, 0.5, -0.5]),
        ("max_rl", [0, 0, 3, 3], [0, 0, 0, 0]),
        # the deviation of 0.5, -0.5, 0, 0 is sqrt(0.125)
        ("reinforce_pp", [1, 0, 1, 1], [1.414214, -1.414214, 0, 0]),
    ],
)
def test_the_credit_with_the_defaults_of_the_algorithm(name, rewards, credit):
    assert credit_of(name, [float(one) for one in rewards]) == pytest.approx(credit, abs=1e-4)


def test_rloo_compares_with_the_mean_of_the_others():
    assert credit_of("rloo", [1.0, 0.0, 0.0, 1.0], "gconfig.n_samples=4") == pytest.approx(
        [2 / 3, -2 / 3, -2 / 3, 2 / 3]
    )


def test_reinforce_pp_without_groups_compares_with_the_batch():
    assert credit_of("reinforce_pp", [1.0, 0.0, 1.0, 0.0], "gconfig.n_samples=1") == pytest.approx(
        [1, -1, 1, -1], abs=1e-4
    )


def test_the_critic_learns_returns_with_a_clip_around_the_old_values():
    """Discount 1, lambda 0.5: errors -1, 1, 1 of the row; credit -0.25, 1.5, 1; returns with the values."""
    values_BT = torch.tensor([[2.0, 1.0, 2.0]])
    batch = RewardBatch(torch.tensor([3.0]), torch.ones(1, 3).bool(), values_BT=values_BT)
    assert ppo.compute_returns(batch, Options(gae_lambda=0.5)).tolist() == [[1.75, 2.5, 3.0]]
    new_T = torch.tensor([2.5, 1.0, 9.0, 5.0], requires_grad=True)
    old_T, returns_T = torch.tensor([2.0, 1.5, 8.0, 1.0]), torch.tensor([3.0, 1.0, 9.0, 9.0])
    mask_T = torch.tensor([True, True, True, False])
    loss_T, sums = ppo.compute_value_loss(new_T, old_T, returns_T, mask_T, 0.25)
    # bounded: 2.25, 1.25, 8.25; squares of the larger distances 0.75, 0.25, 0.75, halved
    assert loss_T.tolist() == [0.28125, 0.03125, 0.28125, 0.0]
    loss_T.sum().backward()
    assert new_T.grad.tolist() == [0, 0, 0, 0] and sums["value_clip_ratio"] == 3


LOG_W = torch.tensor([0.0, 1.0, -1.0, 0.0, 3.0, 0.0, -1.2, -0.9, -0.9, 0.0, 0.3, 0.0])
E = math.e


@pytest.mark.parametrize(
    ("correction", "weights", "excluded"),
    [
        (Correction("token", "truncate", None, 2.0), [1, 2, 1 / E, 1, 2, 1], []),
        (Correction("token", "truncate", 0.5, 2.0), [1, 2, 0.5, 1, 2, 1], []),
        (Correction("token", "mask", None, 2.0), [1, 0, 1 / E, 1, 0, 1], [1, 4]),
        (Correction("token", "mask", 0.5, 5.0), [1, E, 0, 1, 0, 1], [2, 4, 6, 7, 8]),
        # means of the rows: 0, 1, -1, 0.1
        (Correction("sequence", "truncate", 0.5, 2.0), [1, 1, 1, 2, 2, 2, 0.5, 0.5, 0.5], []),
        (Correction("sequence", "mask", 0.5, 2.0), [1, 1, 1, 0, 0, 0], [3, 4, 5, 6, 7, 8]),
    ],
)
def test_corrections_by_hand(correction, weights, excluded):
    mask_T = torch.ones(12).bool()
    weight_T, excluded_T = correction.compute_weights(LOG_W, mask_T, ROWS)
    assert weight_T[: len(weights)].tolist() == pytest.approx(weights)
    assert excluded_T.nonzero().flatten().tolist() == excluded and not weight_T[excluded_T].any()
    ones_T, none_T = correction.compute_weights(torch.zeros(12), mask_T, ROWS)
    assert (ones_T == 1).all() and not none_T.any()  # the same policy: nothing changes
