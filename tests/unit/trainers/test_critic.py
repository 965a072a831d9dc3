"""The critic: values of the tokens, credit and returns from them, its updates, and the warm-up."""

import dataclasses

import numpy as np
import plain_training
import pytest
import torch
from recipes import RecordingEngine, make_run
from small_engines import config_of

from hpc_rl.algorithms.rewards import compute_credit
from hpc_rl.algorithms.token_batch import Options, RewardBatch
from hpc_rl.config.options.dataset import PromptDatasetConfig
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.options.training import PPOActorConfig, PPOCriticConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.types import Batch, TrajectoryGroup
from hpc_rl.engines.base import Sequences
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.stats.tracker import Tracker
from hpc_rl.trainers.critic import Critic, move_left, move_right
from hpc_rl.trainers.grpo_recipe import GRPO
from hpc_rl.trainers.ranks import Ranks
from tests.unit.trainers.test_recipes import FakeRollout, trajectory


class ScoringEngine(RecordingEngine):
    """A critic whose score at each token is a tenth of the token's id."""

    def logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        both = zip(rows.ids, rows.columns["loss_mask"], strict=True)
        return [np.where(mask, ids / 10, 0.0).astype(np.float32) for ids, mask in both]


def ppo_recipe(tmp_path, engine: RecordingEngine, critic: dict | None = None, **actor) -> GRPO:
    options = PPOCriticConfig(path="c", **{"ppo_n_minibatches": 1, **(critic or {})})
    config = GRPOConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=PromptDatasetConfig(path="x.jsonl", batch_size=2),
        gconfig=GenerationHyperparameters(n_samples=2),
        actor=PPOActorConfig(
            path="m", **{"algorithm": "ppo", "ppo_n_minibatches": 1, "kl_ctl": 0.0, **actor}
        ),
        critic=options,
    )
    run = make_run(tmp_path, config)
    run.critic = engine
    return GRPO(run, FakeRollout(), None, 10, critic=Critic(engine, options, Ranks(), 1))


def four_rows(*rewards: float, finish: str = "stop") -> Batch:
    rows = [trajectory(reward, finish=finish) for reward in rewards]
    return Batch(1, [TrajectoryGroup(0, rows[:2]), TrajectoryGroup(1, rows[2:])])


def test_credit_returns_and_the_update_of_the_critic_by_hand(tmp_path):
    critic = ScoringEngine()
    recipe = ppo_recipe(tmp_path, critic, {"eps_clip": 0.5}, discount=0.5, gae_lambda=0.5)
    recipe.update(1, four_rows(1.0, 0.0, 2.0, 1.0))
    # ids 0 1 | 2 3 4: the scores at 1, 2 and 3 are the values of the tokens 2, 3 and 4
    values = np.array([0, 0, 0.1, 0.2, 0.3])
    advantages = {}
    for reward in (1.0, 0.0, 2.0):
        last = reward - 0.3
        middle = (0.5 * 0.3 - 0.2) + 0.25 * last
        first = (0.5 * 0.2 - 0.1) + 0.25 * middle
        advantages[reward] = np.array([0, 0, first, middle, last])
    ((policy_rows, _, _),) = recipe.run.engine.updates
    found = sorted(column.tolist() for column in policy_rows.columns["credit"])
    wanted = sorted(advantages[reward].tolist() for reward in (1.0, 0.0, 2.0, 1.0))
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other)
    ((rows, weight, temperature),) = critic.updates
    assert (len(rows), weight, temperature) == (4, 12.0, 1.0)
    assert [mask.tolist() for mask in rows.columns["loss_mask"]] == [[False, True, True, True, False]] * 4
    assert rows.columns["values"][0] == pytest.approx([0, 0.1, 0.2, 0.3, 0])
    found = sorted(column.tolist() for column in rows.columns["returns"])
    wanted = sorted(move_left(advantages[reward] + values).tolist() for reward in (1.0, 0.0, 2.0, 1.0))
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other)
    # the new values are -1: the ones within 0.5 of the old values are nearer to the returns
    returns = np.concatenate([(advantages[reward] + values)[2:] for reward in (1.0, 0.0, 2.0, 1.0)])
    numbers = recipe.run.stats.take()
    assert numbers["value_loss"] == pytest.approx(float(np.square(-1 - returns).mean() / 2))
    assert numbers["value_clip_ratio"] == 0.0 and numbers["critic_lr"] == 0.5
    assert numbers["returns"] == pytest.approx(returns.mean()) and numbers["values"] == pytest.approx(0.2)
    left = returns - np.tile([0.1, 0.2, 0.3], 4)
    assert numbers["explained_variance"] == pytest.approx(1 - left.var() / returns.var())


