"""Algorithms of the data sets of a mixture: defaults, arguments, and what is refused."""

import pytest

from hpc_rl.config.algorithm_defaults import list_algorithms
from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError
from tests.unit.config.test_algorithm_rules import WORDS

MIX = "train_dataset.mix.code"
SET = [f"{MIX}.path=/c", f"{MIX}.share=0.25"]


def load_checked(*words: str):
    return check(load([], [*WORDS, *SET, *words], profiles=[]), files=False).config


def test_a_data_set_has_the_defaults_of_its_algorithm_and_its_arguments_win():
    config = load_checked(
        "actor.eps_clip=0.1", f"{MIX}.algorithm=gspo", f"{MIX}.algorithm_args={{eps_clip_higher: 0.001}}"
    )
    (_, main), (option, code) = list_algorithms(config)
    assert option == f"{MIX}.algorithm" and main is config
    assert (code.actor.algorithm, code.actor.eps_clip, code.actor.eps_clip_higher) == ("gspo", 3e-4, 0.001)
    assert code.actor.reward_norm.std_level == "group" and code.actor.algorithm_args == {}
    assert (config.actor.algorithm, config.actor.eps_clip, config.actor.reward_norm) == ("grpo", 0.1, None)
    assert [option for option, _ in list_algorithms(load_checked())] == ["actor.algorithm"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([f"{MIX}.algorithm=gspi"], r"algorithm 'gspi' is not known; allowed: grpo, .* Did you mean gspo"),
        ([f"{MIX}.algorithm=m2po"], r"algorithm 'm2po' can't be used for one data set; allowed: grpo"),
        ([f"{MIX}.algorithm=opd"], r"algorithm 'opd' needs distillation, which actor.algorithm grpo does not"),
        ([f"{MIX}.algorithm=gspo", "actor.algorithm=areal"], r"beside actor\.algorithm areal"),
        ([f"{MIX}.algorithm=gspo", "critic.path=/m"], "can't be used with a critic"),
        ([f"{MIX}.algorithm_args={{c_clip: 3}}"], r"algorithm_args has no effect without train_dataset\.mix"),
        ([f"{MIX}.algorithm=gspo", f"{MIX}.algorithm_args={{c_clip: 0.5}}"], "c_clip .*allowed: a number, above 1"),
        ([f"{MIX}.algorithm=gspo", f"{MIX}.algorithm_args={{c_klip: 3}}"], "gspo has no such option.* c_clip"),
        ([f"{MIX}.algorithm=gspo", f"{MIX}.algorithm_args={{beta: 3}}"], r"same for all data sets; set actor\.beta"),
        ([f"{MIX}.algorithm=gspo", f"{MIX}.algorithm_args={{sapo_tau_pos: 3}}"], "gspo does not use it"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused(words, problem):
    with pytest.raises(ConfigError, match=problem):
        load_checked(*words)
