"""Loading of the algorithm that `actor.algorithm` names, with its options."""

from dataclasses import fields
from typing import Any, Literal

from hpc_rl.algorithms.aent import Controller
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.correction import Correction
from hpc_rl.algorithms.normalization import Levels
from hpc_rl.algorithms.token_batch import Options
from hpc_rl.config.load.fields import list_hints
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.training import NormConfig, PPOActorConfig
from hpc_rl.core.algorithms import ALGORITHMS
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.rollout.rewards import import_object

OPTION = "actor.algorithm"


def load_algorithm(config: GRPOConfig, option: str = OPTION) -> tuple[Algorithm, Options]:
    """Return the algorithm of section `actor`, built-in or the user's, and its options.

    `option` names it in the configuration as given. Raises ConfigError.
    """
    name = config.actor.algorithm
    row = ALGORITHMS.get(name)
    algorithm = import_object(option, row.path if row else name)
    if not isinstance(algorithm, Algorithm):
        why = f"must name an Algorithm of hpc_rl.algorithms.algorithm, not {type(algorithm).__name__}"
        raise ConfigError(Refusal(option=option, value=repr(name), kind=Kind.FILE, why=why))
    own = algorithm.options
    if not (isinstance(own, type) and issubclass(own, Options)):
        shown = own.__name__ if isinstance(own, type) else repr(own)
        why = f": its `options` must be a subclass of hpc_rl.algorithms.token_batch.Options, not {shown}"
        raise ConfigError(Refusal(option=option, value=repr(name), kind=Kind.FILE, why=why))
    return algorithm, make_options(algorithm, config, option)


def make_options(algorithm: Algorithm, config: GRPOConfig, option: str = OPTION) -> Options:
    """Return the options of an algorithm: from section `actor`, and others of `actor.algorithm_args`.

    Raises ConfigError for an argument that the algorithm does not have, for one that it lacks, and for a
    value of another type than the field's.
    """
    actor, args = config.actor, config.actor.algorithm_args
    names = [field.name for field in fields(algorithm.options)]
    in_section = {
        name: _convert(getattr(section, name))
        for section in filter(None, (config.distillation, actor))
        for name in names
        if hasattr(section, name)
    }
    own = [name for name in names if name not in in_section]
    if unknown := sorted(args.keys() - own):
        why = f": {actor.algorithm} has no {', '.join(unknown)}"
        use = (
            f"it has {', '.join(own)}" if own else f"{actor.algorithm} has no options besides section actor's"
        )
        raise ConfigError(
            Refusal(option=f"{option}_args", kind=Kind.CONFLICT, why=why, use=use, related=(option,))
        )
    args = _convert_args(algorithm.options, actor, option)
    values: dict[str, Any] = {**in_section, "max_new_tokens": config.gconfig.max_new_tokens, **args}
    try:
        return algorithm.options(**values)
    except (TypeError, ValueError) as error:
        why = f": {actor.algorithm} does not accept these options: {error}"
        raise ConfigError(
            Refusal(option=f"{option}_args", kind=Kind.CONFLICT, why=why, related=(option,))
        ) from error


def _convert_args(options: Any, actor: PPOActorConfig, option: str) -> dict[str, Any]:
    """Return `actor.algorithm_args` in the types of the options. Raises ConfigError for other types."""
    if not actor.algorithm_args:
        return {}
    # jsonargparse takes time, and few algorithms have arguments
    from hpc_rl.config.load import parser
    from hpc_rl.config.load.source import add_origin

    made, refusals = dict(actor.algorithm_args), []
    try:
        hints = list_hints(options)
    except NameError as error:
        why = f": a type hint in {options.__name__} of {actor.algorithm} can't be resolved: {error}"
        raise ConfigError(
            Refusal(option=f"{option}_args", kind=Kind.FILE, why=why, related=(option,))
        ) from error
    for name, value in actor.algorithm_args.items():
        if not parser.can_convert(hints[name]):
            continue
        try:
            made[name] = parser.convert_value(hints[name], add_origin(value, ""))
        except ValueError as error:
            use = f"allowed: {parser.describe_allowed(hints[name])}. {error}".strip()
            refusals.append(
                Refusal(
                    option=f"{option}_args.{name}",
                    value=repr(value),
                    kind=Kind.VALUE,
                    why="can't be used",
                    use=use,
                    related=(option,),
                )
            )
    if refusals:
        raise ConfigError(*refusals)
    return made


def make_correction(actor: PPOActorConfig) -> Correction:
    """Return the off-policy correction of the configuration."""
    section = actor.rollout_correction
    if section is None:
        return Correction(mode="mask", upper=actor.behav_imp_weight_cap)
    mode: Literal["truncate", "mask"] = "truncate" if section.mode == "truncate" else "mask"
    return Correction(section.level, mode, section.lower, section.upper)


def find_entropy_coefficient(actor: PPOActorConfig) -> float:
    """Return the coefficient of the entropy bonus, the initial one if it is adapted."""
    return actor.entropy_coeff if actor.aent is None else actor.aent.entropy_coeff


def make_controller(actor: PPOActorConfig) -> Controller | None:
    """Return the controller of AEnt's coefficient, or None if it is constant."""
    aent = actor.aent
    if aent is None or not aent.adaptive_coeff:
        return None
    return Controller(
        entropy_low=aent.entropy_low,
        entropy_high=aent.entropy_high,
        coeff_lr=aent.coeff_lr,
        coeff_box_low=aent.coeff_box_low,
        coeff_box_high=aent.coeff_box_high,
        warmup_steps=aent.warmup_steps,
    )


def _convert(value: Any) -> Any:
    if not isinstance(value, NormConfig):
        return value
    return Levels(value.mean_level, value.std_level, value.eps, value.mean_leave1out, value.std_unbiased)
