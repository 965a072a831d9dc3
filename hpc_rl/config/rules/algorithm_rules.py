"""Rules about `actor.algorithm`, and the defaults that it sets."""

import re
from collections.abc import Collection, Iterator

from hpc_rl.config.load.fields import suggest_name
from hpc_rl.config.options.experiment import ABSENT, GRPOConfig, get_value
from hpc_rl.config.rules.generation_rules import IMPORT_PATH
from hpc_rl.core.algorithms import ALGORITHMS
from hpc_rl.core.refusal import Kind, Refusal

OPTION, ARGS = "actor.algorithm", "actor.algorithm_args"


def check_algorithm(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    name, row = config.actor.algorithm, ALGORITHMS.get(config.actor.algorithm)
    if row is None:
        if not re.fullmatch(IMPORT_PATH, name):
            allowed = f"allowed: {', '.join(ALGORITHMS)}, or your own package.module:name"
            use = f"{allowed}. {suggest_name(name, ALGORITHMS)}".strip()
            yield Refusal(option=OPTION, value=repr(name), kind=Kind.VALUE, why="is not known", use=use)
        return
    if config.actor.algorithm_args:
        why = f"has no effect: algorithm {name} takes its options from section actor"
        yield Refusal(option=ARGS, kind=Kind.NO_EFFECT, why=why, use="remove it", related=(OPTION,))
    for section in row.needs:
        if get_value(config, section) in (ABSENT, None):
            why = f"needs a section {section}"
            yield Refusal(option=OPTION, value=name, kind=Kind.MISSING, why=why, related=(section,))


GRPO_RULES = [check_algorithm]
