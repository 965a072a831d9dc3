"""Each data set of a mixture trains by its own algorithm, as if it were alone in the batch."""

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hpc_rl.algorithms import cispo, grpo
from hpc_rl.config.options.dataset import MixedSetConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.types import Batch, TrajectoryGroup
from hpc_rl.trainers.mixed_algorithms import load_mixed
from tests.unit.trainers.test_recipes import RecordingEngine, grpo_recipe, trajectory

# Current log-probability -1, proximal and behaviour -2: the ratio of each token is e.
E = np.e


def mix_of(**sets: dict) -> dict[str, MixedSetConfig]:
    return {name: MixedSetConfig(path=f"{name}.jsonl", share=0.25, **one) for name, one in sets.items()}


def update(recipe, *groups: tuple[int, list[float]]) -> tuple[dict, torch.Tensor, list[list[float]]]:
    """Train on groups of (prompt index, rewards); return metrics, gradient and the credit of each row."""
    made = [TrajectoryGroup(index, [trajectory(reward) for reward in rewards]) for index, rewards in groups]
    recipe.update(6, Batch(6, made))
    ((rows, *_),) = recipe.run.engine.updates
    (gradient_T,) = recipe.run.engine.gradients
    credit = sorted(column[column != 0].tolist() for column in rows.columns["credit"])
    return recipe.run.stats.take(), gradient_T, credit


def test_a_data_set_has_the_credit_and_the_loss_of_its_algorithm(tmp_path):
    """Shares 3/4 and 1/4: index 0 is of the first data set, index 2 of `code`.

    GRPO without a deviation: credit 0.5 and -0.5, clipped at 1.2. CISPO with group deviation: credit 1 and
    -1, weight clipped at 2, loss -weight * credit * log current with log current = -1.
    """
    mix = mix_of(code={"algorithm": "cispo", "algorithm_args": {"eps_clip_higher": 1.0}})
    recipe = grpo_recipe(tmp_path, mix=mix)
    numbers, gradient_T, credit = update(recipe, (0, [1.0, 0.0]), (2, [3.0, 1.0]))
    assert credit == [pytest.approx([one] * 3, abs=1e-4) for one in (-1.0, -0.5, 0.5, 1.0)]
    assert numbers["loss"] == pytest.approx(3 * 0.5 * (E - 1.2) / 12, abs=1e-4)  # CISPO's rows cancel
    # of -r A: 0 where clipped, else e / 2; of CISPO: -2 and 2 at its tokens
    found = sorted(gradient_T.tolist())
    wanted = sorted([0.0] * 8 + [0.0] * 3 + [0.5 * E / 12] * 3 + [-2 / 12] * 3 + [2 / 12] * 3)
    assert found == pytest.approx(wanted, abs=1e-4)


def test_the_same_algorithm_for_a_part_changes_nothing(tmp_path):
    groups = ((0, [1.0, 0.0]), (1, [3.0, 1.0]), (2, [1.0, 1.0]))
    plain = update(grpo_recipe(tmp_path), *groups)
    mix = mix_of(code={"algorithm": "grpo"}, maths={})
    mixed = update(grpo_recipe(tmp_path, mix=mix), *groups)
    assert mixed[0]["loss"] == plain[0]["loss"] and mixed[2] == plain[2]
    assert torch.equal(mixed[1], plain[1])


def test_a_normalization_over_the_batch_is_over_the_data_set(tmp_path):
    """REINFORCE++ divides by the deviation of all tokens of its rows, not of the others."""
    mix = mix_of(code={"algorithm": "reinforce_pp"})
    recipe = grpo_recipe(tmp_path, mix=mix)
    credit = update(recipe, (0, [90.0, 0.0]), (2, [1.0, 0.0]))[2]
    assert credit == [pytest.approx([one] * 3, abs=1e-3) for one in (-10.0, -1.0, 1.0, 10.0)]


def test_groups_of_environments_count_to_the_first_data_set(tmp_path):
    recipe = grpo_recipe(tmp_path, mix=mix_of(code={"algorithm": "reinforce_pp"}))
    assert update(recipe, (1 << 62, [1.0, 0.0]))[2] == [[-0.5] * 3, [0.5] * 3]


def test_dynamic_sampling_of_one_data_set(tmp_path):
    recipe = grpo_recipe(tmp_path, mix=mix_of(code={"algorithm": "dapo"}), entropy_coeff=0.1)
    update(recipe, (0, [1.0, 1.0]), (2, [1.0, 1.0]))
    ((rows, *_),) = recipe.run.engine.updates
    assert [column[0] for column in rows.columns["data_set"]] == [0.0, 0.0]


def test_a_wrong_loss_names_the_data_set(tmp_path, monkeypatch):
    odd = dataclasses.replace(grpo.GRPO, compute_credit=lambda batch, options: torch.ones(1))
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(ODD=odd))
    recipe = grpo_recipe(tmp_path, RecordingEngine(), mix=mix_of(code={"algorithm": "mine:ODD"}))
    with pytest.raises(ConfigError, match=r"mix\.code\.algorithm mine:ODD: compute_credit .*\[2, 5\]"):
        update(recipe, (0, [1.0, 0.0]), (2, [3.0, 1.0]))


def test_an_own_algorithm_of_a_data_set_has_its_arguments(tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options(cispo.Options):
        width: float = 0.5

    mine = dataclasses.replace(cispo.CISPO, options=Options)
    selects = dataclasses.replace(grpo.GRPO, select_tokens=lambda log_weight_N, options: log_weight_N > 0)
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(MINE=mine, SELECTS=selects))
    args = {"width": 2, "eps_clip_higher": 7.0}
    config = grpo_recipe(tmp_path, mix=mix_of(code={"algorithm": "mine:MINE", "algorithm_args": args})).config
    assert config.actor.algorithm_args == {}
    load_mixed(config)
    for algorithm, args, words in (
        ("mine:MINE", {"width": "x"}, r"mix\.code\.algorithm_args\.width 'x' can't be used"),
        ("mine:MINE", {"witdh": 1}, "has no witdh"),
        ("mine:SELECTS", {}, "selects tokens of the whole batch"),
        ("opd", {}, "needs distillation, which actor.algorithm does not use"),
    ):
        one = {"algorithm": algorithm, "algorithm_args": args}
        with pytest.raises(ConfigError, match=words):
            grpo_recipe(tmp_path, mix=mix_of(code=one))