def test_a_critic_that_returns_zero_leaves_the_discounted_reward(tmp_path):
    """REINFORCE with discount: the credit of a token is the discounted rest of the reward."""
    recipe = ppo_recipe(tmp_path, RecordingEngine(logprob=0.0), discount=0.9)
    recipe.update(1, four_rows(1.0, -1.0, 2.0, 0.5))
    ((rows, *_),) = recipe.run.engine.updates
    found = sorted(column.tolist() for column in rows.columns["credit"])
    wanted = sorted([0.0, 0.0, 0.81 * r, 0.9 * r, r] for r in (1.0, -1.0, 2.0, 0.5))
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other)
    mask_BT = torch.ones(4, 3, dtype=torch.bool)
    rewards_B = torch.tensor([1.0, -1.0, 2.0, 0.5])
    batch = RewardBatch(rewards_B, mask_BT, values_BT=torch.zeros(4, 3))
    without = batch._replace(values_BT=None)
    options = Options(discount=0.9, gae_lambda=0.7)
    torch.testing.assert_close(compute_credit(batch, options), compute_credit(without, options))


def test_the_first_steps_train_the_critic_alone(tmp_path):
    critic = ScoringEngine()
    recipe = ppo_recipe(tmp_path, critic, {"warmup_steps": 2})
    for step in (1, 2, 3):
        recipe.update(step, four_rows(1.0, 0.0, 2.0, 1.0))
        numbers = recipe.run.stats.take()
        assert ("loss" in numbers) == ("update_successful" in numbers) == (step == 3)
    assert len(critic.updates) == 3 and len(recipe.run.engine.updates) == 1
    assert recipe.run.engine.passed == 2  # the schedule went on


def test_a_warm_up_until_the_end_is_refused(tmp_path):
    assert ppo_recipe(tmp_path, ScoringEngine(), {"warmup_steps": 1}).total_steps == 5
    with pytest.raises(ConfigError, match=r"critic\.warmup_steps 5 leaves none of the 5 steps"):
        ppo_recipe(tmp_path, ScoringEngine(), {"warmup_steps": 5})


def test_truncated_rows_are_left_out_of_the_critic_if_asked(tmp_path):
    critic = ScoringEngine()
    recipe = ppo_recipe(tmp_path, critic, {"mask_no_eos_with_zero": True, "ppo_n_minibatches": 2})
    batch = four_rows(1.0, 0.0, 2.0, 1.0)
    batch.groups[0].trajectories[0].finish_reason = "length"
    recipe.update(1, batch)
    assert sum(len(rows) for rows, *_ in critic.updates) == 3 and len(critic.updates) == 2
    assert sum(len(rows) for rows, *_ in recipe.run.engine.updates) == 4


def test_rewards_of_turns_begin_at_their_tokens(tmp_path):
    recipe = ppo_recipe(tmp_path, RecordingEngine(logprob=0.0), discount=0.5, reward_scaling=2.0)
    batch = four_rows(1.0, 1.0, 0.0, 0.0)
    first = batch.groups[0].trajectories[0]
    first.turn_rewards = np.array([0, 0, 0.75, 0, 0.25], np.float32)
    recipe.update(1, batch)
    ((rows, *_),) = recipe.run.engine.updates
    found = {tuple(np.round(column, 4).tolist()) for column in rows.columns["credit"]}
    assert found == {(0, 0, 1.625, 0.25, 0.5), (0, 0, 0.5, 1.0, 2.0)}


def test_a_real_critic_learns_the_returns(tmp_path):
    plain_training.write_model(tmp_path / "m", plain_training.ARCHITECTURES["qwen3"])
    options = PPOCriticConfig(**{**vars(config_of(tmp_path / "m")), "is_critic": True}, ppo_n_minibatches=2)
    engine = FSDPEngine(options, name="critic")
    engine.initialize(60)
    critic = Critic(engine, options, Ranks(), 2)
    rows = [dataclasses.replace(trajectory(reward), ids=ids) for reward, ids in make_rows()]
    mask_BT = torch.from_numpy(np.stack([row.loss_mask for row in rows]))
    rewards_B = torch.tensor([row.reward for row in rows])
    stats, errors = Tracker(), []
    for _ in range(30):
        values_BT = critic.compute_values(rows)
        batch = RewardBatch(rewards_B, mask_BT, values_BT=values_BT)
        critic.update(rows, batch, Options(), stats)
        errors.append(float((values_BT - rewards_B[:, None])[mask_BT].square().mean()))
        numbers = stats.take()
    assert errors[-1] < 0.1 * errors[0] and numbers["explained_variance"] > 0.8
    # the value of a token does not depend on it
    other = [dataclasses.replace(row, ids=np.append(row.ids[:-1], np.int32(9))) for row in rows]
    torch.testing.assert_close(critic.compute_values(other), critic.compute_values(rows))


def make_rows():
    rng = np.random.default_rng(0)
    for reward in (0.0, 1.0):
        for _ in range(4):
            yield reward, np.array([3, 10 + int(reward), *rng.integers(20, 60, 3)], np.int32)


def test_columns_move_by_one_token():
    values = np.array([1, 2, 3], np.float32)
    assert move_left(values).tolist() == [2, 3, 0] and move_right(values).tolist() == [0, 1, 2]
    mask = np.array([False, True, True])
    assert move_left(mask).tolist() == [True, True, False] and move_left(mask).dtype == bool
