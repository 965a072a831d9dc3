"""Servers and trainer in turn: what submission refuses."""

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError

COMMON = ["experiment_name=toy", "trial_name=t1", "train_dataset.path=/t", "train_dataset.batch_size=64"]
COMMON += ["actor.path=/m", "gconfig.n_samples=4", "cluster.n_gpus_per_node=8"]
SHARED = [*COMMON, "allocation_mode=sglang:d8|fsdp:d8"]


def check_words(*words: str, base: list[str] = SHARED):
    return check(load([], [*base, *words]), files=False)


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("rollout.max_head_offpolicyness=2", "rollout.max_head_offpolicyness"),
        ("actor.weight_update_mode=xccl", "actor.weight_update_mode"),
        ("environments.own_prompts=true", "environments"),
        ("allocation_mode=sglang:d8|megatron:d8", "allocation_mode"),
        ("launcher.slurm.layout=jobs", "launcher.slurm.layout"),
        ("weights.pause_mode=abort", "weights.pause_mode"),
        ("weights.max_paused=1", "weights.max_paused"),
    ],
)
def test_what_needs_servers_and_trainer_at_once_is_refused(word, option):
    with pytest.raises(ConfigError) as caught:
        check_words(word)
    assert [refusal.option for refusal in caught.value.refusals] == [option]
    if "allocation_mode" not in word:
        check_words(word, base=COMMON)  # it is about the turns alone


def test_one_batch_ahead_is_allowed():
    check_words("rollout.max_head_offpolicyness=1")
    check_words("rollout.max_head_offpolicyness=4", "async_training=false")


def test_an_adapter_is_published_merged():
    lora = ["actor.use_lora=true", "actor.lora_rank=8"]
    assert check_words(*lora).config.actor.lora_publish == "merged"
    assert check_words(*lora, base=COMMON).config.actor.lora_publish == "adapter"
    with pytest.raises(ConfigError, match="lora_publish"):
        check_words(*lora, "actor.lora_publish=adapter")
