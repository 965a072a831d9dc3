"""Pools of servers: find the pool that the trainer updates, and the configuration of any other pool."""

import json
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

from hpc_rl.config.load.fields import is_optional, list_alternatives, list_hints, strip_limits
from hpc_rl.config.options.experiment import Config, GRPOConfig, has_trainer
from hpc_rl.config.options.inference import REWARDS, GenerationHyperparameters
from hpc_rl.core.algorithms import ALGORITHMS
from hpc_rl.core.allocation import DEFAULT_POOL, Allocation, parse
from hpc_rl.core.backends import SERVER_BACKENDS
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

DEFAULT_TEACHER = "teacher"
EVALUATION_POOL = "eval"  # servers for evaluations alone


def find_trained_pool(config: Config) -> str:
    """Return the pool that gets the trainer's weights: not `eval`, and not in `pools`.

    Raises ConfigError if the allocation has none or several.
    """
    return (
        find_trained_pool_in(config, parse(config.allocation_mode))
        if config.allocation_mode
        else DEFAULT_POOL
    )


def find_trained_pool_in(config: Config, allocation: Allocation) -> str:
    """Do the same for a given allocation, which may be derived."""
    names = _list_trained_pools(config, allocation)
    if len(names) == 1:
        return names[0]
    has = f"It has {len(names)}" + (f" ({', '.join(names)})" if names else "")
    paths = tuple(f"pools.{name}.path" for name in names)
    raise ConfigError(
        Refusal(
            option="allocation_mode",
            value=allocation,
            kind=Kind.CONFLICT,
            why=f"must have exactly one pool that is not in section pools, for the trained model. {has}",
            use=f"set {' or '.join(paths)}"
            if names
            else f"add {allocation.pools[0].backend}:d1+{allocation}",
            related=("pools", *paths),
        )
    )


def _list_trained_pools(config: Config, allocation: Allocation) -> list[str]:
    others = {EVALUATION_POOL, *(config.pools if isinstance(config, GRPOConfig) else {})}
    return [servers.pool for servers in allocation.pools if servers.pool not in others]


def has_evaluation_pool(config: GRPOConfig) -> bool:
    """Return whether the trial has servers for evaluations alone, which get the versions to evaluate."""
    placed = parse(config.allocation_mode).pools if config.allocation_mode and has_trainer(config) else ()
    return EVALUATION_POOL not in config.pools and any(one.pool == EVALUATION_POOL for one in placed)


def list_reward_models(config: GRPOConfig) -> list[str]:
    """Return the pools that `rollout.reward_fn` names: their models score completions."""
    return [one for one in config.rollout.reward_functions if one in config.pools and one not in REWARDS]


def find_teacher_pool(config: GRPOConfig) -> str | None:
    """Return the pool of the teacher of a distillation; None for the trained model's own, or without one."""
    section = config.distillation
    if section is None:
        return None
    name = DEFAULT_TEACHER if section.pool is None else section.pool
    placed = config.allocation_mode
    trained = _list_trained_pools(config, parse(placed)) if placed else [DEFAULT_POOL]
    return None if trained == [name] else name


def is_scoring_teacher(config: GRPOConfig, name: str) -> bool:
    """Return whether a pool only gives log-probabilities of tokens, and writes nothing."""
    row, judge = ALGORITHMS.get(config.actor.algorithm), config.rollout.judge
    samples = row is not None and row.sampled_by == "teacher"
    writes = ":" in config.rollout.workflow or (judge is not None and judge.pool == name)
    return name == find_teacher_pool(config) and not samples and not writes


def view_pool(config: GRPOConfig, name: str) -> GRPOConfig:
    """Return the configuration for servers and clients of a pool: with its model, sampling and python.

    The pool that the trainer updates gets `config` itself. For a reward model `actor.is_critic` is true.
    """
    if name not in config.pools:
        return config
    pool = config.pools[name]
    gconfig = GenerationHyperparameters(
        max_new_tokens=pool.max_new_tokens,
        temperature=pool.temperature,
        top_p=pool.top_p,
        stop_token_ids=pool.stop_token_ids,
    )
    is_critic = name in list_reward_models(config)
    actor = replace(
        config.actor,
        path=pool.path,
        init_from_scratch=False,
        is_critic=is_critic,
        weight_update_mode="disk",
        use_lora=False,
    )
    python = pool.python or config.launcher.inference_server_python
    launcher = replace(config.launcher, inference_server_python=python)
    view = replace(
        config, actor=actor, gconfig=gconfig, tokenizer_path=pool.tokenizer_path, launcher=launcher
    )
    backend = find_backend(config, name)
    if not backend or not pool.options:
        return view
    section = SERVER_BACKENDS[backend].section
    cls: type = type(getattr(config, section))
    kinds = list_hints(cls)
    own = {key: parse_value(kinds[key], text) for key, text in pool.options.items()}
    return replace(view, **{section: replace(getattr(view, section), **own)})


def find_backend(config: GRPOConfig, name: str) -> str:
    """Return the backend of a pool; empty if the allocation has no servers for it."""
    pools = parse(config.allocation_mode).pools if config.allocation_mode else ()
    return next((servers.backend for servers in pools if servers.pool == name), "")


def parse_value(hint: Any, text: str) -> Any:
    """Parse the text of a pool's option, which rules/pool_rules.py has checked. Raises ValueError."""
    kinds = [strip_limits(kind) for kind in list_alternatives(hint)]
    if str in kinds or any(get_origin(kind) is Literal and text in get_args(kind) for kind in kinds):
        return None if text == "null" and is_optional(hint) else text
    return json.loads(text)
