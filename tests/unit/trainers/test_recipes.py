"""What a step of GRPO asks of the engine: rows, columns, weights, whatever the number of ranks."""

import copy
import dataclasses
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipes import RecordingEngine, make_run

from hpc_rl.algorithms import grpo, token_batch
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.token_batch import Loss, TokenBatch
from hpc_rl.config.options.dataset import DatasetConfig, MixedSetConfig, PromptDatasetConfig
from hpc_rl.config.options.distillation import DistillationConfig
from hpc_rl.config.options.experiment import GRPOConfig, TeacherConfig
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.options.training import AEntConfig, NormConfig, PPOActorConfig
from hpc_rl.config.schedule import count_updates_per_step
from hpc_rl.core.algorithms import ALGORITHMS
from hpc_rl.core.errors import ConfigError, DataUnusable
from hpc_rl.core.records import LineageRecord
from hpc_rl.core.trial import write_json
from hpc_rl.core.types import REGENERATED, Batch, EvalResult, Trajectory, TrajectoryGroup, encode
from hpc_rl.rollout.batch_prefetch import FetchedBatch
from hpc_rl.trainers.grpo_recipe import GRPO, place_schedule
from hpc_rl.trainers.minibatches import divide_rows
from hpc_rl.trainers.update_watch import count_allowed_idle_steps


def trajectory(
    reward: float, completion: int = 3, prompt: int = 2, step: int = 4, finish: str = "stop"
) -> Trajectory:
    mask = np.arange(prompt + completion) >= prompt
    return Trajectory(
        ids=np.arange(prompt + completion, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -2.0, 0.0).astype(np.float32),
        lineages=np.where(mask, 0, -1).astype(np.int32),
        steps=np.where(mask, step, -1).astype(np.int32),
        reward=reward,
        finish_reason=finish,
        teacher_logprobs=np.where(mask, -1.5, 0.0).astype(np.float32),
    )


def batch_of(*rewards: list[float], step: int = 6, **more) -> Batch:
    return Batch(
        step, [TrajectoryGroup(i, [trajectory(r, **more) for r in group]) for i, group in enumerate(rewards)]
    )


class FakeRollout:
    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)  # b"": not yet

    def batch_bytes(self, step: int, lineage: int, stopping: object, within_s: float) -> bytes | None:
        if self.answers[0] == b"":
            raise TimeoutError(self.answers.pop(0))
        return self.answers.pop(0)

    def evaluate(
        self,
        label: str,
        trainer: str,
        name: str,
        together: list,
        stopping: threading.Event,
        on_progress: object,
    ) -> EvalResult | None:
        assert (trainer, name, together) == (label, "", [""])
        return None if stopping.is_set() else EvalResult(label, 200, 0.25, {"num_tokens": 9.0, "hints": 2.5})


def grpo_recipe(
    tmp_path,
    reference: RecordingEngine | None = None,
    kind=GRPOConfig,
    max_new_tokens: int = 16384,
    distillation: DistillationConfig | None = None,
    mix: dict[str, MixedSetConfig] | None = None,
    **actor,
) -> GRPO:
    norm = NormConfig(mean_level="group", std_level=None)
    config = kind(
        experiment_name="e",
        trial_name="t",
        train_dataset=PromptDatasetConfig(path="x.jsonl", batch_size=2, mix=mix or {}),
        valid_dataset=DatasetConfig(path="y.jsonl"),
        gconfig=GenerationHyperparameters(n_samples=2, temperature=0.7, max_new_tokens=max_new_tokens),
        actor=PPOActorConfig(
            path="m", **{"ppo_n_minibatches": 1, "reward_norm": norm, "kl_ctl": 0.0, **actor}
        ),
        distillation=distillation,
    )
    run = make_run(tmp_path, config)
    transport = SimpleNamespace(settle=lambda wait: None)
    return GRPO(run, FakeRollout(), transport, num_prompts=10, reference=reference)


class FakePrefetch:
    """Has the batches that a test puts into `found`."""

    def __init__(self):
        self.found, self.begun = {}, []

    def take(self, step):
        return self.found.pop(step, None)

    def begin(self, step, lineage):
        self.begun.append(step)


def test_a_batch_that_was_fetched_early_is_not_requested(tmp_path):
    recipe = grpo_recipe(tmp_path)
    recipe.prefetch, recipe.total_steps = FakePrefetch(), 7
    early = batch_of([1.0, 0.0])
    recipe.prefetch.found[6] = FetchedBatch(encode(early), early)
    assert recipe.batch(6) is early and recipe.prefetch.begun == [7]
    recipe.rollout = FakeRollout(encode(batch_of([1.0, 0.0], step=7)))
    assert recipe.batch(7).step == 7 and not recipe.rollout.answers
    assert recipe.prefetch.begun == [7], "there is no step 8"


