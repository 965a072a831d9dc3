"""The off-policy correction in a step: which tokens count, by what they are divided, and what is measured."""

import numpy as np
import pytest
import torch
from recipes import RecordingEngine

from hpc_rl.config.options.training import RolloutCorrectionConfig
from hpc_rl.core.algorithms import ALGORITHMS
from hpc_rl.core.types import Batch
from hpc_rl.trainers.grpo_recipe import GRPO
from tests.unit.trainers.test_recipes import batch_of, grpo_recipe

# Sampled at log-probability -2, and current -1 with credit 0.5 (ratio clipped to 1.2) or -0.5 per row
E = np.e


class Trainer(RecordingEngine):
    """Recomputes given log-probabilities of a completion of three tokens."""

    def __init__(self, *logprobs: float) -> None:
        super().__init__()
        self.recomputed = logprobs

    def logprobs(self, rows, temperature):
        return [np.array([0, 0, *self.recomputed], np.float32) for _ in rows.ids]


def make_recipe(tmp_path, *recomputed: float, **actor) -> GRPO:
    recipe = grpo_recipe(tmp_path, **actor)
    recipe.run.engine = Trainer(*recomputed)
    return recipe


def run_step(recipe: GRPO) -> tuple[dict, float]:
    """Train on one group with rewards 1 and 0, tokens of the version before the newest; return metrics."""
    recipe.update(6, batch_of([1.0, 0.0]))
    ((_, weight, _),) = recipe.run.engine.updates
    return recipe.run.stats.take(), weight


def make_fresh(batch: Batch) -> Batch:
    """Make the tokens of the newest weights, version 5."""
    for row in batch.groups[0].trajectories:
        row.steps[row.loss_mask] = 5
    return batch


def test_excluded_tokens_leave_the_loss_and_its_divisor(tmp_path):
    """w is 1, e and 1/e; the ratio of the token with w = 1 is e, and 1.2 where it is clipped."""
    recipe = make_recipe(
        tmp_path, -2.0, -1.0, -3.0, rollout_correction=RolloutCorrectionConfig(mode="mask", lower=0.5)
    )
    numbers, weight = run_step(recipe)
    assert weight == 2.0 and numbers["mismatch_excluded"] == pytest.approx(2 / 3)
    assert numbers["loss"] == pytest.approx((-0.5 * 1.2 + 0.5 * E) / 2)
    assert numbers["behave_dropped"] == 4


@pytest.mark.parametrize(("aggregation", "divisor"), [("sequence_mean", 1), ("constant_length", 10)])
def test_the_mean_of_a_completion_is_over_the_tokens_that_stay(tmp_path, aggregation, divisor):
    recipe = make_recipe(
        tmp_path, -2.0, -1.0, -3.0, max_new_tokens=10, loss_aggregation=aggregation,
        rollout_correction=RolloutCorrectionConfig(mode="mask", lower=0.5),
    )  # fmt: skip
    numbers, weight = run_step(recipe)
    assert weight == 2.0
    assert numbers["loss"] == pytest.approx((-0.5 * 1.2 + 0.5 * E) / 2 / divisor)


def test_a_completion_without_tokens_is_skipped_and_leaves_the_divisor(tmp_path):
    correction = RolloutCorrectionConfig(level="sequence", mode="mask")
    recipe = make_recipe(tmp_path, -1.0, -1.0, -1.0, rollout_correction=correction)
    numbers, weight = run_step(recipe)
    assert weight == 1.0 and numbers["mismatch_excluded"] == 1 and numbers["loss"] == 0


