"""The server role: one replica of a pool, on the backend in the plan."""

import asyncio
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.pool_view import view_pool
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.files import AWAY_S, wait_for_path
from hpc_rl.core.node_copies import NodeCopies
from hpc_rl.name_resolve import open_names
from hpc_rl.plan.schema import Unit
from hpc_rl.roles import role
from hpc_rl.servers import BACKENDS
from hpc_rl.servers.base import Answer, Backend, ReplicaPlace
from hpc_rl.servers.replica import Identity, Replica


@dataclass
class LocalBackend:
    """A backend that loads checkpoints from copies on this node's local disk. See Backend."""

    backend: Backend
    copies: NodeCopies
    base_path: str
    shares: bool  # other replicas of this node load the same published weights

    async def start(self, path: str, version: str) -> None:
        with ExitStack() as held:
            await self.backend.start(await self._copy_locally(path, held), version)

    async def request(self, path: str, body: dict[str, Any] | None) -> Answer:
        with ExitStack() as held:
            if path == "/update_weights_from_disk" and body and isinstance(body.get("model_path"), str):
                body = {**body, "model_path": await self._copy_locally(body["model_path"], held)}
            return await self.backend.request(path, body)

    async def _copy_locally(self, path: str, held: ExitStack) -> str:
        is_base = path == self.base_path
        if not is_base and not self.shares:  # it is read only once
            return path
        return await asyncio.to_thread(held.enter_context, self.copies.open_copy(path, not is_base))

    def alive(self) -> str:
        return self.backend.alive()

    async def stop(self) -> None:
        await self.backend.stop()


def has_neighbours(units: Sequence[Unit], unit: Unit) -> bool:
    """Return whether other replicas on the same node load the same weights."""
    return sum((one.role, one.pool, one.nodes) == (unit.role, unit.pool, unit.nodes) for one in units) > 1


def serve_replica(context: role.Context) -> int:
    config = context.config
    assert isinstance(config, GRPOConfig), "only its plan has servers"
    names = open_names(context.trial, config)
    unit = next(unit for unit in context.plan.units if unit.role == "server" and unit.index == context.index)
    name = next(pool.backend for pool in context.plan.pools if pool.name == unit.pool)
    who = Identity(context.index, context.attempt.id, context.incarnation, unit.pool)
    frozen = unit.pool in config.pools
    own = view_pool(config, unit.pool)
    log = context.attempt.log(name, context.index, context.incarnation)
    secret = context.attempt.dir / f"{name}-{context.index}.{context.incarnation}.yaml"
    place = ReplicaPlace(context.index, context.plan.device, unit.gpus_per_task, log, secret)
    # import only the used backend: the image of SGLang's front has no torch
    module, _, cls = BACKENDS[name].partition(":")
    backend: Any = getattr(import_module(module), cls).create(own, place)
    wait = own.actor.init_from_scratch and not backend.makes_initial_weights
    base_path = "" if wait else str(Path(own.actor.path).expanduser().absolute())
    wait_s = AWAY_S if context.incarnation or context.attempt.restart > 0 else 0.0
    if base_path and not wait_for_path(Path(base_path), time.monotonic() + wait_s):
        raise ConfigError(f"server {unit.index}: {base_path} does not exist on node {socket.gethostname()}")
    if context.copies.folder:
        shares = not frozen and has_neighbours(context.plan.units, unit)
        backend = LocalBackend(backend, context.copies, base_path, shares)
    replica = Replica(backend, context.trial, names, context.tokens, who, base_path, context.address, frozen)
    return asyncio.run(replica.run(context.stopping))


if __name__ == "__main__":
    role.run("server", serve_replica)