def test_a_batch_is_requested_in_rounds_until_it_arrives_or_a_rank_stops(tmp_path):
    recipe = grpo_recipe(tmp_path)
    recipe.rollout = FakeRollout(b"", b"", encode(batch_of([1.0, 0.0])))
    assert recipe.batch(6).step == 6 and not recipe.rollout.answers
    recipe.rollout = FakeRollout(b"", None)
    assert recipe.batch(7) is None and not recipe.rollout.answers
    recipe.rollout = FakeRollout(b"", b"")
    recipe.run.stopping.set()
    assert recipe.batch(7) is None and recipe.rollout.answers == [b""]


def test_rows_without_advantage_are_skipped_and_still_count_in_the_weight(tmp_path):
    recipe = grpo_recipe(tmp_path)
    recipe.update(6, batch_of([1.0, 0.0], [1.0, 1.0]))
    ((rows, weight, temperature),) = recipe.run.engine.updates
    assert len(rows) == 2 and weight == 12.0 and temperature == 0.7
    advantages = [column.tolist() for column in rows.columns["credit"]]
    assert advantages == [[0, 0, value, value, value] for value in (0.5, -0.5)]
    numbers = recipe.run.stats.take()
    assert numbers["rows_skipped"] == 2
    assert numbers["reward"] == 0.75
    # step 6 trains on version 5; the tokens are of 4
    assert numbers["staleness_mean"] == numbers["staleness_max"] == 1
    assert (numbers["seq_len"], numbers["num_tokens"]) == (5, 20)
    assert (numbers["lr"], numbers["grad_norm"]) == (0.5, 1.0)
    # ratio e^(-1+2), clipped to 1.2 for A > 0, not for A < 0: loss = 3 * 0.5 * (-1.2 + e) / 12
    assert numbers["loss"] == pytest.approx(3 * 0.5 * (-1.2 + np.e) / 12)
    assert numbers["clip_ratio"] == 0.5 and numbers["entropy"] == 1.0


def test_without_any_advantage_the_update_still_happens(tmp_path):
    recipe = grpo_recipe(tmp_path)
    recipe.update(6, batch_of([1.0, 1.0], [0.0, 0.0]))
    ((rows, weight, _),) = recipe.run.engine.updates
    assert len(rows) == 1 and weight == 12.0 and not rows.columns["credit"][0].any()


def test_tokens_of_a_lost_lineage_are_never_younger_than_the_trainer(tmp_path):
    recipe = grpo_recipe(tmp_path)
    recipe.update(3, batch_of([1.0, 0.0], [0.0, 1.0], step=9))
    numbers = recipe.run.stats.take()
    assert numbers["staleness_max"] == 0 and numbers["given_up"] == 0  # of this very lineage


@pytest.mark.parametrize(("from_step", "num_given_up"), [(4, 0), (3, 4)])
def test_trajectories_of_weights_that_were_given_up_are_counted(tmp_path, from_step, num_given_up):
    """Lineage 2 continues lineage 0, whose version 4 made the tokens, from this step; lineage 1 came to nothing."""
    recipe = grpo_recipe(tmp_path)
    recipe.run.trial.lineages.mkdir(parents=True, exist_ok=True)
    for number, step, origin in ((0, 0, None), (1, 3, 0), (2, from_step, 0)):
        record = LineageRecord(
            lineage=number, from_step=step, from_lineage=origin, attempt="7.0", incarnation=number
        )
        write_json(recipe.run.trial.lineage(number), record.to_json())
    recipe.run.lineage = 2
    recipe.update(6, batch_of([1.0, 0.0], [0.0, 1.0]))
    numbers = recipe.run.stats.take()
    assert (numbers["given_up"], numbers["staleness_max"]) == (num_given_up, 1)


def test_tokens_that_were_generated_again_are_counted(tmp_path):
    recipe = grpo_recipe(tmp_path)
    recipe.update(6, batch_of([1.0, 0.0], [1.0, 1.0]))
    assert recipe.run.stats.take()["tokens_regenerated"] == 0
    batch = batch_of([1.0, 0.0], [1.0, 0.0])
    batch.groups[0].trajectories[1].stats[REGENERATED] = 12
    batch.groups[1].trajectories[0].stats[REGENERATED] = 5
    recipe.update(7, batch)
    assert recipe.run.stats.take()["tokens_regenerated"] == 17


