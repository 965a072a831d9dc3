"""Pools of servers: which of them follows the trainer, and the configuration as another pool sees it."""

import json
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

from hpc_rl.config.load.fields import alternatives, base_of, hints, is_optional
from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.config.options.inference import REWARDS, GenerationHyperparameters
from hpc_rl.core.allocation import DEFAULT_POOL, SERVER_BACKENDS, Allocation, parse
from hpc_rl.core.errors import ConfigError


def trained_pool(config: Config) -> str:
    """Return the pool that gets the trainer's weights: the one without an entry in `pools`.

    Raises ConfigError where the allocation has not exactly one.
    """
    return trained_pool_of(config, parse(config.allocation_mode)) if config.allocation_mode else DEFAULT_POOL


def trained_pool_of(config: Config, allocation: Allocation) -> str:
    """As trained_pool, of an allocation that may be derived."""
    others = config.pools if isinstance(config, GRPOConfig) else {}
    names = [servers.pool for servers in allocation.pools if servers.pool not in others]
    if len(names) == 1:
        return names[0]
    problem = (
        f"allocation_mode {allocation} must have one pool without an entry in pools: its servers get the "
    )
    problem += f"weights of the trainer. It has {len(names)}"
    if names:
        extra = " or ".join(f"pools.{name}.path" for name in names)
        raise ConfigError(f"{problem} ({', '.join(names)}); set {extra}.")
    raise ConfigError(f"{problem}; add one, as {allocation.pools[0].backend}:d1+{allocation}.")


def reward_models(config: GRPOConfig) -> list[str]:
    """Return the pools whose model scores completions: those that `rollout.reward_fn` names."""
    return [one for one in config.rollout.reward_functions if one in config.pools and one not in REWARDS]


def as_pool(config: GRPOConfig, name: str) -> GRPOConfig:
    """Return the configuration as servers and clients of a pool see it: its model, sampling and python.

    That of the pool that follows the trainer is `config` itself. A reward model has `actor.is_critic`.
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
    is_critic = name in reward_models(config)
    actor = replace(config.actor, path=pool.path, init_from_scratch=False, is_critic=is_critic)
    python = pool.python or config.launcher.inference_server_python
    launcher = replace(config.launcher, inference_server_python=python)
    view = replace(
        config, actor=actor, gconfig=gconfig, tokenizer_path=pool.tokenizer_path, launcher=launcher
    )
    backend = backend_of(config, name)
    if not backend or not pool.options:
        return view
    section = SERVER_BACKENDS[backend].section
    cls: type = type(getattr(config, section))
    kinds = hints(cls)
    own = {key: value_in_text(kinds[key], text) for key, text in pool.options.items()}
    return replace(view, **{section: replace(getattr(view, section), **own)})


def backend_of(config: GRPOConfig, name: str) -> str:
    """Return the backend of a pool of the allocation; empty for an endpoint elsewhere."""
    pools = parse(config.allocation_mode).pools if config.allocation_mode else ()
    return next((servers.backend for servers in pools if servers.pool == name), "")


def value_in_text(hint: Any, text: str) -> Any:
    """Return the value that a text stands for; rules/pool_rules.py has checked it. Raises ValueError."""
    kinds = [base_of(kind) for kind in alternatives(hint)]
    if str in kinds or any(get_origin(kind) is Literal and text in get_args(kind) for kind in kinds):
        return None if text == "null" and is_optional(hint) else text
    return json.loads(text)
