"""The rollout role of a trial without a trainer: its lease, its report, and its end."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.core.errors import ExitCode
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.name_resolve.roster import RosterReader
from hpc_rl.name_resolve.shared_fs import Lease
from hpc_rl.roles import role
from hpc_rl.roles.rollout import report_servers
from hpc_rl.rollout.report import keep_reporting

logger = logging.getLogger(__name__)


async def work(
    context: role.Context,
    config: GRPOConfig,
    *tasks: Coroutine[Any, Any, Any],
    describe: Callable[[], dict[str, Any]],
    url: str = "",
) -> ExitCode:
    """Do the role's tasks until one of them is finished, or a stop is requested; return the exit code.

    `describe` returns the report for status; `url` is for clients. Raises the error of a task, and Stale once
    another incarnation has taken over.
    """
    names = open_names(context.trial, config)
    rosters = {pool.name: RosterReader(names, keys.servers(pool.name)) for pool in context.plan.pools}

    def count_servers() -> dict[str, Any]:
        live = {name: sum(one.alive for one in seen.list_leases().values()) for name, seen in rosters.items()}
        return report_servers(live)

    record = {"url": url, "attempt": context.attempt.id, "pid": os.getpid(), "host": socket.gethostname()}
    lease = await asyncio.to_thread(open_names(context.trial, config).lease, keys.ROLLOUT, record)
    report = keep_reporting(context.attempt.rollout_report(context.incarnation), describe, count_servers)
    own = [asyncio.ensure_future(task) for task in tasks]
    others = [asyncio.ensure_future(one) for one in (_renew(lease, record), _wait_for_stop(context), report)]
    try:
        await asyncio.wait({*own, *others}, return_when=asyncio.FIRST_COMPLETED)
        for one in (*own, *others):
            if one.done():
                one.result()  # raises its error
        lease.release()
        return ExitCode.DONE if any(one.done() for one in own) else ExitCode.STOPPED
    finally:
        for one in (*own, *others):
            one.cancel()
        await asyncio.gather(*own, *others, return_exceptions=True)


async def _renew(lease: Lease, record: dict[str, Any]) -> None:
    """Renew the lease; never returns. Raises Stale once another incarnation has taken over."""
    while True:
        await asyncio.sleep(1.0)
        try:
            if lease.is_due(record):
                await asyncio.to_thread(lease.renew, record)
        except OSError as error:  # a shared file system may fail for a while
            logger.warning("the rollout role can't write its heartbeat and tries again: %s", error)


async def _wait_for_stop(context: role.Context) -> None:
    while not context.stopping.is_set():
        await asyncio.sleep(0.2)
