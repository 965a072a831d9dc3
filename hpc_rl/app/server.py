"""The server role: one replica of the generation backend that the plan names."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hpc_rl.app import role
from hpc_rl.config.sections.experiment import GRPOConfig
from hpc_rl.errors import ConfigError
from hpc_rl.name_resolve import open_names
from hpc_rl.servers.base import Backend
from hpc_rl.servers.replica import Identity, Replica


def body(context: role.Context) -> int:
    config = context.config
    if not isinstance(config, GRPOConfig):
        raise ConfigError("a trial of this kind has no generation servers")
    return asyncio.run(_serve(context, config))


async def _serve(context: role.Context, config: GRPOConfig) -> int:
    names = open_names(context.trial, config)
    who = Identity(context.index, context.attempt.id, context.incarnation)
    backend = _backend(context, config)
    wait = config.actor.init_from_scratch and context.plan.server_backend == "sglang"
    base_path = "" if wait else str(Path(config.actor.path).expanduser().absolute())
    replica = Replica(backend, context.trial, names, context.tokens, who, base_path, context.address)
    return await replica.run(context.stopping)


def _backend(context: role.Context, config: GRPOConfig) -> Backend:
    tokenizer_path = config.tokenizer_path or config.actor.path
    if context.plan.server_backend == "embedded":
        from hpc_rl.servers.embedded.backend import (
            EmbeddedBackend,
        )  # torch, which a role in front of SGLang does without

        return EmbeddedBackend(config.embedded, config.seed, tokenizer_path, config.actor.init_from_scratch)
    from hpc_rl.servers.sglang import SGLangBackend, launch_of

    unit = next(unit for unit in context.plan.units if unit.role == "server" and unit.index == context.index)
    launch = launch_of(config, context.plan.device, unit.gpus_per_task, context.index, tokenizer_path)
    log = context.attempt.log("sglang", context.index, context.incarnation)
    secret = context.attempt.dir / f"sglang-{context.index}.{context.incarnation}.yaml"
    return SGLangBackend(launch, log, secret, config.rollout.setup_timeout)


if __name__ == "__main__":
    role.run("server", body)
