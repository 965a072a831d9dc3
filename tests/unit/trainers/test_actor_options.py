"""Each option of `actor` from a file to the loss: what it changes, by hand."""

import math

import numpy as np
import pytest
from recipes import RecordingEngine, make_run

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.types import Batch, Trajectory, TrajectoryGroup
from hpc_rl.trainers.grpo_recipe import GRPO

WORDS = [
    *("experiment_name=e", "trial_name=t", "actor.path=/m", "train_dataset.path=/d"),
    *("train_dataset.batch_size=2", "cluster.n_gpus_per_node=0", "gconfig.n_samples=2"),
    *("gconfig.max_new_tokens=4", "actor.ppo_n_minibatches=1"),
]
REWARDS = ([3.0, -1.0], [2.0, 6.0])
PROMPT, COMPLETION = 2, 3  # tokens


def trained(tmp_path, overrides: str = "", rewards=REWARDS, finish: str = "stop") -> GRPO:
    """Return the recipe after a step: servers gave each token -2, the trainer gives -1, a reference -3."""
    config = check(load([], [*WORDS, *overrides.split()]), files=False).config
    run = make_run(tmp_path, config)
    reference = config.ref and RecordingEngine(-3.0)
    recipe = GRPO(run, None, None, 10, reference)  # type: ignore[arg-type]
    length = PROMPT + COMPLETION
    mask = np.arange(length) >= PROMPT
    rows = [
        [
            Trajectory(
                ids=np.arange(length, dtype=np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -2.0, 0.0).astype(np.float32),
                lineages=np.where(mask, 0, -1).astype(np.int32),
                steps=np.where(mask, 0, -1).astype(np.int32),
                reward=reward,
                finish_reason=finish if reward == 6.0 else "stop",
                stats={"num_turns": 2.0},
            )
            for reward in group
        ]
        for group in rewards
    ]
    recipe.update(1, Batch(1, [TrajectoryGroup(i, group) for i, group in enumerate(rows)]))
    return recipe


def advantages(recipe: GRPO) -> list[list[float]]:
    """Those of the completions, by row."""
    columns = [column for rows, *_ in recipe.run.engine.updates for column in rows.columns["credit"]]
    assert not any(column[:PROMPT].any() for column in columns)
    return [column[PROMPT:].tolist() for column in columns]


EACH_TOKEN = [3.0, -1.0, 2.0, 6.0]
RMS = [3 / 5**0.5, -1 / 5**0.5, 2 / 20**0.5, 6 / 20**0.5]  # of the groups, where no mean is subtracted
GROUP = "actor.reward_norm.mean_level=group actor.reward_norm.std_level"
OVERLONG = "actor.overlong_reward_penalty=true actor.overlong_tokens=2 actor.overlong_penalty_factor=4"


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ("", EACH_TOKEN),
        ("actor.reward_bias=0.5", [3.5, -0.5, 2.5, 6.5]),
        ("actor.reward_scaling=2", [6, -2, 4, 12]),
        ("actor.reward_clip=2.5", [2.5, -1, 2, 2.5]),
        ("actor.reward_bias=1 actor.reward_scaling=2 actor.reward_clip=7", [7, 0.0, 6, 7]),
        ("actor.reward_norm.mean_level=group actor.reward_norm.std_level=null", [2, -2, -2, 2]),
        ("actor.reward_norm.mean_level=null actor.reward_norm.std_level=group", RMS),
        ("actor.reward_norm.mean_level=group", [1, -1, -1, 1]),  # the deviation is of the batch
        ("actor.adv_norm.mean_level=group actor.adv_norm.std_level=null", [2, -2, -2, 2]),
        ("actor.adv_norm.mean_level=null actor.adv_norm.std_level=group", RMS),
        (f"{GROUP}=null actor.reward_norm.mean_leave1out=true", [4, -4, -4, 4]),
        (f"{GROUP}=group actor.reward_norm.eps=3", [0.4, -0.4, -0.4, 0.4]),
        (f"{GROUP}=group actor.reward_norm.std_unbiased=true", [0.5**0.5 * sign for sign in (1, -1, -1, 1)]),
        (OVERLONG, [1, -3, 0.0, 4]),  # 3 of 4 tokens: half of the factor
        ("ref.path=/r actor.kl_ctl=0.5", None),
    ],
)
def test_rewards_and_advantages(tmp_path, overrides, wanted):
    """Without a discount the advantage of each token is what its completion earns."""
    found = advantages(trained(tmp_path, overrides))
    if wanted is None:  # behaviour -2, reference -3: -0.5 for each token from here to the end
        rows = [[reward - 1.5, reward - 1.0, reward - 0.5] for reward in EACH_TOKEN]
    else:
        rows = [[reward] * COMPLETION for reward in wanted if reward]
    np.testing.assert_allclose(found, rows, atol=1e-4)


