"""`actor.algorithm`: its names, the defaults that it sets, and options that contradict it."""

import dataclasses
from pkgutil import resolve_name

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.options.experiment import get_value
from hpc_rl.config.rules.algorithm_rules import list_notes
from hpc_rl.config.rules.check import check
from hpc_rl.config.show import format_yaml, show
from hpc_rl.core.algorithms import ALGORITHMS
from hpc_rl.core.errors import ConfigError

WORDS = [
    "experiment_name=e",
    "trial_name=t",
    "train_dataset.path=/d",
    "train_dataset.batch_size=4",
    "actor.path=/m",
    "gconfig.n_samples=2",
]


def load_checked(*words: str):
    return check(load([], [*WORDS, *words], profiles=[]), files=False)


def test_a_name_sets_the_defaults_of_its_paper_and_values_of_the_user_win():
    loaded = load_checked("actor.algorithm=gspo", "actor.eps_clip=0.1", "actor.reward_norm.std_level=null")
    actor = loaded.config.actor
    assert (actor.eps_clip, actor.eps_clip_higher, actor.loss_aggregation) == (0.1, 4e-4, "sequence_mean")
    assert (actor.reward_norm.mean_level, actor.reward_norm.std_level) == ("group", None)
    shown = show(loaded)
    assert shown["actor.eps_clip_higher"].origin == "adapted: actor.algorithm is gspo"
    assert shown["actor.reward_norm.mean_level"].origin == "adapted: actor.algorithm is gspo"
    assert "adapted" not in shown["actor.eps_clip"].origin
    off = load_checked("actor.algorithm=gspo", "actor.reward_norm=null").config
    assert off.actor.reward_norm is None


def test_what_is_shown_loads_again(tmp_path):
    loaded = load_checked("actor.algorithm=rloo", "actor.rollout_correction.mode=icepop")
    path = tmp_path / "again.yaml"
    path.write_text(format_yaml(show(loaded)))
    assert check(load([path], profiles=[]), files=False).config == loaded.config
    correction = loaded.config.actor.rollout_correction
    assert (correction.lower, correction.upper) == (0.5, 5.0)


def test_an_option_of_areal_selects_the_algorithm_and_no_other_default():
    loaded = load_checked("actor.importance_sampling_level=sequence")
    actor = loaded.config.actor
    assert (actor.algorithm, actor.eps_clip, actor.reward_norm) == ("gspo", 0.2, None)
    assert show(loaded)["actor.algorithm"].origin == "adapted: actor.importance_sampling_level is set"
    assert load_checked("actor.algorithm=grpo").config.actor.reward_norm is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["actor.algorithm=grop"], "is not known; allowed: grpo, .* Did you mean grpo"),
        (["actor.algorithm_args={a: 1}"], "algorithm grpo takes its options from section actor"),
        (["actor.algorithm=grpo", "actor.use_sapo_loss=true"], "selects the algorithm sapo, and .* is grpo"),
        (
            ["actor.algorithm=gspo", "actor.importance_sampling_level=token"],
            "token contradicts actor.algorithm gspo",
        ),
        (
            ["actor.use_sapo_loss=true", "actor.m2_threshold=0.04", "actor.use_decoupled_loss=true"],
            "actor.m2_threshold .*selects the algorithm m2po",
        ),
        (["actor.m2_threshold=0.04"], "no effect without actor.use_decoupled_loss"),
        (
            ["actor.rollout_correction.lower=3"],
            "actor.rollout_correction.lower .*must not exceed actor.rollout_correction.upper 2",
        ),
        (
            [
                "actor.rollout_correction.mode=mask", "actor.behav_imp_weight_cap=5",
                "actor.use_decoupled_loss=true",
            ],
            "behav_imp_weight_cap can't be used with actor.rollout_correction",
        ),
        (
            ["actor.rollout_correction.mode=mask", "actor.recompute_logprob=false"],
            "false contradicts actor.rollout_correction",
        ),
        (
            ["actor.rollout_correction.mode=mask", "actor.prox_logp_method=loglinear"],
            "loglinear can't be used with actor.rollout_correction.mode, .* before the update",
        ),
        (["actor.aent.coeff_lr=0.1"], "coeff_lr has no effect without actor.aent.adaptive_coeff"),
        (["actor.aent.entropy_coeff=0.1", "actor.entropy_coeff=0.1"], "can't be used with actor.aent"),
        (
            ["actor.aent.entropy_clamp=0.3", "allocation_mode=fsdp:d1t2", "cluster.n_gpus_per_node=2"],
            "entropy_clamp .*t2 divides the vocabulary among ranks",
        ),
        (
            ["critic.path=/m", "critic.warmup_steps=10", "total_train_steps=10"],
            "critic.warmup_steps 10 leaves none of the 10 steps for the policy",
        ),
        (["actor.prox_logp_method=metrics"], "no effect without actor.use_decoupled_loss"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(words, problem):
    with pytest.raises(ConfigError, match=problem):
        load_checked(*words)


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        (["actor.algorithm=sapo", "actor.eps_clip=0.4", "actor.c_clip=3"], "actor.eps_clip, actor.c_clip"),
        (["actor.algorithm=max_rl", "actor.reward_norm.mean_level=group"], "actor.reward_norm"),
        (["actor.sapo_tau_neg=2"], "actor.sapo_tau_neg"),
    ],
)
def test_options_that_the_algorithm_does_not_take_are_noted(words, idle):
    notes = [str(note) for note in load_checked(*words).notes]
    assert any(note.startswith(f"{idle}: no effect: actor.algorithm") for note in notes), notes


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["actor.reward_bias=-0.5"], "actor.reward_bias"),
        (
            ["rollout.reward_fn=exact_match,format", "rollout.reward_weights=[1,-0.5]"],
            "rollout.reward_weights",
        ),
        (["rollout.reward_fn=judged", "pools.judged.path=/r"], "rollout.reward_fn"),
        (["actor.length_penalty=0.1"], "actor.length_penalty"),
        ([], ""),
    ],
)
def test_rewards_that_may_be_negative_are_noted_for_max_rl(words, cause):
    def list_warnings(algorithm: str) -> list[str]:
        config = load([], [*WORDS, f"actor.algorithm={algorithm}", *words], profiles=[]).config
        return [str(note) for note in list_notes(config) if "rewards of at least 0" in str(note)]

    notes = list_warnings("max_rl")
    assert len(notes) == bool(cause) and all(f"and {cause} may make them negative" in one for one in notes)
    assert not list_warnings("grpo")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_table_knows_the_options_of_each_loss(name):
    taken = {field.name for field in dataclasses.fields(resolve_name(ALGORITHMS[name].path).options)}
    of_losses = {"eps_clip", "eps_clip_higher", "c_clip", "sapo_tau_pos", "sapo_tau_neg"}
    assert of_losses - taken == of_losses & {*ALGORITHMS[name].ignores}


def test_a_correction_recomputes_log_probabilities_unless_they_are_interpolated():
    assert load_checked("actor.rollout_correction.mode=mask").config.actor.recompute_logprob
    words = ("actor.use_decoupled_loss=true", "actor.prox_logp_method=loglinear")
    assert not load_checked(*words).config.actor.recompute_logprob


def test_an_algorithm_of_the_user_takes_any_arguments():
    words = ("actor.algorithm=my.losses:MINE", "actor.algorithm_args={width: 0.5}")
    assert get_value(load_checked(*words).config, "actor.algorithm_args") == {"width": 0.5}