def test_the_kl_reward_is_of_the_behaviour_policy_and_every_row_counts(tmp_path):
    recipe = grpo_recipe(tmp_path, RecordingEngine(-3.0), kl_ctl=0.5)
    recipe.update(6, batch_of([1.0, 0.0], [1.0, 1.0]))
    rows = recipe.run.engine.updates[0][0]
    # behaviour -2, reference -3: -0.5 a token, summed from the end (discount 1); the group-normalized rewards
    # are ±0.5 and 0
    assert sorted(column.tolist() for column in rows.columns["credit"]) == sorted(
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


def test_an_entropy_bonus_is_in_the_loss_of_every_row(tmp_path):
    recipe = grpo_recipe(tmp_path, entropy_coeff=0.25)
    recipe.update(6, batch_of([1.0, 1.0], [0.0, 0.0]))
    assert len(recipe.run.engine.updates[0][0]) == 4
    assert recipe.run.stats.take()["loss"] == pytest.approx(-0.25 * 1.0)


def test_aent_adapts_its_coefficient_and_the_state_has_it(tmp_path):
    """The entropy is 1: 0.5 above the band, so the coefficient falls by 0.05 a step, not below 0.12."""
    aent = AEntConfig(
        entropy_coeff=0.25, adaptive_coeff=True, entropy_low=0.1, entropy_high=0.5, coeff_lr=0.1,
        coeff_box_low=0.12, coeff_box_high=1.0, warmup_steps=6,
    )  # fmt: skip
    recipe = grpo_recipe(tmp_path, aent=aent)
    found = []
    for step in (6, 7, 8, 9):
        recipe.update(step, batch_of([1.0, 1.0]))
        numbers = recipe.run.stats.take()
        found.append((numbers["loss"], numbers["entropy_coeff"]))
    assert found == [
        (pytest.approx(-before), pytest.approx(after))
        for before, after in ((0.25, 0.25), (0.25, 0.2), (0.2, 0.15), (0.15, 0.12))
    ]
    run = recipe.run
    assert run.adapted == {"entropy_coeff": pytest.approx(0.12)}
    resumed = GRPO(run, FakeRollout(), SimpleNamespace(settle=lambda wait: None), num_prompts=10)
    resumed.update(10, batch_of([1.0, 1.0]))
    assert run.stats.take()["loss"] == pytest.approx(-0.12)


def test_short_completions_earn_more_by_the_length_penalty(tmp_path):
    """Lengths 3 and 7 with a reward: 0.5 and -0.5; lengths 4 and 6 without: at most 0."""
    recipe = grpo_recipe(tmp_path, length_penalty=0.4, reward_norm=None)
    rows = [trajectory(1.0, 3), trajectory(1.0, 7), trajectory(0.0, 4), trajectory(0.0, 6)]
    recipe.update(6, Batch(6, [TrajectoryGroup(0, rows)]))
    credit = [float(column[-1]) for column in recipe.run.engine.updates[0][0].columns["credit"]]
    # 0.5 - (4 - 3) / 4 = 0.25 counts as 0, and 0.5 - (6 - 3) / 4 = -0.25
    assert sorted(credit) == pytest.approx([-0.1, 0.8, 1.2])
    assert recipe.run.stats.take()["rows_skipped"] == 1


@pytest.mark.parametrize(("estimator", "kl"), [("k1", 0.5), ("k2", 0.125), ("k3", np.exp(-0.5) - 0.5)])
def test_the_estimators_of_the_divergence_in_reward_and_loss(tmp_path, estimator, kl):
    """Behaviour -2 and current -1 against references of -2.5 and -1.5: log ratios of 0.5."""
    recipe = grpo_recipe(tmp_path, RecordingEngine(-2.5), kl_ctl=0.5, kl_estimator=estimator)
    recipe.update(6, batch_of([1.0, 0.0]))
    assert recipe.run.stats.take()["kl_rewards"] == pytest.approx(-0.5 * kl)
    recipe = grpo_recipe(tmp_path, RecordingEngine(-1.5), beta=0.5, kl_loss_estimator=estimator)
    recipe.update(6, batch_of([1.0, 1.0]))
    assert recipe.run.stats.take()["loss"] == pytest.approx(0.5 * kl)


def test_dynamic_sampling_drops_groups_before_anything_is_normalized(tmp_path):
    norm = NormConfig(mean_level="batch", std_level=None)
    recipe = grpo_recipe(tmp_path, dynamic_sampling=True, reward_norm=norm)
    recipe.update(6, batch_of([5.0, 5.0], [1.0, 0.0]))
    ((rows, weight, _),) = recipe.run.engine.updates
    assert weight == 6.0  # the dropped group does not count in the loss either
    assert sorted(column[-1] for column in rows.columns["credit"]) == [-0.5, 0.5]
    numbers = recipe.run.stats.take()
    assert numbers["groups_dropped"] == 1 and numbers["reward"] == 2.75  # rewards are reported of all


def test_without_any_group_there_is_no_update_and_the_schedule_advances(tmp_path, caplog):
    recipe = grpo_recipe(tmp_path, dynamic_sampling=True, ppo_n_minibatches=2)
    recipe.update(6, batch_of([1.0, 1.0], [0.0, 0.0]))
    assert recipe.run.engine.updates == [] and recipe.run.engine.passed == 2
    numbers = recipe.run.stats.take()
    assert numbers["groups_dropped"] == 2 and numbers["update_successful"] == 0
    assert "no row is left to train on" in caplog.text


def test_fewer_minibatches_than_planned_advance_the_schedule_by_a_step(tmp_path):
    recipe = grpo_recipe(tmp_path, dynamic_sampling=True, ppo_n_minibatches=4)
    recipe.update(6, batch_of([1.0, 1.0], [1.0, 0.0]))
    assert len(recipe.run.engine.updates) == 2 and recipe.run.engine.passed == 2


def two_groups_of(*rows: Trajectory) -> Batch:
    return Batch(6, [TrajectoryGroup(i, [copy.copy(row) for row in rows]) for i in range(2)])


def cut_off(batch: Batch, group: int, row: int) -> Batch:
    batch.groups[group].trajectories[row].finish_reason = "length"
    return batch


def test_truncated_completions_leave_the_loss_and_stay_in_the_baseline(tmp_path):
    recipe = grpo_recipe(tmp_path, mask_no_eos_with_zero=True)
    recipe.update(6, cut_off(batch_of([1.0, 0.0], [1.0, 0.0]), 1, 1))
    ((rows, weight, _),) = recipe.run.engine.updates
    assert weight == 9.0
    assert sorted(column[-1] for column in rows.columns["credit"]) == [-0.5, 0.5, 0.5]
    assert recipe.run.stats.take()["rows_masked"] == 1


def test_the_longest_row_that_is_complete_is_truncated_for_areal_only(tmp_path):
    batch = batch_of([1.0, 0.0], [1.0, 0.0])  # four rows of the same length
    recipe = grpo_recipe(tmp_path, mask_no_eos_with_zero=True)
    recipe.update(6, batch)
    assert recipe.run.stats.take()["rows_masked"] == 0 and len(recipe.run.engine.updates[0][0]) == 4
    recipe = grpo_recipe(tmp_path, mask_no_eos_with_zero=True, algorithm="areal", kl_ctl=0.0)
    recipe.update(6, batch)
    ((rows, weight, _),) = recipe.run.engine.updates
    assert weight == 12.0 and not any(column.any() for column in rows.columns["credit"])


def test_areal_rewards_improbable_tokens_where_there_is_no_reference_model(tmp_path):
    recipe = grpo_recipe(tmp_path, algorithm="areal", kl_ctl=0.1)
    recipe.update(6, batch_of([1.0, 1.0], [1.0, 1.0]))
    rows = recipe.run.engine.updates[0][0]
    wanted = [0, 0, 0.6, 0.4, 0.2]  # 0.1 * 2 a token
    np.testing.assert_allclose(rows.columns["credit"][0], wanted, rtol=1e-6)


def test_overlong_completions_lose_at_most_the_factor_except_for_areal(tmp_path):
    options = {"overlong_reward_penalty": True, "overlong_tokens": 4, "overlong_penalty_factor": 2.0}
    for algorithm, penalty in (("grpo", -2.0), ("areal", -2.5)):
        recipe = grpo_recipe(tmp_path, algorithm=algorithm, max_new_tokens=20, **options)
        recipe.update(6, two_groups_of(trajectory(1.0, 16), trajectory(1.0, 21)))
        rows = recipe.run.engine.updates[0][0]
        # rewards 1 and 1 + penalty, minus their mean
        found = sorted({float(column[-1]) for column in rows.columns["credit"]})
        assert found == [penalty / 2, -penalty / 2]
        assert recipe.run.stats.take()["overlong_penalty"] == penalty / 2


def test_the_loss_by_sequence_and_by_constant_length(tmp_path):
    # ratio e, clipped to 1.2 for advantages of 0.5: token losses -0.6; of -0.5: e / 2. Lengths 2 and 4,
    # budget 10
    minus, plus = -0.6, np.e / 2
    for aggregation, loss in (
        ("token_mean", (2 * minus + 4 * plus) / 6),
        ("sequence_mean", (minus + plus) / 2),
        ("constant_length", (2 * minus + 4 * plus) / 10 / 2),
    ):
        recipe = grpo_recipe(tmp_path, loss_aggregation=aggregation)
        recipe.config.gconfig.max_new_tokens = 10
        recipe.update(6, two_groups_of(trajectory(1.0, 2), trajectory(0.0, 4)))
        assert recipe.run.stats.take()["loss"] == pytest.approx(loss), aggregation


def test_agent_stats_are_logged_and_a_missing_name_is_reported_once(tmp_path, caplog):
    recipe = grpo_recipe(tmp_path, log_agent_stats=True, log_agent_stats_keys=["num_turns", "num_trns"])
    batch = batch_of([1.0, 0.0], [1.0, 0.0])
    for i, group in enumerate(batch.groups):
        for row in group.trajectories:
            row.stats = {"num_turns": float(i + 1)}
    recipe.update(6, batch)
    recipe.update(7, batch)
    assert recipe.run.stats.take()["agent/num_turns"] == 1.5
    assert caplog.text.count("names num_trns, but the workflow gives only: num_turns") == 1


def test_what_teaching_measures_is_always_logged(tmp_path):
    batch = batch_of([1.0, 0.0], [1.0, 1.0])
    batch.groups[0].trajectories[0].stats = {"accuracy_delta": 1.0, "leak": 1.0}
    batch.groups[0].trajectories[1].stats = {"accuracy_delta": -0.5, "leak": 0.0}
    batch.groups[1].trajectories[0].stats = {"leak": 1.0}  # its row has no right answer
    recipe = grpo_recipe(tmp_path, kind=TeacherConfig)
    recipe.update(6, batch)
    numbers = recipe.run.stats.take()
    assert (numbers["accuracy_delta"], numbers["leak"]) == (0.25, pytest.approx(2 / 3))
    recipe = grpo_recipe(tmp_path)
    recipe.update(6, batch)
    assert "accuracy_delta" not in recipe.run.stats.take()


def test_groups_whose_rewards_are_all_one_are_counted_and_their_advantages_are_zero(tmp_path):
    recipe = grpo_recipe(tmp_path, reward_norm=NormConfig(mean_level="group", std_level="group"))
    recipe.update(6, batch_of([0.0, 0.0], [0.3, 0.3], [1.0, 0.0]))
    assert recipe.run.stats.take()["groups_alike"] == 2
    advantages = [column[-1] for column in recipe.run.engine.updates[0][0].columns["credit"]]
    assert len(advantages) == 2 and np.isfinite(advantages).all()


def test_groups_of_different_sizes_are_normalized_by_membership(tmp_path):
    recipe = grpo_recipe(tmp_path)
    recipe.update(1, batch_of([1.0, 0.0, 0.5, 2.5], [3.0, 3.0]))
    rows = recipe.run.engine.updates[0][0]  # the second group teaches nothing
    assert sorted(float(column[-1]) for column in rows.columns["credit"]) == [-1.0, -0.5, 1.5]
    # two prompts whose answers all earn the same teach nothing
    recipe.update(2, batch_of([0.0] * 3, [1.0] * 5))
    rows = recipe.run.engine.updates[1][0]
    assert not any(column.any() for column in rows.columns["credit"])


def test_steps_in_a_row_without_an_update_end_the_trial(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_rl.trainers.update_watch.MAX_STEPS_WITHOUT_UPDATE", 3)
    recipe = grpo_recipe(tmp_path)
    train_batch, worked = recipe.run.engine.train_batch, 0.0

    def not_finite(*args, **kwargs):
        return train_batch(*args, **kwargs) | {"update_successful": worked}

    monkeypatch.setattr(recipe.run.engine, "train_batch", not_finite)
    for step in (1, 2):
        recipe.update(step, batch_of([1.0, 0.0]))
    worked = 1.0
    recipe.update(3, batch_of([1.0, 0.0]))  # one that succeeds: counted from zero again
    worked = 0.0
    for step in (4, 5):
        recipe.update(step, batch_of([1.0, 0.0]))
    with pytest.raises(DataUnusable, match=r"3 steps in a row .* step 6: .*not finite"):
        recipe.update(6, batch_of([1.0, 0.0]))


def test_a_trial_whose_updates_were_never_finite_is_not_done(tmp_path, monkeypatch):
    """Of 5 steps, fewer than end a trial in its middle."""
    recipe = grpo_recipe(tmp_path)
    assert recipe.total_steps == 5
    engine = recipe.run.engine
    train_batch = engine.train_batch
    monkeypatch.setattr(
        engine, "train_batch", lambda *given: train_batch(*given) | {"update_successful": 0.0}
    )
    monkeypatch.setattr(engine, "counters", lambda: {"adam_steps": 0})
    for step in range(1, 5):
        recipe.update(step, batch_of([1.0, 0.0]))
        assert recipe.run.stats.take()["updates_skipped"] == 1
    with pytest.raises(DataUnusable, match=r"none of the 5 steps made an optimizer update: .*not finite"):
        recipe.update(5, batch_of([1.0, 0.0]))
    monkeypatch.setattr(engine, "counters", lambda: {"adam_steps": 1})  # of an earlier start
    recipe.update(5, batch_of([1.0, 0.0]))


def test_float16_has_the_steps_that_its_loss_scale_needs_to_come_down():
    actor = PPOActorConfig(path="m", dtype="float16")
    assert count_allowed_idle_steps(actor) >= 20 + 32 > count_allowed_idle_steps(PPOActorConfig(path="m"))


def test_minibatches_are_updates_and_the_schedule_knows(tmp_path):
    recipe = grpo_recipe(tmp_path, ppo_n_minibatches=3)
    recipe.update(6, batch_of([1.0, 0.0], [0.0, 1.0]))
    assert len(recipe.run.engine.updates) == 3
    assert sum(weight for _, weight, _ in recipe.run.engine.updates) == 12.0
    assert count_updates_per_step(recipe.config) == 3
    assert count_updates_per_step(grpo_recipe(tmp_path, ppo_n_minibatches=9).config) == 4


def sequence_ratio_loss(tokens: TokenBatch, options: token_batch.Options) -> Loss:
    """The loss of GSPO (Zheng et al., arXiv 2507.18071): one ratio per sequence, the mean over its tokens."""
    num_rows = int(tokens.row_T.max()) + 1
    gap_T = (tokens.logprobs_T - tokens.prox_T) * tokens.mask_T
    gap_R = torch.zeros(num_rows).index_add(0, tokens.row_T, gap_T)
    count_R = torch.zeros(num_rows).index_add(0, tokens.row_T, tokens.mask_T.float())
    ratio_T = (gap_R / count_R).exp()[tokens.row_T]
    clipped_T = ratio_T.clamp(1 - options.width, 1 + options.width)
    loss_T = torch.maximum(-tokens.credit_T * ratio_T, -tokens.credit_T * clipped_T)
    return Loss({"rl": tokens.mask_tokens(loss_T)}, {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Width(token_batch.Options):
    width: float


MINE = Algorithm(options=Width, compute_credit=grpo.compute_credit, compute_loss=sequence_ratio_loss)


def test_another_algorithm_is_named_by_its_import_path(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_losses", SimpleNamespace(MINE=MINE, other=3))
    mine = {"algorithm": "my_losses:MINE"}
    recipe = grpo_recipe(tmp_path, **mine, algorithm_args={"width": 0.2})
    recipe.update(6, batch_of([1.0, 0.0], [0.0, 1.0]))
    # ratio e^(-1+2) of every sequence, clipped to 1.2 where A = 0.5, not where A = -0.5
    loss = recipe.run.stats.take()["loss"]
    assert loss == pytest.approx((-0.5 * 1.2 + 0.5 * np.e) / 2)
    for args, problem in (({"widht": 1}, "no widht.*it has width"), ({}, "width")):
        with pytest.raises(ConfigError, match=problem):
            grpo_recipe(tmp_path, **mine, algorithm_args=args)
    with pytest.raises(ConfigError, match=r"Algorithm of hpc_rl\.algorithms.*not int"):
        grpo_recipe(tmp_path, algorithm="my_losses:other")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains(tmp_path, name):
    recipe = grpo_recipe(tmp_path, algorithm=name)
    recipe.update(6, batch_of([1.0, 0.0], [0.0, 1.0]))
    numbers = recipe.run.stats.take()
    assert numbers["update_successful"] == 1.0 and np.isfinite(numbers["loss"])
    names = {option.partition(".")[0] for option in ALGORITHMS[name].defaults}
    assert names <= {field.name for field in dataclasses.fields(PPOActorConfig)}


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=24),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_nothing_but_the_share_depends_on_the_number_of_ranks(drawn, num_minibatches, num_ranks):
    rows = [trajectory(0.0, completion) for completion, _ in drawn]
    advantages = [
        np.full(len(row.ids), float(useful), np.float32) for row, (_, useful) in zip(rows, drawn, strict=True)
    ]
    members = list(range(len(rows)))
    one = divide_rows(rows, advantages, members, num_minibatches, 1)
    many = divide_rows(rows, advantages, members, num_minibatches, num_ranks)
    assert [part.loss_weight for part in one] == [part.loss_weight for part in many]
    alone, together = (
        [sorted(i for rank in part.rows for i in rank) for part in made] for made in (one, many)
    )
    assert alone == together
    assert all(len(part.rows) == num_ranks for part in many)
    assert sum(part.loss_weight for part in one) == sum(int(row.loss_mask.sum()) for row in rows)
    trained = {i for part in many for rank in part.rows for i in rank}
    assert {i for i, (_, useful) in enumerate(drawn) if useful} <= trained


def test_evaluation_is_logged_as_a_line_of_its_own(tmp_path):
    recipe = grpo_recipe(tmp_path)
    lines: list = []
    recipe.run.writers.log = lambda step, scalars: lines.append((step, dict(scalars)))  # type: ignore[method-assign]
    assert recipe.evaluate(3)
    ((step, row),) = lines
    assert (step, row["eval_reward"], row["eval_num_prompts"]) == (3, 0.25, 200)
    assert (row["eval_version"], row["eval_hints"], row["eval_num_tokens"]) == ("0.3", 2.5, 9.0)
    recipe.run.stopping.set()
    assert recipe.evaluate(3) is None
    recipe.config.valid_dataset = None
    assert recipe.evaluate(3) == {}


def test_another_number_of_mini_batches_keeps_the_share_of_the_schedule(tmp_path):
    """Loaded: step 5 of 10 with 4 updates each. Now a step has 2."""
    config = GRPOConfig(
        experiment_name="e", trial_name="t", train_dataset=PromptDatasetConfig(path="rows.jsonl", batch_size=4),
        actor=PPOActorConfig(path=str(tmp_path), ppo_n_minibatches=2), total_train_steps=10,
    )  # fmt: skip
    engine = RecordingEngine()
    engine.counters = lambda: {"updates": 20 + engine.passed}
    place_schedule(engine, 5, count_updates_per_step(config))
    assert engine.counters()["updates"] == 10 == 5 * count_updates_per_step(config)
    place_schedule(engine, 5, count_updates_per_step(config))
    assert engine.counters()["updates"] == 10


def test_rewards_beyond_the_clip_are_counted_and_their_groups_have_no_advantage(tmp_path, caplog):
    recipe = grpo_recipe(tmp_path)
    recipe.update(6, batch_of([40.0, 54.0], [45.0, 50.0], [1.0, 0.0], [-30.0, 2.0]))
    numbers = recipe.run.stats.take()
    assert numbers["groups_alike"] == 0
    assert numbers["zero_advantage_groups"] == 0.5
    assert numbers["reward_clipped"] == 5 / 8
    assert "actor.reward_clip 20" in caplog.text
    recipe.update(7, batch_of([20.0, 0.0]))
    assert recipe.run.stats.take()["reward_clipped"] == 0.0


def test_a_group_of_one_reward_has_an_advantage_where_it_is_compared_with_the_batch(tmp_path):
    recipe = grpo_recipe(tmp_path, reward_norm=NormConfig(mean_level="batch", std_level=None))
    recipe.update(6, batch_of([1.0, 1.0], [0.0, 0.0]))
    numbers = recipe.run.stats.take()
    assert (numbers["groups_alike"], numbers["zero_advantage_groups"]) == (2, 0.0)


def test_groups_that_dynamic_sampling_drops_have_no_advantage(tmp_path):
    recipe = grpo_recipe(tmp_path, dynamic_sampling=True)
    recipe.update(6, batch_of([1.0, 1.0], [1.0, 0.0]))
    assert recipe.run.stats.take()["zero_advantage_groups"] == 0.5
    recipe.update(7, batch_of([1.0, 1.0], [0.0, 0.0]))
    assert recipe.run.stats.take()["zero_advantage_groups"] == 1.0


@pytest.mark.parametrize(("algorithm", "num_dropped"), [("grpo", 1), ("areal", 0)])
def test_dynamic_sampling_looks_at_rewards_without_the_overlong_penalty(tmp_path, algorithm, num_dropped):
    """DAPO's constraint (equation 11) counts right answers; AReaL v0.3 compared penalized rewards."""
    overlong = {"overlong_reward_penalty": True, "overlong_tokens": 4, "overlong_penalty_factor": 1.0}
    recipe = grpo_recipe(tmp_path, algorithm=algorithm, dynamic_sampling=True, max_new_tokens=20, **overlong)
    alike = TrajectoryGroup(0, [trajectory(1.0, 3), trajectory(1.0, 19)])  # the second is penalized
    differ = TrajectoryGroup(1, [trajectory(1.0, 3), trajectory(0.0, 3)])
    recipe.update(6, Batch(6, [alike, differ]))
    assert recipe.run.stats.take()["groups_dropped"] == num_dropped
    assert len(recipe.run.engine.updates[0][0]) == (2 if num_dropped else 4)


def test_a_trial_that_learns_nothing_says_so_while_it_runs(tmp_path, caplog):
    recipe = grpo_recipe(tmp_path)
    for step in range(1, 12):
        recipe.update(step, batch_of([1.0, 1.0], [0.0, 0.0]))
        recipe.run.log(step)
        assert ("NOTHING IS LEARNED" in caplog.text) == (step >= 10)
    assert caplog.text.count("NOTHING IS LEARNED") == 1
    recipe.update(12, batch_of([1.0, 0.0]))
    recipe.run.log(12)
    assert recipe.run.idle.in_a_row == 0


def test_the_log_probabilities_of_a_teacher_are_the_credit_of_the_tokens(tmp_path):
    recipe = grpo_recipe(tmp_path, algorithm="opd")
    batch = batch_of([1.0, 0.0], [1.0, 1.0])
    rows = [row for group in batch.groups for row in group.trajectories]
    for row, gap in zip(rows, (0.5, -1.0, 0.0, 2.0), strict=True):
        row.teacher_logprobs = np.where(row.loss_mask, row.logprobs + gap, 0).astype(np.float32)
    recipe.update(6, batch)
    ((sent, weight, _),) = recipe.run.engine.updates
    # the row that the teacher finds as likely as the policy adds nothing, and counts in the divisor
    assert weight == 12.0 and sorted(one[-1] for one in sent.columns["credit"]) == [-1.0, 0.5, 2.0]
    assert all(one[0] == 0 for one in sent.columns["credit"])
    numbers = recipe.run.stats.take()
    # the engine's log-probabilities are -1, the teacher's -1.5, -3 and 0
    assert numbers["teacher_kl"] == pytest.approx(np.mean([-1 + 1.5, -1 + 3, -1 - 0]))
    # a policy that is recomputed at the start of the step
    recipe = grpo_recipe(tmp_path, algorithm="opd", recompute_logprob=True)
    recipe.update(6, batch)
    ((sent, _, _),) = recipe.run.engine.updates
    assert sorted(one[-1] for one in sent.columns["credit"]) == [-2.0, -1.0, -0.5, 1.0]


def test_the_likely_tokens_of_a_teacher_are_a_term_of_the_loss_in_place_of_credit(tmp_path):
    recipe = grpo_recipe(tmp_path, algorithm="opd", distillation=DistillationConfig(top_k=2))
    batch = batch_of([1.0, 0.0], [1.0, 1.0])
    for group in batch.groups:
        for row in group.trajectories:
            row.teacher_top_ids = np.tile(np.array([3, 7], np.int32), (len(row.ids), 1))
            likely = np.log(np.array([0.5, 0.0], np.float32), where=[True, False], out=np.full(2, -np.inf))
            row.teacher_top_logprobs = np.tile(likely.astype(np.float32), (len(row.ids), 1))
    recipe.update(6, batch)
    ((sent, weight, _),) = recipe.run.engine.updates
    assert len(sent) == 4 and weight == 12.0  # no credit, but all rows are trained on
    assert not any(one.any() for one in sent.columns["credit"])
    assert sent.columns["top_ids"][0].tolist() == [[3, 7]] * 5
    numbers = recipe.run.stats.take()
    # the policy's log-probabilities are -1: 0.5 (log 0.5 + 1) + 0.5 (log 0.5 - log(1 - 1 / e))
    wanted = 0.5 * (np.log(0.5) + 1) + 0.5 * (np.log(0.5) - np.log(1 - np.exp(-1)))
    assert numbers["teacher_forward_kl"] == pytest.approx(wanted, abs=1e-6)
    assert numbers["loss"] == pytest.approx(wanted, abs=1e-6) and numbers["zero_advantage_groups"] == 0


def test_samples_of_a_teacher_have_a_cross_entropy_and_no_mismatch(tmp_path):
    recipe = grpo_recipe(tmp_path, algorithm="sft_distill")
    batch = batch_of([1.0, 0.0], [1.0, 1.0])
    for group in batch.groups:
        for row in group.trajectories:
            row.teacher_logprobs = None  # nobody asks it about its own samples
    recipe.update(6, batch)
    ((sent, weight, _),) = recipe.run.engine.updates
    assert len(sent) == 4 and weight == 12.0
    numbers = recipe.run.stats.take()
    assert numbers["loss"] == 1.0 and not any(name.startswith("mismatch_log_w_m") for name in numbers)
