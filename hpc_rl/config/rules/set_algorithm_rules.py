"""Rules about the algorithms of the data sets of a mixture."""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from hpc_rl.config.algorithm_defaults import OPTION
from hpc_rl.config.load.fields import list_hints, suggest_name
from hpc_rl.config.load.parser import convert_value, describe_allowed
from hpc_rl.config.load.source import add_origin
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.training import PPOActorConfig
from hpc_rl.config.rules.generation_rules import IMPORT_PATH
from hpc_rl.core.algorithms import ALGORITHMS, NOT_OF_SETS, OF_SETS
from hpc_rl.core.refusal import Kind, Refusal


def check_set_algorithms(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse algorithms of data sets that need more than their rows, and unknown options of them."""
    for key, one in config.train_dataset.mix.items():
        option = f"train_dataset.mix.{key}.algorithm"
        if not one.algorithm:
            if one.algorithm_args:
                why, related = f"has no effect without {option}", (option,)
                yield Refusal(option=f"{option}_args", kind=Kind.NO_EFFECT, why=why, related=related)
            continue
        yield from _check_set_algorithm(config, option, one.algorithm)
        yield from _check_set_args(option, one.algorithm, one.algorithm_args)


def _check_set_algorithm(config: GRPOConfig, option: str, name: str) -> Iterator[Refusal]:
    row, main = ALGORITHMS.get(name), ALGORITHMS.get(config.actor.algorithm)
    usable = [one for one in ALGORITHMS if one not in NOT_OF_SETS and ALGORITHMS[one].sampled_by == "policy"]
    use = f"allowed: {', '.join(usable)}, or your own package.module:name"
    refuse = partial(Refusal, option=option, value=repr(name))
    if row is None:
        if not re.fullmatch(IMPORT_PATH, name):
            use = f"{use}. {suggest_name(name, usable)}".strip()
            yield refuse(kind=Kind.VALUE, why="is not known", use=use)
    elif name not in usable:
        yield refuse(kind=Kind.UNSUPPORTED, why="can't be used for one data set", use=use)
    elif main is not None and (missing := [one for one in row.needs if one not in main.needs]):
        why = f"needs {', '.join(missing)}, which {OPTION} {config.actor.algorithm} does not use"
        yield refuse(kind=Kind.CONFLICT, why=why, related=(OPTION,))
    if config.critic is not None:
        why = "can't be used with a critic, which all data sets would share"
        yield refuse(kind=Kind.UNSUPPORTED, why=why, related=("critic",))
    elif main is not None and config.actor.algorithm not in usable:
        why = f"can't be used beside {OPTION} {config.actor.algorithm}, which needs the whole batch"
        yield refuse(kind=Kind.UNSUPPORTED, why=why, related=(OPTION,))


def _check_set_args(option: str, name: str, args: Mapping[str, Any]) -> Iterator[Refusal]:
    hints = list_hints(PPOActorConfig)
    for key, value in args.items():
        refuse = partial(Refusal, option=f"{option}_args.{key}", value=repr(value), related=(option,))
        if key in OF_SETS:
            try:
                convert_value(hints[key], add_origin(value, ""))
            except ValueError as error:
                use = f"allowed: {describe_allowed(hints[key])}. {error}".strip()
                yield refuse(kind=Kind.VALUE, why="can't be used", use=use)
            if name in ALGORITHMS and key in ALGORITHMS[name].ignores:
                why = f"has no effect: {name} does not use it"
                yield refuse(kind=Kind.NO_EFFECT, why=why, use="remove it")
        elif key in hints:
            why, use = "must be the same for all data sets", f"set actor.{key}"
            yield refuse(kind=Kind.UNSUPPORTED, why=why, use=use)
        elif name in ALGORITHMS:
            use = f"allowed: {', '.join(OF_SETS)}. {suggest_name(key, OF_SETS)}".strip()
            yield refuse(kind=Kind.UNKNOWN, why=f": {name} has no such option", use=use)


GRPO_RULES = [check_set_algorithms]
