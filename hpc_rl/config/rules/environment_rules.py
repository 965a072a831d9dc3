"""Rules about the section `environments`: its commands, and options that contradict it."""

import shlex
from collections.abc import Collection, Iterator

from hpc_rl.config.options.experiment import GRPOConfig, has_own_prompts
from hpc_rl.core.refusal import Kind, Refusal


def check_commands(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    for name, command in (config.environments.commands if config.environments else {}).items():
        try:
            words = shlex.split(command)
        except ValueError as error:
            why = f": {command!r} is not a valid shell command: {error}"
            yield Refusal(option=f"environments.commands.{name}", kind=Kind.VALUE, why=why)
            continue
        if not words:
            use = "give a command, as `hpc-rl env serve my_env.py`"
            yield Refusal(option=f"environments.commands.{name}", kind=Kind.VALUE, why="is empty", use=use)


def check_order(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    section = config.environments
    if section and section.own_prompts and config.rollout.batch_order == "in_order":
        yield Refusal(
            option="rollout.batch_order",
            value="in_order",
            kind=Kind.CONFLICT,
            why=(
                "can't be used with environments.own_prompts true, because groups from environments arrive "
                "in no fixed order"
            ),
            use="use ready, or own_prompts false",
            related=("environments.own_prompts",),
        )


def check_length(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    if has_own_prompts(config):
        return
    if config.total_train_steps is None and config.total_train_n_seqs is None:
        yield Refusal(
            option="total_train_steps",
            kind=Kind.MISSING,
            why=(
                "and total_train_n_seqs are both null, so a trial on environments alone "
                "(environments.own_prompts false) would never stop"
            ),
            use="set one of them",
            related=("total_train_n_seqs", "environments.own_prompts"),
        )
    if config.total_train_epochs is not None and "total_train_epochs" in explicit:
        yield Refusal(
            option="total_train_epochs",
            value=config.total_train_epochs,
            kind=Kind.NO_EFFECT,
            why="has no effect with environments.own_prompts false: environments have no epochs",
            use="set total_train_steps",
            related=("environments.own_prompts", "total_train_steps"),
        )


GRPO_RULES = [check_commands, check_order, check_length]
