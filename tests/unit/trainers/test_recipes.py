"""What a step of GRPO and of SFT asks of the engine: rows, columns, weights, whatever the number of ranks."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.config.data import DatasetConfig
from hpc_rl.config.generation import GenerationHyperparameters
from hpc_rl.config.root import GRPOConfig, SFTConfig
from hpc_rl.config.train import NormConfig, PPOActorConfig, TrainEngineConfig
from hpc_rl.engines.base import MicroBatch, Sequences
from hpc_rl.errors import RoleFailed
from hpc_rl.stats.sinks import Sinks
from hpc_rl.trainers.grpo import GRPO, num_updates, shares
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.trainers.run import Run
from hpc_rl.trainers.sft import SFT
from hpc_rl.trial import Trial
from hpc_rl.types import Batch, EvalResult, Trajectory, TrajectoryGroup


class RecordingEngine:
    """Remembers what it was asked to train on, and runs the loss with log-probabilities of -1."""

    rank, num_ranks = 0, 1

    def __init__(self, logprob: float = -1.0) -> None:
        self.logprob = logprob
        self.updates: list[tuple[Sequences, float, float]] = []

    def logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        return [np.where(mask, self.logprob, 0.0).astype(np.float32) for mask in rows.columns["loss_mask"]]

    def train_batch(self, rows: Sequences, loss, loss_weight: float, temperature: float) -> dict[str, float]:
        self.updates.append((rows, loss_weight, temperature))
        columns = {name: torch.from_numpy(np.concatenate(values)) for name, values in rows.columns.items()}
        tokens = len(columns["loss_mask"])
        batch = MicroBatch(torch.full((tokens,), -1.0), torch.ones(tokens), columns, torch.zeros(tokens, dtype=torch.int64))
        total, sums = loss(batch)
        numbers = {name: float(value) for name, value in sums.items()}
        return {**numbers, "loss": float(total) / loss_weight, "grad_norm": 1.0, "lr": 0.5, "update_successful": 1.0}


def trajectory(reward: float, completion: int = 3, prompt: int = 2, step: int = 4, finish: str = "stop") -> Trajectory:
    mask = np.arange(prompt + completion) >= prompt
    return Trajectory(
        ids=np.arange(prompt + completion, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -2.0, 0.0).astype(np.float32),
        lineages=np.where(mask, 0, -1).astype(np.int32),
        steps=np.where(mask, step, -1).astype(np.int32),
        reward=reward,
        finish_reason=finish,
    )


def batch_of(*rewards: list[float], step: int = 6, **more) -> Batch:
    return Batch(step, [TrajectoryGroup(i, [trajectory(r, **more) for r in group]) for i, group in enumerate(rewards)])


class FakeRollout:
    def evaluate(self, label: str, stopping: threading.Event) -> EvalResult | None:
        return None if stopping.is_set() else EvalResult(label, 200, 0.25, {"num_tokens": 9.0})


def make_run(tmp_path, config) -> Run:
    trial = Trial(tmp_path / "trial")
    return Run(trial, trial.attempt("1.0"), 0, config, RecordingEngine(), Ranks(), threading.Event(), 0, 0, Sinks([]))


def grpo_recipe(tmp_path, reference: RecordingEngine | None = None, **actor) -> GRPO:
    config = GRPOConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=DatasetConfig(path="x.jsonl", batch_size=2),
        valid_dataset=DatasetConfig(path="y.jsonl"),
        gconfig=GenerationHyperparameters(n_samples=2, temperature=0.7),
        actor=PPOActorConfig(
            path="m", **{"ppo_n_minibatches": 1, "reward_norm": NormConfig(mean_level="group", std_level=None), **actor}
        ),
    )
    return GRPO(make_run(tmp_path, config), FakeRollout(), None, num_prompts=10, reference=reference)


def test_rows_without_advantage_are_skipped_and_still_count_in_the_weight(tmp_path):
    recipe = grpo_recipe(tmp_path)
    recipe.update(6, batch_of([1.0, 0.0], [1.0, 1.0]))
    ((rows, weight, temperature),) = recipe.run.engine.updates
    assert len(rows) == 2 and weight == 12.0 and temperature == 0.7
    assert [column.tolist() for column in rows.columns["advantages"]] == [[0, 0, 0.5, 0.5, 0.5], [0, 0, -0.5, -0.5, -0.5]]
    numbers = recipe.run.stats.take()
    assert numbers["rows_skipped"] == 2
    assert numbers["reward"] == 0.75
    assert numbers["staleness_mean"] == numbers["staleness_max"] == 1  # step 6 trains on version 5; the tokens are of 4
    assert (numbers["seq_len"], numbers["num_tokens"], numbers["lr"], numbers["grad_norm"]) == (5, 20, 0.5, 1.0)
    # ratio e^(-1+2), clipped to 1.2 for A > 0, not for A < 0: loss = 3 * 0.5 * (-1.2 + e) / 12
    assert numbers["loss"] == pytest.approx(3 * 0.5 * (-1.2 + np.e) / 12)
    assert numbers["clip_ratio"] == 0.5 and numbers["entropy"] == 1.0


def test_without_any_advantage_the_update_still_happens(tmp_path):
    recipe = grpo_recipe(tmp_path)
    recipe.update(6, batch_of([1.0, 1.0], [0.0, 0.0]))
    ((rows, weight, _),) = recipe.run.engine.updates
    assert len(rows) == 1 and weight == 12.0 and not rows.columns["advantages"][0].any()


def test_tokens_of_a_lost_lineage_are_never_younger_than_the_trainer(tmp_path):
    recipe = grpo_recipe(tmp_path)
    recipe.update(3, batch_of([1.0, 0.0], [0.0, 1.0], step=9))
    assert recipe.run.stats.take()["staleness_max"] == 0


def test_recomputed_and_decoupled_log_probabilities(tmp_path):
    for actor, prox, behav in (
        ({}, -2.0, -2.0),
        ({"recompute_logprob": True}, -1.0, -1.0),
        ({"use_decoupled_loss": True}, -1.0, -2.0),
    ):
        recipe = grpo_recipe(tmp_path, **actor)
        recipe.update(6, batch_of([1.0, 0.0], [0.0, 1.0]))
        rows = recipe.run.engine.updates[0][0]
        assert rows.columns["prox"][0][-1] == prox and rows.columns["behav"][0][-1] == behav


def test_the_kl_reward_is_taken_from_the_behaviour_policy_and_every_row_counts(tmp_path):
    recipe = grpo_recipe(tmp_path, RecordingEngine(-3.0), kl_ctl=0.5)
    recipe.update(6, batch_of([1.0, 0.0], [1.0, 1.0]))
    rows = recipe.run.engine.updates[0][0]
    # behaviour -2, reference -3: -0.5 a token, summed from the end (discount 1); the group-normalized rewards are ±0.5 and 0
    assert sorted(column.tolist() for column in rows.columns["advantages"]) == sorted(
        [[0, 0, r - 1.5, r - 1.0, r - 0.5] for r in (0.5, -0.5, 0.0, 0.0)]
    )
    assert "ref" not in rows.columns
    numbers = recipe.run.stats.take()
    assert numbers["kl_rewards"] == -0.5 and numbers["reward"] == 0.75 and "kl_loss" not in numbers


def test_beta_is_in_the_loss_of_every_row_also_those_without_advantage(tmp_path):
    recipe = grpo_recipe(tmp_path, RecordingEngine(-1.5), kl_ctl=0.0, beta=0.25)
    recipe.update(6, batch_of([1.0, 1.0], [0.0, 0.0]))
    rows = recipe.run.engine.updates[0][0]
    assert len(rows) == 4 and rows.columns["ref"][0].tolist() == [0, 0, -1.5, -1.5, -1.5]
    numbers = recipe.run.stats.take()
    assert numbers["kl_loss"] == pytest.approx(np.exp(-0.5) + 0.5 - 1)  # current -1
    assert numbers["loss"] == pytest.approx(0.25 * numbers["kl_loss"])
    assert "kl_rewards" not in numbers and numbers["rows_skipped"] == 0


def test_a_batch_that_is_not_whole_groups_is_refused_in_words(tmp_path):
    with pytest.raises(RoleFailed, match="not whole groups of 2"):
        grpo_recipe(tmp_path).update(1, batch_of([1.0, 0.0, 1.0]))


def test_minibatches_are_updates_and_the_schedule_knows(tmp_path):
    recipe = grpo_recipe(tmp_path, ppo_n_minibatches=3)
    recipe.update(6, batch_of([1.0, 0.0], [0.0, 1.0]))
    assert len(recipe.run.engine.updates) == 3
    assert sum(weight for _, weight, _ in recipe.run.engine.updates) == 12.0
    assert num_updates(recipe.config, 10) == recipe.total_steps * 3 == 15
    assert num_updates(grpo_recipe(tmp_path, ppo_n_minibatches=9).config, 10) == 5 * 4


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=24),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_nothing_but_the_share_depends_on_the_number_of_ranks(drawn, num_minibatches, num_ranks):
    rows = [trajectory(0.0, completion) for completion, _ in drawn]
    advantages = [np.full(len(row.ids), float(useful), np.float32) for row, (_, useful) in zip(rows, drawn, strict=True)]
    one = shares(rows, advantages, num_minibatches, 1)
    many = shares(rows, advantages, num_minibatches, num_ranks)
    assert [part.loss_weight for part in one] == [part.loss_weight for part in many]
    assert [sorted(i for rank in part.rows for i in rank) for part in one] == [
        sorted(i for rank in part.rows for i in rank) for part in many
    ]
    assert all(len(part.rows) == num_ranks for part in many)
    assert sum(part.loss_weight for part in one) == sum(int(row.loss_mask.sum()) for row in rows)
    trained = {i for part in many for rank in part.rows for i in rank}
    assert {i for i, (_, useful) in enumerate(drawn) if useful} <= trained


def test_evaluation_is_logged_as_a_line_of_its_own(tmp_path):
    recipe = grpo_recipe(tmp_path)
    lines: list = []
    recipe.run.sinks.log = lambda step, scalars: lines.append((step, dict(scalars)))  # type: ignore[method-assign]
    assert recipe.evaluate(3)
    ((step, row),) = lines
    assert step == 3 and row["eval_reward"] == 0.25 and row["eval_num_prompts"] == 200 and row["eval_version"] == "0.3"
    recipe.run.stopping.set()
    assert recipe.evaluate(3) is None
    recipe.config.valid_dataset = None
    assert recipe.evaluate(3) == {}


def sft_recipe(tmp_path, num_rows: int = 7, batch_size: int = 3, held_out=None) -> SFT:
    config = SFTConfig(
        experiment_name="e",
        trial_name="t",
        seed=3,
        total_train_epochs=2,
        train_dataset=DatasetConfig(path="x.jsonl", batch_size=batch_size),
        model=TrainEngineConfig(path="m"),
    )
    rows = [(np.full(4, i, np.int32), np.array([False, False, True, True])) for i in range(num_rows)]
    return SFT(make_run(tmp_path, config), rows, held_out)


def test_sft_batches_are_a_function_of_the_step_and_visit_each_row_once_an_epoch(tmp_path):
    recipe, again = sft_recipe(tmp_path), sft_recipe(tmp_path)
    seen = [int(ids[0]) for step in range(1, 8) for ids, _ in recipe.batch(step)]
    assert sorted(seen[:7]) == sorted(seen[7:14]) == list(range(7)) and seen[:7] != seen[7:14]
    assert [int(ids[0]) for ids, _ in again.batch(5)] == seen[12:15]
    assert recipe.total_steps == 4  # 14 rows, 3 a batch
    assert [recipe.position(step) for step in (0, 2, 3)] == [(0, 0), (0, 6), (1, 2)]


def test_sft_trains_on_completion_tokens(tmp_path):
    recipe = sft_recipe(tmp_path)
    recipe.update(1, recipe.batch(1))
    ((rows, weight, temperature),) = recipe.run.engine.updates
    assert len(rows) == 3 and weight == 6.0 and temperature == 1.0
    assert recipe.run.stats.take()["loss"] == pytest.approx(1.0)


def test_sft_evaluation_is_the_mean_loss_of_the_held_out_tokens(tmp_path):
    recipe = sft_recipe(tmp_path)
    recipe.held_out = recipe.rows[:2]
    assert recipe.evaluate(0) == {}
    assert recipe.evaluate(1) == {"eval_loss": 1.0}
    assert recipe.run.stats.take() == {"eval_loss": 1.0}