def test_truncated_weights_keep_every_token(tmp_path):
    """Weights 1, 2 and 1/e times ratios e, 1 and e^2; 1.2 where they are clipped."""
    recipe = make_recipe(tmp_path, -2.0, -1.0, -3.0, rollout_correction=RolloutCorrectionConfig())
    numbers, weight = run_step(recipe)
    clipped, plain = 1 * 1.2 + 2 * 1 + 1 / E * 1.2, 1 * E + 2 * 1 + 1 / E * E**2
    assert weight == 6.0 and numbers["loss"] == pytest.approx(0.5 * (plain - clipped) / 6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask", "icepop"])
def test_the_same_probabilities_change_nothing(tmp_path, algorithm, level, mode):
    """With w = 1 and bounds around it, neither the loss nor its divisor nor its gradient changes."""
    same = {"algorithm": algorithm, "recompute_logprob": True, "use_decoupled_loss": True}
    same["eps_clip_higher"] = 9.0  # the ratio is e
    plain = make_recipe(tmp_path, -2.0, -2.0, -2.0, **same)
    before, weight = run_step(plain)
    correction = RolloutCorrectionConfig(level=level, mode=mode, lower=0.5, upper=5.0)
    recipe = make_recipe(tmp_path, -2.0, -2.0, -2.0, **same, rollout_correction=correction)
    after, corrected_weight = run_step(recipe)
    assert (after["loss"], corrected_weight) == (before["loss"], weight)
    (gradient_T,) = plain.run.engine.gradients
    assert gradient_T.any() and torch.equal(gradient_T, recipe.run.engine.gradients[0])
    assert after.get("mismatch_excluded", 0.0) == after["behave_dropped"] == 0.0


def test_m2po_excludes_over_the_whole_batch(tmp_path):
    """Squares 0, 0.01 and 1 per row: without the largest, the mean is 0.005."""
    recipe = make_recipe(
        tmp_path, -2.0, -1.9, -1.0, algorithm="m2po", m2_threshold=0.04, use_decoupled_loss=True
    )
    numbers, weight = run_step(recipe)
    assert weight == 4.0 and numbers["mismatch_excluded"] == pytest.approx(1 / 3)
    w = np.exp(0.1)
    clipped, plain = 1.2 + 1.2 * w, E + np.exp(0.9) * w
    assert numbers["loss"] == pytest.approx(0.5 * (plain - clipped) / 4)


def test_loglinear_needs_no_pass_and_takes_the_versions(tmp_path):
    """Tokens are one version older than the step's start: log prox is halfway between -2 and -1."""
    recipe = make_recipe(tmp_path, use_decoupled_loss=True, prox_logp_method="loglinear")
    recipe.run.engine.logprobs = None  # any pass fails
    numbers, _ = run_step(recipe)
    ratio = w = np.exp(0.5)
    assert numbers["loss"] == pytest.approx(0.5 * w * (ratio - 1.2) / 2)
    # the tokens of the newest weights are at the proximal policy
    recipe.update(6, make_fresh(batch_of([1.0, 0.0])))
    assert recipe.run.stats.take()["loss"] == pytest.approx(0.5 * (E - 1.2) / 2)


def test_the_error_of_loglinear_is_measured_on_demand(tmp_path):
    recipe = make_recipe(tmp_path, -1.5, -1.4, -1.3, use_decoupled_loss=True, prox_logp_method="metrics")
    numbers, _ = run_step(recipe)
    assert numbers["loglinear_error"] == pytest.approx(0.1)
    assert numbers["behave_imp_weight"] == pytest.approx(np.exp([0.5, 0.6, 0.7]).mean())


def test_every_step_measures_the_mismatch(tmp_path):
    """Without recomputed log-probabilities, the current ones of the first update are compared."""
    recipe = grpo_recipe(tmp_path, ppo_n_minibatches=2)
    recipe.update(6, batch_of([1.0, 0.0]))
    numbers = recipe.run.stats.take()
    assert (numbers["mismatch_log_w_mean"], numbers["mismatch_log_w_max"]) == (1.0, 1.0)
    assert numbers["mismatch_kl"] == pytest.approx(E - 2) and numbers["mismatch_ess"] == pytest.approx(1)
    assert "mismatch_log_w_fresh" not in numbers
    recipe.update(6, make_fresh(batch_of([1.0, 0.0])))
    assert recipe.run.stats.take()["mismatch_log_w_fresh"] == 1.0


def test_recomputed_log_probabilities_are_compared_with_the_sampled_ones(tmp_path):
    numbers, _ = run_step(make_recipe(tmp_path, -2.0, -1.5, -4.0, recompute_logprob=True))
    assert numbers["mismatch_log_w_mean"] == pytest.approx(2.5 / 3)
    assert numbers["mismatch_log_w_max"] == 2.0
    w = np.exp([0.0, 0.5, -2.0])
    assert numbers["mismatch_ess"] == pytest.approx(w.sum() ** 2 / (3 * (w**2).sum()))
    assert numbers["behave_imp_weight"] == 1  # measured, not corrected


def test_the_first_update_needs_no_pass_before_it(tmp_path):
    """Its own forward pass has the proximal log-probabilities, -1; the tokens were sampled at -2."""
    recipe = make_recipe(tmp_path, use_decoupled_loss=True)
    recipe.run.engine.has_dropout = False
    recipe.run.engine.logprobs = None  # any pass fails
    numbers, _ = run_step(recipe)
    assert numbers["importance_weight"] == 1 and numbers["behave_imp_weight"] == pytest.approx(E)
    assert numbers["mismatch_log_w_mean"] == 1
    ((rows, *_),) = recipe.run.engine.updates
    assert "prox" not in rows.columns


@pytest.mark.parametrize("options", [{"use_decoupled_loss": True}, {"recompute_logprob": True}])
def test_later_updates_take_the_log_probabilities_of_the_start(tmp_path, options):
    recipe = make_recipe(tmp_path, -1.5, -1.5, -1.5, ppo_n_minibatches=2, **options)
    recipe.run.engine.has_dropout = False
    recomputed, compute = [], recipe.run.engine.logprobs
    recipe.run.engine.logprobs = lambda rows, at: recomputed.extend(rows.ids) or compute(rows, at)
    recipe.update(6, batch_of([1.0, 0.0, 1.0, 0.0]))
    (first, *_), (second, *_) = recipe.run.engine.updates
    assert len(recomputed) == len(second.ids) == 2 and len(first.ids) == 2
    assert "prox" not in first.columns and second.columns["prox"][0][-1] == -1.5
    assert ("behav" in first.columns) == bool(options.get("use_decoupled_loss"))