@pytest.mark.parametrize("option", ["discount", "gae_lambda"])
def test_later_rewards_count_less(tmp_path, option):
    found = advantages(trained(tmp_path, f"actor.{option}=0.5"))
    np.testing.assert_allclose(found, [[reward / 4, reward / 2, reward] for reward in EACH_TOKEN])


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        # the ratio of every token is e: bounded by 1.2 where the advantage, 3 or -1, is positive
        ("", (-3 * 1.2 + math.e) / 2),
        ("actor.eps_clip=0.4", (-3 * 1.4 + math.e) / 2),
        ("actor.eps_clip_higher=0.7", (-3 * 1.7 + math.e) / 2),
        ("actor.c_clip=1.5", (-3 * 1.2 + 1.5) / 2),
        ("actor.recompute_logprob=true", (-3 + 1) / 2),  # ratio 1
        ("actor.loss_aggregation=constant_length", (-3 * 1.2 + math.e) / 2 * COMPLETION / 4),
        ("actor.use_decoupled_loss=true", math.e * (-3 + 1) / 2),  # and weight e
        ("actor.use_decoupled_loss=true actor.behav_imp_weight_cap=3", math.e * (-3 + 1) / 2),
        ("actor.use_decoupled_loss=true actor.behav_imp_weight_cap=2.5", 0.0),
        ("ref.path=/r actor.beta=0.25", (-3 * 1.2 + math.e) / 2 + 0.25 * (math.exp(-2) + 2 - 1)),
    ],
)
def test_the_loss(tmp_path, overrides, wanted):
    numbers = trained(tmp_path, overrides, ([3.0, -1.0],)).run.stats.take()
    assert numbers["loss"] == pytest.approx(wanted, abs=1e-5)


def test_rows_that_are_left_out_and_updates(tmp_path):
    flat = ([3.0, -1.0], [6.0, 6.0])
    assert len(advantages(trained(tmp_path, "", flat))) == 4
    assert len(advantages(trained(tmp_path, "actor.dynamic_sampling=true", flat))) == 2
    masked = trained(tmp_path, "actor.mask_no_eos_with_zero=true", finish="length")
    np.testing.assert_allclose(advantages(masked), [[reward] * COMPLETION for reward in (3, -1, 2)])
    assert [
        len(trained(tmp_path, words).run.engine.updates) for words in ("", "actor.ppo_n_minibatches=2")
    ] == [1, 2]


def test_agent_stats_that_are_named_are_logged(tmp_path):
    keys = "actor.log_agent_stats_keys=[num_turns]"
    numbers = trained(tmp_path, f"actor.log_agent_stats=true {keys}").run.stats.take()
    assert numbers["agent/num_turns"] == 2.0
    assert "agent/num_turns" not in trained(tmp_path, keys).run.stats.take()


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        ("gconfig.temperature=0.7", 0.7),
        ("gconfig.temperature=0", 1.0),
        # servers sample at 0 and report log-probabilities at 1
        ("gconfig.temperature=0.7 gconfig.greedy=true", 1.0),
    ],
)
def test_log_probabilities_are_of_the_temperature_of_generation(tmp_path, sampling, wanted):
    recipe = trained(tmp_path, f"{sampling} gconfig.n_samples=1", ([3.0], [-1.0]))
    ((_, _, temperature),) = recipe.run.engine.updates
    assert temperature == wanted
