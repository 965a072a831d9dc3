"""The server role: one replica of a pool, on the backend in the plan."""

import asyncio
import hashlib
import socket
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from hpc_rl.config.options.experiment import GRPOConfig, has_trainer
from hpc_rl.config.pool_view import EVALUATION_POOL, view_pool
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.files import AWAY_S, wait_for_path
from hpc_rl.core.node_copies import choose_place
from hpc_rl.core.types import ONLY_VERSION
from hpc_rl.name_resolve import open_names
from hpc_rl.roles import role
from hpc_rl.roles.node_environment import NodeDirectory
from hpc_rl.servers import BACKENDS
from hpc_rl.servers.base import ReplicaPlace
from hpc_rl.servers.node_backend import NodeBackend
from hpc_rl.servers.replica import Identity, Replica
from hpc_rl.weight_files.model_copy import ModelCopy


def serve_replica(context: role.Context) -> int:
    config = context.config
    assert isinstance(config, GRPOConfig), "only its plan has servers"
    names = open_names(context.trial, config)
    unit = next(unit for unit in context.plan.units if unit.role == "server" and unit.index == context.index)
    name = next(pool.backend for pool in context.plan.pools if pool.name == unit.pool)
    who = Identity(context.index, context.attempt.id, context.incarnation, unit.pool)
    of_policy = unit.pool not in config.pools
    frozen = not of_policy or not has_trainer(config)
    label = str(ONLY_VERSION) if frozen and of_policy else ""
    evaluates = unit.pool == EVALUATION_POOL and not frozen
    own = view_pool(config, unit.pool)
    log = context.attempt.log(name, context.index, context.incarnation)
    secret = context.attempt.dir / f"{name}-{context.index}.{context.incarnation}.yaml"
    shares_gpus = context.plan.shares_gpus
    place = ReplicaPlace(
        context.index, context.plan.device, unit.gpus_per_task, log, secret, context.address, shares_gpus
    )
    # import only the used backend: the image of SGLang's front has no torch
    module, _, cls = BACKENDS[name].partition(":")
    backend: Any = getattr(import_module(module), cls).create(own, place)
    wait = shares_gpus or (own.actor.init_from_scratch and not backend.makes_initial_weights)
    base_path = "" if wait else str(Path(own.actor.path).expanduser().absolute())
    wait_s = AWAY_S if context.incarnation or context.attempt.restart > 0 else 0.0
    if base_path and not wait_for_path(Path(base_path), time.monotonic() + wait_s):
        raise ConfigError(f"server {unit.index}: {base_path} does not exist on node {socket.gethostname()}")
    with ExitStack() as stack:
        copy = (
            None
            if frozen
            else ModelCopy(_find_copy_folder(context, own.actor.path, stack), context.trial.weights)
        )
        backend = NodeBackend(backend, copy, context.copies, own.actor.path)
        replica = Replica(
            backend,
            context.trial,
            names,
            context.tokens,
            who,
            base_path,
            context.address,
            frozen,
            shares_gpus,
            label,
            evaluates,
        )
        return asyncio.run(replica.run(context.stopping))


def _find_copy_folder(context: role.Context, model: str, stack: ExitStack) -> Path:
    """Return the folder of this trial's copy of the model, on this node, and hold it while the role runs.

    Raises ConfigError if no place has room for the model.
    """
    if context.copies.folder:
        return context.copies.folder / "weights"
    num_bytes = sum(path.stat().st_size for path in Path(model).expanduser().glob("*.safetensors"))
    trial = hashlib.blake2b(str(context.trial.dir).encode(), digest_size=6).hexdigest()
    place = choose_place(num_bytes)
    directory = NodeDirectory({}, f"{context.attempt.job_id}-{trial}", str(place))
    stack.callback(directory.leave, in_order=True)
    return directory.path / "weights"


if __name__ == "__main__":
    role.run("server", serve_replica)
