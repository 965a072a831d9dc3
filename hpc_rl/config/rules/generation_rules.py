"""Rules about generation: groups, sampling, lengths, the rollout role, and abilities of the servers."""

import math
import re
import shlex
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from hpc_rl.config.compat.areal_names import OF_WORKFLOWS
from hpc_rl.config.devices import count_data_ranks
from hpc_rl.config.load.fields import suggest_name
from hpc_rl.config.load.parser import convert_value, describe_allowed
from hpc_rl.config.load.source import add_origin
from hpc_rl.config.options.experiment import Config, GRPOConfig, get_value, has_trainer
from hpc_rl.config.options.inference import REWARDS, GenerationHyperparameters
from hpc_rl.config.options.limits import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from hpc_rl.config.rules.consistency import find_context_option, find_server_backend, list_given
from hpc_rl.config.rules.training_rules import list_models, list_samplings
from hpc_rl.core.backends import SERVER_BACKENDS
from hpc_rl.core.refusal import Kind, Refusal, make_note

BUILT_IN = {
    "workflow": ["single_turn", "multi_turn", "teacher", "agent"],
    "reward_fn": list(REWARDS),
}
WORKFLOW_ARGS: dict[str, dict[str, Any]] = {  # built-in workflow -> its arguments with their types
    "single_turn": {},
    "multi_turn": {
        "max_turns": PositiveInt,
        "turn_discount": NonNegativeFloat,
        "max_tokens_per_trajectory": PositiveInt,
        "feedback": str,
        "tools": list[str],
        "tool_timeout_s": PositiveFloat,
        "credit_by_turn": bool,
    },
    "teacher": {},
    "agent": {
        "command": str | list[str],
        "function": str,
        "timeout_s": PositiveFloat,
        "retries": NonNegativeInt,
        "failure_reward": float | None,
        "max_calls": PositiveInt,
        "max_episodes": PositiveInt | None,
        "keep_tokens": bool,
    },
}
IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"


