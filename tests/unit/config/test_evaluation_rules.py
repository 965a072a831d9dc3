"""Evaluations beside training, their servers and their sets: what is derived, and what is refused."""

import pytest

from hpc_rl.config.devices import choose_allocation
from hpc_rl.config.held_out import find_period, find_sampling, list_held_out_sets
from hpc_rl.config.load.load import load
from hpc_rl.config.pool_view import find_trained_pool, has_evaluation_pool
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind

BASE = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d", "train_dataset.batch_size=4"]
GRPO = [*BASE, "actor.path=/m", "valid_dataset.path=/v", "cluster.n_gpus_per_node=0"]
SFT = [*BASE, "trainer=sft", "model.path=/m", "valid_dataset.path=/v"]
POOL = "allocation_mode=embedded:d1+embedded[eval]:d1+fsdp:d1"


def checked(words: list[str]):
    return check(load([], words, profiles=[]), files=False)


def refused(words: list[str]) -> list[tuple[str, Kind]]:
    with pytest.raises(ConfigError) as caught:
        checked(words)
    return [(one.option, one.kind) for one in caught.value.refusals]


def test_a_set_has_its_own_sampling_and_period_and_the_rest_of_the_main_one():
    words = ["eval_gconfig.greedy=true", "eval_gconfig.max_new_tokens=9", "evaluator.freq_steps=5"]
    words += ["evaluator.sets.a.path=/a", "evaluator.sets.a.n_samples=4", "evaluator.sets.a.greedy=false"]
    words += ["evaluator.sets.b.path=/b", "evaluator.sets.b.freq_epochs=1", "gconfig.n_samples=8"]
    config = checked([*GRPO, *words]).config
    assert {name: one.path for name, one in list_held_out_sets(config).items()} == {
        "": "/v",
        "a": "/a",
        "b": "/b",
    }
    found = {name: find_sampling(config, name)[0] for name in ("", "a", "b")}
    assert [(one.n_samples, one.greedy, one.max_new_tokens) for one in found.values()] == [
        (1, True, 9), (4, False, 9), (1, True, 9)
    ]  # fmt: skip
    periods = [find_period(config, name) for name in ("", "a", "b")]
    assert [(one.freq_steps, one.freq_epochs) for one in periods] == [(5, None), (5, None), (None, 1)]


def test_the_pool_eval_is_not_the_trained_one_unless_it_is_a_frozen_model():
    config = checked([*GRPO, POOL]).config
    assert (find_trained_pool(config), has_evaluation_pool(config)) == ("rollout", True)
    judge = ["pools.eval.path=/other", "rollout.reward_fn=judge", "rollout.judge.pool=eval"]
    frozen = checked([*GRPO, POOL, *judge]).config
    assert (find_trained_pool(frozen), has_evaluation_pool(frozen)) == ("rollout", False)


def test_a_trial_without_a_trainer_has_no_servers_for_evaluations_beside_it():
    config = checked([*GRPO, POOL, "purpose=evaluate"]).config
    assert not has_evaluation_pool(config)
    assert str(choose_allocation(config)[0]) == "embedded:d1"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ([*SFT, "evaluator.blocking=true"], "evaluator.blocking"),
        ([*SFT, "evaluator.sets.a.path=/a"], "evaluator.sets"),
        ([*GRPO, "evaluator.blocking=true", "evaluator.server_share=0.5"], "evaluator.server_share"),
        ([*GRPO, POOL, "evaluator.server_share=0.5"], "evaluator.server_share"),
    ],
)
def test_an_option_without_an_effect_is_refused(words, option):
    assert refused(words) == [(option, Kind.NO_EFFECT)]


def test_servers_for_evaluations_need_evaluations_beside_training():
    assert refused([*GRPO, POOL, "evaluator.blocking=true"]) == [("allocation_mode", Kind.CONFLICT)]
    assert refused([*BASE, "actor.path=/m", "cluster.n_gpus_per_node=0", POOL]) == [
        ("allocation_mode", Kind.CONFLICT)
    ]


def test_on_shared_units_an_evaluation_pauses_training():
    words = [*GRPO, "allocation_mode=embedded:d1|fsdp:d1"]
    found = checked(words)
    assert found.config.evaluator.blocking
    assert any(
        "evaluator.blocking" in str(note) and "take turns on the same GPUs" in str(note)
        for note in found.notes
    )
    assert refused([*words, "evaluator.blocking=false"]) == [("evaluator.blocking", Kind.CONFLICT)]


def test_with_a_critic_the_best_model_needs_a_pause():
    words = [*GRPO, "critic.path=/m", "saver.keep_best.metric=eval_reward", "evaluator.freq_steps=2"]
    found = checked(words)
    assert found.config.evaluator.blocking
    assert any("evaluator.blocking" in str(note) and "critic" in str(note) for note in found.notes)
    assert refused([*words, "evaluator.blocking=false"]) == [("evaluator.blocking", Kind.CONFLICT)]


def test_the_best_model_may_be_that_of_a_set():
    words = [*GRPO, "evaluator.sets.a.path=/a", "evaluator.freq_steps=2"]
    checked([*words, "saver.keep_best.metric=eval_a/reward"])
    assert refused([*words, "saver.keep_best.metric=eval_b/reward"]) == [
        ("saver.keep_best.metric", Kind.CONFLICT)
    ]


def test_a_set_has_another_name_than_the_main_one():
    assert refused([*GRPO, "evaluator.sets.valid_dataset.path=/a"]) == [
        ("evaluator.sets.valid_dataset", Kind.VALUE)
    ]
