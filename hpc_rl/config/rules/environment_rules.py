"""Rules about the section `environments`: its commands, and options that contradict it."""

import shlex
from collections.abc import Collection, Iterator

from hpc_rl.config.options.experiment import GRPOConfig, has_own_prompts


def check_commands(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    for name, command in (config.environments.commands if config.environments else {}).items():
        try:
            words = shlex.split(command)
        except ValueError as error:
            yield f"environments.commands.{name}: {command!r} is not a command: {error}."
            continue
        if not words:
            yield f"environments.commands.{name} is empty; give a command, as `hpc-rl env serve my_env.py`."


def check_order(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    section = config.environments
    if section and section.own_prompts and config.rollout.batch_order == "in_order":
        yield (
            "rollout.batch_order in_order can't be used with environments.own_prompts true, for the order of "
            "prompts and of groups from outside can't both be kept; use ready, or own_prompts false."
        )


def check_length(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    if has_own_prompts(config):
        return
    if config.total_train_steps is None and config.total_train_n_seqs is None:
        yield (
            "total_train_steps and total_train_n_seqs are both null, so a trial on environments alone "
            "(environments.own_prompts false) would never stop; set one of them."
        )
    if config.total_train_epochs is not None and "total_train_epochs" in explicit:
        yield (
            f"total_train_epochs {config.total_train_epochs} has no effect with environments.own_prompts "
            "false: environments have no epochs; set total_train_steps."
        )


GRPO_RULES = [check_commands, check_order, check_length]
