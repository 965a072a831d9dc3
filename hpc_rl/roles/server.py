"""The server role: one replica of a pool, on the backend in the plan.

A replica that spans nodes has a process on each: the first is the replica, the others are its members.
"""

import asyncio
import hashlib
import socket
import time
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hpc_rl.config.options.experiment import GRPOConfig, has_trainer
from hpc_rl.config.pool_view import EVALUATION_POOL, view_pool
from hpc_rl.core.allocation import parse
from hpc_rl.core.collector import pause_collector
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.files import AWAY_S, wait_for_path
from hpc_rl.core.net import bind_published
from hpc_rl.core.node_copies import choose_place
from hpc_rl.core.types import ONLY_VERSION
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.plan.schema import Unit
from hpc_rl.roles import role
from hpc_rl.roles.node_environment import NodeDirectory
from hpc_rl.servers import BACKENDS
from hpc_rl.servers.base import ReplicaPlace
from hpc_rl.servers.members import Member, Members
from hpc_rl.servers.node_backend import NodeBackend
from hpc_rl.servers.replica import Identity, Replica
from hpc_rl.weight_files.model_copy import ModelCopy


def serve(context: role.Context) -> int:
    """Serve a replica, or a part of it on another node than its first."""
    return _serve_replica(context) if context.rank == 0 else _serve_member(context)


def _serve_replica(context: role.Context) -> int:
    config, unit = _get_config(context), _get_unit(context)
    names = open_names(context.trial, config)
    who = Identity(context.index, context.attempt.id, context.incarnation, unit.pool)
    of_policy = unit.pool not in config.pools
    frozen = not of_policy or not has_trainer(config)
    label = str(ONLY_VERSION) if frozen and of_policy else ""
    evaluates = unit.pool == EVALUATION_POOL and not frozen
    own = view_pool(config, unit.pool)
    shares_gpus = context.plan.shares_gpus
    rendezvous = ("", 0)
    if len(unit.nodes) > 1:
        with bind_published(context.address) as sock:  # free now; if another takes it, the replica restarts
            rendezvous = (context.address, sock.getsockname()[1])
    backend: Any = _create_backend(context, rendezvous)
    wait = shares_gpus or (own.actor.init_from_scratch and not backend.makes_initial_weights)
    base_path = "" if wait else str(Path(own.actor.path).expanduser().absolute())
    wait_s = AWAY_S if context.incarnation or context.attempt.restart > 0 else 0.0
    if base_path and not wait_for_path(Path(base_path), time.monotonic() + wait_s):
        raise ConfigError(f"server {unit.index}: {base_path} does not exist on node {socket.gethostname()}")
    ranks = range(1, len(unit.nodes))
    members = Members(
        names,
        [keys.member(context.attempt.id, unit.index, context.incarnation, rank) for rank in ranks],
        context.tokens["control"],
        rendezvous,
        config.rollout.setup_timeout,
    )
    with ExitStack() as stack:
        copy = (
            None
            if frozen
            else ModelCopy(_find_copy_folder(context, own.actor.path, stack), context.trial.weights)
        )
        backend = NodeBackend(backend, copy, context.copies, own.actor.path, members)
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


def _serve_member(context: role.Context) -> int:
    unit, names = _get_unit(context), open_names(context.trial, context.config)
    key = keys.member(context.attempt.id, unit.index, context.incarnation, context.rank)
    with ExitStack() as stack:
        member = Member(
            partial(_create_backend, context),
            partial(_open_copy_folder, context, stack),
            context.trial.weights,
            context.copies,
            context.tokens,
        )
        publish = partial(_publish_member, names, key)
        return asyncio.run(member.run(context.address, publish, context.stopping))


def _publish_member(names: NameResolve, key: str, url: str) -> None:
    names.put(key, {"url": url})


def _get_config(context: role.Context) -> GRPOConfig:
    config = context.config
    assert isinstance(config, GRPOConfig), "only its plan has servers"
    return config


def _get_unit(context: role.Context) -> Unit:
    units = context.plan.units
    return next(unit for unit in units if unit.role == "server" and unit.index == context.index)


def _create_backend(context: role.Context, rendezvous: tuple[str, int]) -> Any:
    """Create the backend of this node's part of the replica, without starting it."""
    unit, attempt = _get_unit(context), context.attempt
    servers = next(one for one in parse(context.plan.allocation).pools if one.pool == unit.pool)
    rank = context.rank if len(unit.nodes) > 1 else None
    suffix = f".{rank}" if rank else ""
    place = ReplicaPlace(
        context.index,
        context.plan.device,
        servers.units_per_replica,
        attempt.log(servers.backend, context.index, context.incarnation, rank),
        attempt.dir / f"{servers.backend}-{context.index}.{context.incarnation}{suffix}.yaml",
        context.address,
        context.plan.shares_gpus,
        num_nodes=len(unit.nodes),
        node_rank=context.rank,
        rendezvous=rendezvous,
    )
    # import only the used backend: the image of SGLang's front has no torch
    module, _, cls = BACKENDS[servers.backend].partition(":")
    with pause_collector():
        backend = getattr(import_module(module), cls)
    return backend.create(view_pool(_get_config(context), unit.pool), place)


def _find_copy_folder(context: role.Context, model: str, stack: ExitStack) -> Path:
    """Return the folder of this trial's copy of the model, on this node, and hold it while the role runs.

    Raises ConfigError if no place has room for the model.
    """
    if context.copies.folder:
        return context.copies.folder / "weights"
    num_bytes = sum(path.stat().st_size for path in Path(model).expanduser().glob("*.safetensors"))
    return _hold_directory(context, choose_place(num_bytes), stack).path / "weights"


def _open_copy_folder(context: role.Context, stack: ExitStack, folder: Path) -> None:
    """Create the directory of the first node's copy on this node, too, and hold it while the role runs.

    Raises ConfigError if this node has another one.
    """
    if context.copies.folder:
        own = context.copies.folder
    else:
        own = _hold_directory(context, folder.parent.parent, stack).path
    if folder.parent != own:
        raise ConfigError(
            f"node {socket.gethostname()} keeps its copy of the weights in {own}, but the first node of this "
            f"replica in {folder.parent}: the inference engine needs the same path on each node. Set "
            "cluster.local_dir to a directory with the same name on all nodes."
        )


def _hold_directory(context: role.Context, place: Path, stack: ExitStack) -> NodeDirectory:
    trial = hashlib.blake2b(str(context.trial.dir).encode(), digest_size=6).hexdigest()
    directory = NodeDirectory({}, f"{context.attempt.job_id}-{trial}", str(place))
    stack.callback(directory.leave, in_order=True)
    return directory


if __name__ == "__main__":
    role.run("server", serve)
