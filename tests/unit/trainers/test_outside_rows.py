"""What environments may send with their groups: absent log-probabilities, advantages, reference values."""

import dataclasses

import numpy as np
import pytest
from recipes import RecordingEngine

from hpc_rl.config.options.environments import EnvironmentsConfig
from hpc_rl.core.types import Batch, TrajectoryGroup, encode
from hpc_rl.rollout.batch_log.ledger import FIRST_OUTSIDE
from tests.unit.trainers.test_recipes import FakeRollout, grpo_recipe, trajectory


def batch(*rows):
    return Batch(6, [TrajectoryGroup(FIRST_OUTSIDE + 3, list(rows[:2])), TrajectoryGroup(5, list(rows[2:]))])


def with_(row, **changes):
    return dataclasses.replace(row, **changes)


def test_absent_logprobs_are_those_of_the_model_at_the_start_of_the_step(tmp_path):
    recipe = grpo_recipe(tmp_path)  # the engine's log-probability of every token is -1, the rows' is -2
    rows = [trajectory(1.0), trajectory(0.0), trajectory(1.0), trajectory(0.0)]
    recipe.update(6, batch(with_(rows[0], has_logprobs=False), *rows[1:]))
    (sequences, *_), *_ = recipe.run.engine.updates
    behav = sorted(float(column[-1]) for column in sequences.columns["behav"])
    prox = sorted(float(column[-1]) for column in sequences.columns["prox"])
    assert behav == prox == [-2.0, -2.0, -2.0, -1.0]


def test_sent_advantages_take_the_place_of_the_computed_ones_where_the_mask_is(tmp_path):
    recipe = grpo_recipe(tmp_path)
    sent = np.array([9, 9, 1, 2, 3], np.float32)
    rows = [trajectory(1.0), trajectory(0.0), trajectory(1.0), trajectory(0.0)]
    recipe.update(6, batch(with_(rows[0], advantages=sent), *rows[1:]))
    (sequences, *_), *_ = recipe.run.engine.updates
    found = [column.tolist() for column in sequences.columns["credit"]]
    assert [0, 0, 1, 2, 3] in found and [0, 0, -0.5, -0.5, -0.5] in found


def test_a_row_with_zero_advantage_counts_in_its_group_only(tmp_path):
    recipe = grpo_recipe(tmp_path)
    rows = [trajectory(1.0), trajectory(0.0), trajectory(1.0), trajectory(0.0)]
    recipe.update(6, batch(with_(rows[0], zero_advantage=True), *rows[1:]))
    (sequences, weight, _), *_ = recipe.run.engine.updates
    found = sorted(column[-1] for column in sequences.columns["credit"])
    assert found == [-0.5, -0.5, 0.5] and weight == 12.0


def test_rows_sampled_at_another_temperature_bring_their_own(tmp_path):
    recipe = grpo_recipe(tmp_path)  # the trial samples at 0.7
    rows = [trajectory(1.0), trajectory(0.0), trajectory(1.0), trajectory(0.0)]
    own = np.array([0.7, 0.7, 0.25, 0.25, 0.0], np.float32)  # greedy at the end
    recipe.update(6, batch(with_(rows[0], temperatures=own), *rows[1:]))
    (sequences, *_), *_ = recipe.run.engine.updates
    sent = sorted(column.tolist() for column in sequences.columns["temperature"])
    assert sent == [pytest.approx([0.7, 0.7, 0.25, 0.25, 1.0]), *[pytest.approx([0.7] * 5)] * 3]


@pytest.mark.parametrize("algorithm", ["grpo", "areal"])
def test_groups_of_other_sizes_are_normalized_as_they_are(tmp_path, algorithm):
    recipe = grpo_recipe(tmp_path, algorithm=algorithm, kl_ctl=0.0)  # n_samples is 2
    recipe.config.environments = EnvironmentsConfig()
    groups = ((1.0, 0.0, 0.5), (4.0,), (2.0, 0.0))
    made = [TrajectoryGroup(FIRST_OUTSIDE + i, list(map(trajectory, one))) for i, one in enumerate(groups)]
    recipe.update(6, Batch(6, made))
    (sequences, *_), *_ = recipe.run.engine.updates
    found = sorted(float(column[-1]) for column in sequences.columns["credit"])
    assert found == [-1.0, -0.5, 0.5, 1.0]  # of 0.5 and 4.0 too, but they are 0


def test_sent_reference_values_are_used_for_their_rows(tmp_path):
    recipe = grpo_recipe(tmp_path, RecordingEngine(-1.5), kl_ctl=0.0, beta=0.25)
    sent = np.array([0, 0, -3, -3, -3], np.float32)
    rows = [trajectory(1.0), trajectory(0.0), trajectory(1.0), trajectory(0.0)]
    recipe.update(6, batch(with_(rows[0], ref_logprobs=sent), *rows[1:]))
    (sequences, *_), *_ = recipe.run.engine.updates
    assert sorted(float(column[-1]) for column in sequences.columns["ref"]) == [-3.0, -1.5, -1.5, -1.5]


def test_the_frontier_counts_our_own_prompts(tmp_path):
    recipe = grpo_recipe(tmp_path)
    rows = [trajectory(1.0), trajectory(0.0), trajectory(1.0), trajectory(0.0)]
    recipe.rollout = FakeRollout(encode(batch(*rows)))
    recipe.batch(6)
    assert recipe.frontier(6) == {"sealed": 6, "newest_prompt": 5}