def adapt_defaults(config: Config) -> dict[str, tuple[Any, str]]:
    """Return option -> (new default, reason): the batch size that follows from `sequences_per_rank`."""
    each, ranks, n_samples = _count_sequences(config)
    if not each or not ranks or each * ranks % n_samples:
        return {}
    name = "train_dataset.sequences_per_rank"
    per_prompt = f" / gconfig.n_samples {n_samples}" if isinstance(config, GRPOConfig) else ""
    reason = f"{name} {each} * {ranks} data ranks{per_prompt}"
    return {"train_dataset.batch_size": (each * ranks // n_samples, reason)}


def _count_sequences(config: Config) -> tuple[int, int, int]:
    """Return sequences per data rank (0 if not set), data ranks (0 if unknown), and sequences per prompt."""
    each = config.train_dataset.sequences_per_rank or 0
    n_samples = config.gconfig.n_samples if isinstance(config, GRPOConfig) else 1
    return each, (count_data_ranks(config) or 0) if each else 0, n_samples


def check_batch_of_ranks(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    (each, ranks, n_samples), name = _count_sequences(config), "train_dataset.sequences_per_rank"
    if not each or not ranks:
        return
    sequences, batch_size = each * ranks, config.train_dataset.batch_size
    if sequences % n_samples:
        least = n_samples // math.gcd(n_samples, ranks)
        yield Refusal(
            option=name,
            value=each,
            kind=Kind.CONFLICT,
            why=f": {each} * {ranks} data ranks is not a multiple of gconfig.n_samples {n_samples}",
            use=f"use a multiple of {least}",
            related=("gconfig.n_samples",),
        )
    elif batch_size * n_samples != sequences:
        gives = f"{name} {each} on {ranks} data ranks, which gives {sequences // n_samples}"
        yield Refusal(
            option="train_dataset.batch_size",
            value=batch_size,
            kind=Kind.CONFLICT,
            why=f"contradicts {gives}",
            use="set only one of the two",
            related=(name,),
        )


def check_too_long(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for section in ("train_dataset", "valid_dataset"):
        dataset = getattr(config, section)
        if dataset is None or dataset.too_long == "drop":
            continue
        related: tuple[str, ...] = ()
        if not isinstance(config, GRPOConfig):
            why = f"can't be used: only prompts are truncated, and trainer {config.trainer} has none"
            related = ("trainer",)
        elif config.rollout.workflow in ("multi_turn", "teacher", "agent"):
            why = f"can't be used: workflow {config.rollout.workflow} never truncates its messages"
        else:
            continue
        yield Refusal(
            option=f"{section}.too_long",
            value=dataset.too_long,
            kind=Kind.CONFLICT,
            why=why,
            use="use drop",
            related=related,
        )


def check_no_servers(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    if isinstance(config, GRPOConfig):
        return
    sections = tuple(f"{backend.section}." for backend in SERVER_BACKENDS.values())
    for name in list_given(config, explicit, sections)[:1]:
        why = f"has no effect: trainer {config.trainer} has no generation servers"
        yield Refusal(option=name, kind=Kind.NO_EFFECT, why=why, use="remove it", related=("trainer",))


def check_groups(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    actor, n_samples = config.actor, config.gconfig.n_samples
    for name, norm in (("reward_norm", actor.reward_norm), ("adv_norm", actor.adv_norm)):
        if norm and "group" in (norm.mean_level, norm.std_level) and n_samples < 2:
            yield Refusal(
                option="gconfig.n_samples",
                value=n_samples,
                kind=Kind.CONFLICT,
                why=f"can't be used, because actor.{name} normalizes over the samples of a prompt",
                use="use at least 2",
                related=(f"actor.{name}",),
            )
    rows = config.train_dataset.batch_size * n_samples
    counts = {"actor": actor.ppo_n_minibatches}
    if config.critic is not None:
        counts["critic"] = config.critic.ppo_n_minibatches
    for section, parts in counts.items():
        if parts <= rows:
            continue
        product = f"train_dataset.batch_size * gconfig.n_samples, which is {rows}"
        yield Refusal(
            option=f"{section}.ppo_n_minibatches",
            value=parts,
            kind=Kind.CONFLICT,
            why=f"must not exceed {product}: each update needs a row",
            related=("train_dataset.batch_size", "gconfig.n_samples"),
        )


def check_sampling(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    for section, g in list_samplings(config).items():
        if g.n_samples > 1 and (g.greedy or g.temperature == 0):
            option, value = ("greedy", "true") if g.greedy else ("temperature", "0")
            equal = f"would make all {g.n_samples} samples of a prompt equal"
            instead, related = f"a temperature above 0, or {section}.n_samples 1", [f"{section}.n_samples"]
            if section == "gconfig":
                equal += ", so nothing is learned"
                norms = (config.actor.reward_norm, config.actor.adv_norm)
                if any(norm and "group" in (norm.mean_level, norm.std_level) for norm in norms):
                    instead, related = "a temperature above 0", []
                instead += ", or eval_gconfig for evaluations alone"
                related.append("eval_gconfig")
            yield Refusal(
                option=f"{section}.{option}",
                value=value,
                kind=Kind.CONFLICT,
                why=equal,
                use=f"use {instead}",
                related=tuple(related),
            )


def check_lengths(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    for section, g in list_samplings(config).items():
        for name in (f"{section}.max_tokens", find_context_option(config)):
            limit = get_value(config, name)
            if limit and limit <= g.max_new_tokens:
                yield Refusal(
                    option=name,
                    value=limit,
                    kind=Kind.CONFLICT,
                    why=f"is too small for a prompt and {section}.max_new_tokens {g.max_new_tokens}",
                    related=(f"{section}.max_new_tokens",),
                )
    # completions of evaluations enter no micro-batch
    new = config.gconfig.max_new_tokens
    for section, engine in list_models(config) if has_trainer(config) else ():
        limit, together = engine.mb_spec.max_tokens_per_mb, engine.mb_spec.granularity
        if limit and limit // together <= new:
            times = f" in each of {together} sequences (mb_spec.granularity)" if together > 1 else ""
            yield Refusal(
                option=f"{section}.mb_spec.max_tokens_per_mb",
                value=limit,
                kind=Kind.CONFLICT,
                why=f"is too small for a prompt and gconfig.max_new_tokens {new}{times}",
                related=("gconfig.max_new_tokens",),
            )


def check_rollout(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    options = config.rollout
    weights, functions = options.reward_weights, options.reward_functions
    if weights is not None and (len(weights) != len(functions) or not any(weights)):
        yield Refusal(
            option="rollout.reward_weights",
            value=f"{weights}",
            kind=Kind.VALUE,
            why="can't be used",
            use=f"give one number for each of {', '.join(functions)}, not all 0",
        )
    if len({*functions}) < len(functions):
        yield Refusal(
            option="rollout.reward_fn",
            value=repr(options.reward_fn),
            kind=Kind.VALUE,
            why="names a function twice",
            use="name it once, and give its weight in rollout.reward_weights",
        )
    if options.sandbox == "required" and "code_tests" not in functions:
        yield Refusal(
            option="rollout.sandbox",
            value="required",
            kind=Kind.NO_EFFECT,
            why=f"has no effect: it is for code_tests, and rollout.reward_fn is {options.reward_fn}",
            use="remove the option",
            related=("rollout.reward_fn",),
        )
    values = [("workflow", options.workflow), *(("reward_fn", function) for function in functions)]
    for name, value in values:
        pools = [*config.pools] if name == "reward_fn" else []
        known = [*BUILT_IN[name], *pools]
        if value not in known and not re.fullmatch(IMPORT_PATH, value):
            pool = "the name of a pool with a reward model (pools.NAME.path), " if name == "reward_fn" else ""
            allowed = f"allowed: {', '.join(known)}, {pool}or your own package.module:name"
            yield Refusal(
                option=f"rollout.{name}",
                value=repr(value),
                kind=Kind.VALUE,
                why="is not known",
                use=f"{allowed}. {suggest_name(value, known)}".strip(),
            )


def check_workflow_args(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    workflow, args = config.rollout.workflow, config.rollout.workflow_args
    known = WORKFLOW_ARGS.get(workflow, {})
    for name, value in args.items() if workflow in WORKFLOW_ARGS else ():
        if name in known:
            try:
                convert_value(known[name], add_origin(value, ""))
            except ValueError:
                why, use = f": {name} {value!r} can't be used", f"allowed: {describe_allowed(known[name])}"
                yield Refusal(option="rollout.workflow_args", kind=Kind.VALUE, why=why, use=use)
        elif name not in OF_WORKFLOWS:
            takes = f"rollout.workflow {workflow} takes {', '.join(known) or 'no arguments'}"
            yield Refusal(
                option="rollout.workflow_args",
                kind=Kind.CONFLICT,
                why=f": {name} can't be used: {takes}",
                use=f"your own workflow may take any argument. {suggest_name(name, known)}".strip(),
                related=("rollout.workflow",),
            )


def check_agent(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse an agent without a program, or with two."""
    rollout = config.rollout
    if rollout.workflow != "agent":
        return
    command, function = rollout.workflow_args.get("command"), rollout.workflow_args.get("function")
    refuse = partial(Refusal, option="rollout.workflow_args", related=("rollout.workflow",))
    example = "command: [python, agent.py], or function: my_agent:solve"
    if bool(command) == bool(function):
        why = "has both command and function" if command else "needs the agent's program"
        yield refuse(
            kind=Kind.CONFLICT if command else Kind.MISSING, why=f": workflow agent {why}", use=example
        )
    elif function and not re.fullmatch(IMPORT_PATH, str(function)):
        why = f": function {function!r} is not of the form package.module:name"
        yield refuse(kind=Kind.VALUE, why=why, use=example)
    elif isinstance(command, str) and not _is_command(command):
        yield refuse(kind=Kind.VALUE, why=f": command {command!r} can't be split into words", use=example)


def _is_command(text: str) -> bool:
    try:
        return bool(shlex.split(text))
    except ValueError:  # a quotation without an end
        return False


def list_notes(config: GRPOConfig) -> Iterator[Refusal]:
    """Yield notes about options without effect; AReaL's files often contain them."""
    if not config.async_training and (ahead := config.rollout.max_head_offpolicyness):
        why = "with async_training false the newest weights generate each batch"
        name = "rollout.max_head_offpolicyness"
        yield make_note(name, f": no effect: {why}", Kind.NO_EFFECT, value=ahead, related=("async_training",))
    for section in ("train_dataset", "valid_dataset"):
        dataset = getattr(config, section)
        if dataset is not None and dataset.too_long != "drop" and dataset.max_length is None:
            name, limit = f"{section}.too_long", f"{section}.max_length"
            why = f": no effect without {limit}"
            yield make_note(name, why, Kind.NO_EFFECT, value=dataset.too_long, related=(limit,))
    workflow, args = config.rollout.workflow, config.rollout.workflow_args
    idle = [name for name in args if name not in WORKFLOW_ARGS.get(workflow, [name])]
    if args.get("n_trajs") == config.gconfig.n_samples and "n_trajs" in idle:
        idle.remove("n_trajs")  # it means the same
    if idle:
        known = "" if workflow == "multi_turn" else "multi_turn, or "
        use = f"remove it, or set rollout.workflow to {known}your own package.module:name"
        names = ", ".join(idle)
        why = f": {names} has no effect, because workflow {workflow} takes no such argument; {use}"
        yield make_note("rollout.workflow_args", why, Kind.NO_EFFECT, related=("rollout.workflow",))


def check_servers(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    used = find_server_backend(config)
    neutral = GenerationHyperparameters()
    for name, instead in SERVER_BACKENDS[used].lacks.items() if used else ():
        for section, g in list_samplings(config).items():
            value = getattr(g, name)
            if value and value != getattr(neutral, name):
                yield Refusal(
                    option=f"{section}.{name}",
                    value=f"{value}",
                    kind=Kind.CONFLICT,
                    why=f"can't be used with {used} servers",
                    use=instead,
                    related=tuple(one for one in ("gconfig.stop_token_ids",) if one in instead),
                )


def check_callbacks(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse callbacks that are not import paths, or that are named twice."""
    for number, path in enumerate(config.callbacks):
        problem = "" if re.fullmatch(IMPORT_PATH, path) else "is not of the form package.module:Class"
        if path in config.callbacks[:number]:
            problem = "is named twice"
        if problem:
            yield Refusal(option="callbacks", value=repr(path), kind=Kind.VALUE, why=problem)


RULES = [check_batch_of_ranks, check_too_long, check_no_servers, check_callbacks]
GRPO_RULES = [
    check_groups,
    check_sampling,
    check_lengths,
    check_rollout,
    check_workflow_args,
    check_agent,
    check_servers,
]
