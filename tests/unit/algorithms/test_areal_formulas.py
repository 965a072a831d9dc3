"""Our losses of AReaL's own options against AReaL's formulas, written out in loops over tokens and rows.

The loss of a batch is the mean over its tokens of the token losses times the behaviour weight w = exp(prox -
old). The ratio is exp(logp - prox).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import make_micro_batch

from hpc_rl.algorithms import gspo, m2po, sapo
from hpc_rl.algorithms.correction import Correction
from hpc_rl.algorithms.grpo import GRPO
from hpc_rl.algorithms.grpo import Options as Clip
from hpc_rl.trainers.policy_loss import PolicyLoss

EPS, EPS_HIGHER, C_CLIP, CAP = 0.2, 0.3, 3.0, 1.5
TAU_POS, TAU_NEG = 1.0, 1.1
Rows = list[list[int]]  # the trained tokens of each row


def clip_token(ratio: float, advantage: float) -> float:
    """PPO's clipped loss with a dual clip."""
    upper = 1 + EPS_HIGHER
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - EPS), upper))
    dual = (advantage > 0) - (advantage < 0)
    return min(loss, dual * C_CLIP * advantage) if advantage else loss


def compute_grpo(logp, prox, advantages, rows: Rows) -> dict[int, float]:
    return {t: clip_token(math.exp(logp[t] - prox[t]), advantages[t]) for row in rows for t in row}


def compute_gspo(logp, prox, advantages, rows: Rows) -> dict[int, float]:
    """One ratio and one advantage for a sequence: the geometric mean, and the mean."""
    losses = {}
    for row in rows:
        ratio = math.exp(sum(logp[t] - prox[t] for t in row) / max(1, len(row)))
        advantage = sum(advantages[t] for t in row) / max(1, len(row))
        losses |= dict.fromkeys(row, clip_token(ratio, advantage))
    return losses


def compute_sapo(logp, prox, advantages, rows: Rows) -> dict[int, float]:
    """A gate by the sign of the advantage, 4 / tau * sigmoid(tau * (ratio - 1))."""
    losses = {}
    for t in (t for row in rows for t in row):
        tau = TAU_POS if advantages[t] > 0 else TAU_NEG
        gate = 4 / tau / (1 + math.exp(-tau * (math.exp(logp[t] - prox[t]) - 1)))
        losses[t] = -gate * advantages[t]
    return losses


def drop_second_moments(prox, old, rows: Rows, threshold: float) -> set[int]:
    """Return the tokens that M2PO keeps: the largest squares leave until the mean of the rest is below.

    The last one stays in any case.
    """
    kept = sorted((t for row in rows for t in row), key=lambda t: (prox[t] - old[t]) ** 2)
    while len(kept) > 1 and sum((prox[t] - old[t]) ** 2 for t in kept) / len(kept) >= threshold:
        kept.pop()
    return {*kept}


def draw(seed: int, scale: float) -> tuple[list[float], ...]:
    """Draw log-probabilities of the current, proximal and behaviour policy, and advantages of 12 tokens."""
    generator = torch.Generator().manual_seed(seed)
    logp, prox, old, advantages = torch.randn(4, 12, generator=generator, dtype=torch.float64).unbind()
    logp, prox, old = (-1 + scale * one for one in (logp, prox, old))
    return logp.tolist(), prox.tolist(), old.tolist(), advantages.tolist()


LENGTHS = [3, 4, 1, 4]
ALGORITHMS = {
    "grpo": (GRPO, Clip(eps_clip=EPS, eps_clip_higher=EPS_HIGHER, c_clip=C_CLIP), compute_grpo),
    "gspo": (gspo.GSPO, Clip(eps_clip=EPS, eps_clip_higher=EPS_HIGHER, c_clip=C_CLIP), compute_gspo),
    "sapo": (sapo.SAPO, sapo.Options(sapo_tau_pos=TAU_POS, sapo_tau_neg=TAU_NEG), compute_sapo),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 999), st.sampled_from([0.05, 0.3, 1.0]), st.lists(st.booleans(), min_size=12, max_size=12)
)
def test_the_loss_of_a_batch_is_that_of_areal(name, seed, scale, trained):
    """Weights above the cap become 0 and stay in the divisor, as `behav_imp_weight_cap` has it."""
    algorithm, options, compute = ALGORITHMS[name]
    logp, prox, old, advantages = draw(seed, scale)
    ends = [sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS))]
    rows = [[t for t in range(end - n, end) if trained[t]] for n, end in zip(LENGTHS, ends, strict=True)]
    wanted = 0.0
    for t, loss in compute(logp, prox, advantages, rows).items():
        weight = math.exp(prox[t] - old[t])
        wanted += loss * (0.0 if weight > CAP else weight)
    batch = make_micro_batch(LENGTHS, trained, logp, prox=prox, behav=old, credit=advantages)
    whole = PolicyLoss(algorithm, options, Correction(mode="mask", upper=CAP))
    total, sums = whole.compute({"rl": 1.0}, False, batch)
    assert float(total.detach()) == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert int(sums["num_tokens"]) == sum(trained)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 999), st.sampled_from([0.05, 0.3, 1.0]), st.sampled_from([0.001, 0.04, 0.5]))
def test_m2po_keeps_the_tokens_that_areal_keeps(seed, scale, threshold):
    _, prox, old, _ = draw(seed, scale)
    log_weight_N = torch.tensor(prox, dtype=torch.float64) - torch.tensor(old, dtype=torch.float64)
    kept_N = m2po.select_tokens(log_weight_N, m2po.Options(m2_threshold=threshold))
    assert {*kept_N.nonzero().flatten().tolist()} == drop_second_moments(prox, old, [[*range(12)]], threshold)


def test_the_loss_of_m2po_is_that_of_areal():
    """AReaL clears the dropped tokens in the loss mask: they leave the loss and the divisor."""
    logp, prox, old, advantages = draw(3, 0.3)
    kept = drop_second_moments(prox, old, [[*range(12)]], 0.04)
    assert 0 < len(kept) < 12
    of_all = compute_grpo(logp, prox, advantages, [[*range(12)]])
    wanted = sum(of_all[t] * math.exp(prox[t] - old[t]) for t in kept)
    batch = make_micro_batch(LENGTHS, [True] * 12, logp, prox=prox, behav=old, credit=advantages)
    batch.columns_T["kept_mask"] = torch.tensor([t in kept for t in range(12)])
    options = m2po.Options(eps_clip=EPS, eps_clip_higher=EPS_HIGHER, c_clip=C_CLIP)
    total, _ = PolicyLoss(m2po.M2PO, options).compute({"rl": 1.0}, False, batch)
    assert float(total.detach()) == pytest.approx(wanted, rel=1e-4)
