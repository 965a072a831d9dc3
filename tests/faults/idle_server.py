"""A server without a model, for what counts files and calls: the life of a replica, over a backend that
generates nothing.
"""

import asyncio
from typing import Any

from hpc_rl.name_resolve import open_names
from hpc_rl.roles import role
from hpc_rl.servers.replica import Identity, Replica


class NoModel:
    makes_initial_weights = False
    receiver = None

    async def start(self, path: str, version: str) -> None:
        pass

    async def request(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        return 200, {}

    def alive(self) -> str:
        return ""

    async def stop(self) -> None:
        pass


def body(context: role.Context) -> int:
    names = open_names(context.trial, context.config)
    who = Identity(context.index, context.attempt.id, context.incarnation)
    replica = Replica(NoModel(), context.trial, names, context.tokens, who, "/model", context.address)
    return asyncio.run(replica.run(context.stopping))


if __name__ == "__main__":
    role.run("server", body)
