"""A rollout role without prompts: its lease, and the router that follows the leases of the servers."""

import asyncio

from hpc_rl.core.errors import ExitCode
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.roles import role
from hpc_rl.servers.router import Router


def body(context: role.Context) -> int:
    return asyncio.run(follow(context))


async def follow(context: role.Context) -> int:
    names = open_names(context.trial, context.config)
    lease = names.lease(keys.ROLLOUT, {"attempt": context.attempt.id})
    async with Router(open_names(context.trial, context.config), context.tokens["data"]):
        while not context.stopping.is_set():
            if lease.is_due():
                lease.renew()
            await asyncio.sleep(0.5)
    return ExitCode.STOPPED


if __name__ == "__main__":
    role.run("rollout", body)
