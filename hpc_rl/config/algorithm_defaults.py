"""The algorithms of a trial: which options choose them, and the defaults that they set.

The trainer uses this module, so it does not import the parser.
"""

from collections.abc import Collection, Iterator

from hpc_rl.config.options.experiment import LENGTH_OPTIONS, GRPOConfig, get_value, replace_value
from hpc_rl.config.options.training import NormConfig
from hpc_rl.core.algorithms import ALGORITHMS, OF_SETS, SELECTED_BY
from hpc_rl.core.refusal import Kind, Refusal

OPTION, ARGS = "actor.algorithm", "actor.algorithm_args"


def fill_defaults(config: GRPOConfig, explicit: Collection[str]) -> tuple[GRPOConfig, dict[str, str]]:
    """Return the configuration with the defaults of the algorithm, and option -> why its default changed.

    An option of AReaL selects its algorithm and changes no other default. A name in `actor.algorithm` sets
    the defaults of its paper.
    """
    adapted: dict[str, str] = {}
    correction = config.actor.rollout_correction
    if correction is not None and correction.mode == "icepop":
        for name, value in (("actor.rollout_correction.lower", 0.5), ("actor.rollout_correction.upper", 5.0)):
            if name not in explicit:
                config = replace_value(config, name.split("."), value)
                adapted[name] = "actor.rollout_correction.mode is icepop"
    if OPTION not in explicit:
        for option, selected, (name, *_) in list_selections(config):
            if selected:
                config = replace_value(config, OPTION.split("."), name)
                return config, adapted | {OPTION: f"{option} is set"}
        if config.critic is not None:
            config = replace_value(config, OPTION.split("."), "ppo")
            adapted[OPTION] = "there is a section critic"
        return config, adapted
    row = ALGORITHMS.get(config.actor.algorithm)
    for option, value in (row.defaults if row else {}).items():
        name, section = f"actor.{option}", f"actor.{option.partition('.')[0]}"
        if name in explicit or (section in explicit and section != name):
            continue
        if get_value(config, section) is None and section != name:
            config = replace_value(config, section.split("."), NormConfig())
        config = replace_value(config, name.split("."), value)
        adapted[name] = f"{OPTION} is {config.actor.algorithm}"
    return config, adapted


def list_selections(config: GRPOConfig) -> Iterator[tuple[str, bool, tuple[str, ...]]]:
    """Yield each option that selects an algorithm, whether it does, and the algorithms that fit."""
    for name, wanted, algorithms in SELECTED_BY:
        value = getattr(config.actor, name)
        yield f"actor.{name}", value is not None if wanted is None else value == wanted, algorithms


def make_set_config(config: GRPOConfig, name: str) -> GRPOConfig:
    """Return the configuration with the algorithm of a data set of the mixture in section `actor`.

    The algorithm sets the defaults of its paper, and the data set's arguments win.
    """
    one = config.train_dataset.mix[name]
    own, given = dict(one.algorithm_args), {OPTION}
    config = replace_value(config, OPTION.split("."), one.algorithm)
    for key in OF_SETS:
        if key in own:
            config = replace_value(config, ["actor", key], own.pop(key))
            given.add(f"actor.{key}")
    config = replace_value(config, ARGS.split("."), own)
    return fill_defaults(config, given)[0]


def list_algorithms(config: GRPOConfig) -> Iterator[tuple[str, GRPOConfig]]:
    """Yield each option that names an algorithm, with the configuration whose section `actor` has it."""
    yield OPTION, config
    for key, one in config.train_dataset.mix.items():
        if one.algorithm:
            yield f"train_dataset.mix.{key}.algorithm", make_set_config(config, key)


def refuse_warmup(config: GRPOConfig, last_step: int) -> Refusal | None:
    """Return the refusal of a warm-up of the critic after which no step is left for the policy."""
    if config.critic is None or config.critic.warmup_steps < last_step:
        return None
    return Refusal(
        option="critic.warmup_steps",
        value=config.critic.warmup_steps,
        kind=Kind.CONFLICT,
        why=f"leaves none of the {last_step} steps for the policy: a warm-up step trains only the critic",
        use="lower it, or train for more steps",
        related=LENGTH_OPTIONS,
    )
