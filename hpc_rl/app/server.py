"""The server role: one replica of a pool, on the backend that the plan names for it."""

import asyncio
from importlib import import_module
from pathlib import Path

from hpc_rl.allocation import SERVER_BACKENDS
from hpc_rl.app import role
from hpc_rl.config.pool_view import as_pool
from hpc_rl.config.sections.experiment import GRPOConfig
from hpc_rl.name_resolve import open_names
from hpc_rl.servers.base import Backend, ReplicaPlace
from hpc_rl.servers.replica import Identity, Replica


def body(context: role.Context) -> int:
    config = context.config
    assert isinstance(config, GRPOConfig), "only its plan has servers"
    names = open_names(context.trial, config)
    unit = next(unit for unit in context.plan.units if unit.role == "server" and unit.index == context.index)
    name = next(pool.backend for pool in context.plan.pools if pool.name == unit.pool)
    who = Identity(context.index, context.attempt.id, context.incarnation, unit.pool)
    frozen = unit.pool in config.pools
    own = as_pool(config, unit.pool)
    log = context.attempt.log(name, context.index, context.incarnation)
    secret = context.attempt.dir / f"{name}-{context.index}.{context.incarnation}.yaml"
    place = ReplicaPlace(context.index, context.plan.device, unit.gpus_per_task, log, secret)
    # the module of the one that is used: torch is not there in front of SGLang
    module, _, cls = SERVER_BACKENDS[name].implementation.partition(":")
    backend: Backend = getattr(import_module(module), cls).create(own, place)
    wait = own.actor.init_from_scratch and not backend.makes_initial_weights
    base_path = "" if wait else str(Path(own.actor.path).expanduser().absolute())
    replica = Replica(backend, context.trial, names, context.tokens, who, base_path, context.address, frozen)
    return asyncio.run(replica.run(context.stopping))


if __name__ == "__main__":
    role.run("server", body)
