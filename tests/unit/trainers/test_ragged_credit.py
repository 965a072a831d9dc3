"""The credit on ragged rows is the credit of a rectangle, with less memory."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from recipes import make_run

from hpc_rl.algorithms import grpo, max_rl, reinforce_pp
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.correction import Correction
from hpc_rl.config.options.dataset import PromptDatasetConfig
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.options.training import NormConfig, PPOActorConfig
from hpc_rl.core.types import Batch, Trajectory, TrajectoryGroup
from hpc_rl.trainers import ragged_credit
from hpc_rl.trainers.algorithm_options import make_options
from hpc_rl.trainers.minibatches import Known
from hpc_rl.trainers.policy_data import PolicyData
from hpc_rl.trainers.ragged_credit import ComputedRows, cut_chunks

GROUP = {"mean_level": "group", "std_level": "group"}
CASES = {
    "constant": {},
    "advantages by batch": {"adv_norm": NormConfig()},
    "advantages by group": {"adv_norm": NormConfig(**GROUP, std_unbiased=True)},
    "others' mean": {"adv_norm": NormConfig(mean_leave1out=True)},
    "no mean": {"adv_norm": NormConfig(mean_level=None)},
    "discount": {"discount": 0.9, "adv_norm": NormConfig(mean_level="group", mean_leave1out=True)},
    "lambda": {"gae_lambda": 0.95},
    "KL": {"kl_ctl": 0.3, "adv_norm": NormConfig(mean_level="group", std_level="batch")},
    "KL, no mean": {"kl_ctl": 0.3, "adv_norm": NormConfig(mean_level=None, std_level="group")},
}
ALGORITHMS = {"grpo": grpo.GRPO, "max_rl": max_rl.MAX_RL, "reinforce_pp": reinforce_pp.REINFORCE_PP}


def make_data(tmp_path: Path, algorithm: Algorithm = grpo.GRPO, **actor) -> PolicyData:
    config = GRPOConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=PromptDatasetConfig(path="x.jsonl", batch_size=9),
        gconfig=GenerationHyperparameters(n_samples=2),
        actor=PPOActorConfig(path="m", **{"kl_ctl": 0.0, **actor}),
    )
    options = make_options(algorithm, config)
    return PolicyData(make_run(tmp_path, config), algorithm, options, Correction(), None)


def make_rows(seed: int) -> tuple[Batch, Known]:
    """Return groups of two; some rows have no trained token, or gaps between these."""
    random, groups, known = np.random.default_rng(seed), [], {}
    for number in range(9):
        rows = []
        for _ in range(2):
            length = int(random.integers(1, 300))
            mask = (random.random(length) < 0.8) & (random.random() < 0.9)
            logprobs = np.where(mask, random.normal(size=length), 0.0).astype(np.float32)
            known[len(known)] = np.where(mask, random.normal(size=length), 0.0).astype(np.float32)
            rows.append(
                Trajectory(
                    ids=np.arange(length, dtype=np.int32),
                    loss_mask=mask,
                    logprobs=logprobs,
                    lineages=np.where(mask, 0, -1).astype(np.int32),
                    steps=np.where(mask, 4, -1).astype(np.int32),
                    reward=float(random.random()),
                    finish_reason="stop",
                )
            )
        groups.append(TrajectoryGroup(number, rows))
    return Batch(5, groups), Known(None, known)


def compute(data: PolicyData, batch: Batch, known: Known | None) -> list[np.ndarray]:
    scored = data.score(batch)
    rewards = data.make_rewards(scored, known)
    return list(data.compute_credit(scored.rows, rewards, known))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("turns", [False, True], ids=["", "turns"])
def test_ragged_credit_equals_the_one_of_a_rectangle(tmp_path, monkeypatch, name, case, turns):
    monkeypatch.setattr(ragged_credit, "CHUNK_TOKENS", 1400)
    monkeypatch.setattr(ragged_credit, "BLOCK_TOKENS", 500)
    algorithm, options = ALGORITHMS[name], {"reward_norm": None, **CASES[case]}
    batch, known = make_rows(seed=len(case))
    if turns:
        rows = [row for group in batch.groups for row in group.trajectories if row.loss_mask.sum() > 4]
        for row in rows[::3]:
            row.turn_rewards = np.where(np.cumsum(row.loss_mask) == 3, row.loss_mask * 0.5, 0).astype(
                np.float32
            )
    calls = []

    def on_rectangle(rewards, given):
        calls.append(rewards.token_rewards_BT is not None)
        return algorithm.compute_credit(rewards, given)

    plain = dataclasses.replace(algorithm, compute_credit=on_rectangle)
    passed = known if "kl_ctl" in options else None
    wanted = compute(make_data(tmp_path, plain, **options), batch, passed)
    found = compute(make_data(tmp_path, algorithm, **options), batch, passed)
    masks = [row.loss_mask for group in batch.groups for row in group.trajectories]
    assert calls == [turns or passed is not None]
    for one, other, mask in zip(found, wanted, masks, strict=True):
        assert one.dtype == other.dtype == np.float32
        assert not one[~mask].any()
        if calls[0] or "discount" in options or "gae_lambda" in options:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)
        else:
            np.testing.assert_array_equal(one, other)


def test_an_algorithm_with_its_own_credit_gets_a_rectangle(tmp_path):
    batch, known = make_rows(0)
    seen = []

    def double(rewards, options):
        seen.append(rewards)
        return 2 * grpo.compute_credit(rewards, options)

    own = dataclasses.replace(grpo.GRPO, compute_credit=double)
    found = compute(make_data(tmp_path, own, kl_ctl=0.1), batch, known)
    wanted = compute(make_data(tmp_path, kl_ctl=0.1), batch, known)
    assert seen[0].token_rewards_BT.shape == seen[0].mask_BT.shape
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, 2 * other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"discount": 0.9}, {"kl_ctl": 0.1}], ids=str)
def test_advantages_of_an_environment_replace_the_credit(tmp_path, options):
    batch, known = make_rows(0)
    rows = [row for group in batch.groups for row in group.trajectories]
    wanted = compute(make_data(tmp_path, **options), batch, known if "kl_ctl" in options else None)
    i, j = [number for number, row in enumerate(rows) if row.loss_mask.any()][3:5]
    rows[i].advantages = np.arange(len(rows[i].ids), dtype=np.float32)
    rows[j].zero_advantage = True
    wanted[i], wanted[j] = rows[i].advantages * rows[i].loss_mask, np.zeros_like(wanted[j])
    found = compute(make_data(tmp_path, **options), batch, known if "kl_ctl" in options else None)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_mask_of_ragged_rows_is_made_when_it_is_read(tmp_path):
    batch, _ = make_rows(0)
    data = make_data(tmp_path)
    scored = data.score(batch)
    rewards = data.make_rewards(scored)
    counts = [int(row.loss_mask.sum()) for row in scored.rows]
    assert rewards.count_tokens().tolist() == counts and not isinstance(rewards.masks, torch.Tensor)
    assert rewards.mask_BT.dtype == torch.bool and rewards.mask_BT.sum(1).tolist() == counts
    chosen = rewards.select(torch.tensor([7, 2]))
    assert chosen.count_tokens().tolist() == [counts[7], counts[2]] == chosen.mask_BT.sum(1).tolist()
    assert data.make_rewards(data.score(Batch(5, [TrajectoryGroup(0, [])]))).mask_BT.shape == (0, 0)


def test_chunks_have_all_rows_in_order_within_the_bound():
    lengths = [5, 9, 1, 1, 30, 2, 2, 2]
    parts = list(cut_chunks(lengths, 20))
    assert [i for part in parts for i in part] == list(range(8))
    assert parts == [range(2), range(2, 4), range(4, 5), range(5, 8)]
    assert list(cut_chunks([], 20)) == []


def test_computed_rows_are_a_sequence():
    rows = ComputedRows(3, lambda i: np.full(2, i, np.float32))
    assert [row[0] for row in rows] == [0, 1, 2] and len(rows) == 3
    assert rows[-1][0] == 2 and [row[0] for row in rows[1:]] == [1, 2]
    with pytest.raises(IndexError):
        rows[3]
