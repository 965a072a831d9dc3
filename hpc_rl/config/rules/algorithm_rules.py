"""Rules about `actor.algorithm`."""

import re
from collections.abc import Collection, Iterator
from dataclasses import fields

from hpc_rl.config.algorithm_defaults import ARGS, OPTION, list_selections, refuse_warmup
from hpc_rl.config.load.fields import suggest_name
from hpc_rl.config.options.experiment import ABSENT, GRPOConfig, TeacherConfig, find_last_step, get_value
from hpc_rl.config.pool_view import list_reward_models
from hpc_rl.config.rules.consistency import is_default
from hpc_rl.config.rules.engine_rules import find_train
from hpc_rl.config.rules.generation_rules import IMPORT_PATH
from hpc_rl.core.algorithms import ALGORITHMS, TAKE_CRITIC
from hpc_rl.core.refusal import Kind, Refusal, make_idle_note, make_note

_OF_CONTROLLER = ("entropy_low", "entropy_high", "coeff_", "warmup_steps")


def check_selection(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    name = config.actor.algorithm
    for option, selected, algorithms in list_selections(config):
        if selected == (name in algorithms):
            continue
        why = f"selects the algorithm {algorithms[0]}, and {OPTION} is {name}"
        if not selected:
            why = f"contradicts {OPTION} {name}"
        yield Refusal(
            option=option,
            value=str(get_value(config, option)).lower(),
            kind=Kind.CONFLICT,
            why=why,
            use="remove one of the two",
            related=(OPTION,),
        )


def check_correction(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    actor, name, method = config.actor, "actor.rollout_correction", "actor.prox_logp_method"
    correction = actor.rollout_correction
    if correction is not None and actor.behav_imp_weight_cap is not None:
        cap = "actor.behav_imp_weight_cap"
        why, use = f"can't be used with {name}, which has its own bound", f"use {name}.upper"
        yield Refusal(option=cap, kind=Kind.CONFLICT, why=why, use=use, related=(name,))
    if actor.prox_logp_method == "recompute":
        return
    if not actor.use_decoupled_loss and correction is None:
        why = "has no effect without actor.use_decoupled_loss or actor.rollout_correction"
        related = ("actor.use_decoupled_loss", name)
        yield Refusal(
            option=method, value=actor.prox_logp_method, kind=Kind.NO_EFFECT, why=why, related=related
        )
    excludes = correction is not None and correction.mode != "truncate"
    if actor.prox_logp_method == "loglinear" and (excludes or actor.m2_threshold is not None):
        other = f"{name}.mode" if excludes else "actor.m2_threshold"
        why = f"can't be used with {other}, which must choose the tokens to leave out before the update"
        use = "use recompute, or rollout_correction.mode truncate"
        yield Refusal(
            option=method, value="loglinear", kind=Kind.CONFLICT, why=why, use=use, related=(other,)
        )


def check_entropy(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    aent, name = config.actor.aent, "actor.aent"
    if aent is None:
        return
    if config.actor.entropy_coeff:
        why, use = f"can't be used with {name}, which has its own coefficient", f"set {name}.entropy_coeff"
        option = "actor.entropy_coeff"
        yield Refusal(option=option, kind=Kind.CONFLICT, why=why, use=use, related=(f"{name}.entropy_coeff",))
    adapts = [f"{name}.{field.name}" for field in fields(aent) if field.name.startswith(_OF_CONTROLLER)]
    if not aent.adaptive_coeff and (idle := [option for option in adapts if not is_default(config, option)]):
        why = f"has no effect without {name}.adaptive_coeff"
        yield Refusal(option=idle[0], kind=Kind.NO_EFFECT, why=why, related=(f"{name}.adaptive_coeff",))
    train = find_train(config)
    if aent.entropy_clamp and train is not None and train.t > 1:
        option = f"{name}.entropy_clamp"
        why = f"can't be used, because t{train.t} divides the vocabulary among ranks"
        use = "use t1 for the trainer in allocation_mode, or entropy_clamp 0"
        related = ("allocation_mode",)
        yield Refusal(
            option=option, value=aent.entropy_clamp, kind=Kind.CONFLICT, why=why, use=use, related=related
        )


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
    if config.critic is not None and name not in TAKE_CRITIC:
        why = f"has no effect with {OPTION} {name}, which uses no value estimates"
        use = f"remove it, or use one of {', '.join(TAKE_CRITIC)}"
        yield Refusal(option="critic", kind=Kind.NO_EFFECT, why=why, use=use, related=(OPTION,))
    for section in row.needs:
        if get_value(config, section) in (ABSENT, None):
            why = f"needs a section {section}"
            yield Refusal(option=OPTION, value=name, kind=Kind.MISSING, why=why, related=(section,))


def check_warmup(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse a critic that is trained alone until the end, as far as the length of the trial is known."""
    last = find_last_step(config, None)
    if last is not None and (refusal := refuse_warmup(config, last)):
        yield refusal


def list_notes(config: GRPOConfig) -> Iterator[Refusal]:
    """Yield notes about options that the algorithm does not take; AReaL's files often contain them."""
    name = config.actor.algorithm
    ignored = ALGORITHMS[name].ignores if name in ALGORITHMS else ()
    if idle := [f"actor.{one}" for one in ignored if not is_default(config, f"actor.{one}")]:
        yield make_idle_note(idle, f"{OPTION} {name} does not use it")
    if name == "max_rl" and (causes := _list_negative_rewards(config)):
        why = f"is for rewards of at least 0, and {', '.join(causes)} may make them negative: "
        why += "a group of samples whose mean reward is 0 or less teaches nothing"
        yield make_note(OPTION, why, Kind.CONFLICT, value=name, related=tuple(causes), is_warning=True)


def _list_negative_rewards(config: GRPOConfig) -> list[str]:
    """Return the options that may make rewards negative."""
    actor = config.actor
    causes = {
        "rollout.reward_fn": bool(list_reward_models(config)),
        "rollout.reward_weights": any(one < 0 for one in config.rollout.reward_weights or ()),
        "actor.reward_bias": actor.reward_bias < 0,
        "actor.length_penalty": actor.length_penalty > 0,
        "actor.overlong_reward_penalty": actor.overlong_reward_penalty,
        "trainer": isinstance(config, TeacherConfig),  # a teaching may make the student worse
    }
    return [option for option, holds in causes.items() if holds]


GRPO_RULES = [
    check_algorithm,
    check_selection,
    check_correction,
    check_entropy,
    check_warmup,
]
