"""The rollout role: sequencer, ledger and service in this process, workflows in its executor workers."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from typing import Any

from hpc_rl.atropos.hosting import host_environments
from hpc_rl.checkpoint.lineage import find_newest_number
from hpc_rl.config.changes import digest_options
from hpc_rl.config.options.experiment import GRPOConfig, has_own_prompts
from hpc_rl.config.pool_view import find_trained_pool
from hpc_rl.config.rules.file_rules import find_context
from hpc_rl.core import net
from hpc_rl.core.collector import spare_collector
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.http_service import HttpService
from hpc_rl.core.records import LineageRecord, load_lineages
from hpc_rl.datasets.curriculum import Curriculum
from hpc_rl.datasets.encode import Prompts
from hpc_rl.datasets.held_out import open_held_out_sets
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.name_resolve.roster import RosterReader
from hpc_rl.name_resolve.shared_fs import Lease
from hpc_rl.roles import role
from hpc_rl.rollout import routes
from hpc_rl.rollout.batch_log.judged import Judged
from hpc_rl.rollout.executor import Executor
from hpc_rl.rollout.report import describe_progress, keep_reporting
from hpc_rl.rollout.sequencer import Sequencer, make_rules
from hpc_rl.rollout.service import RolloutService
from hpc_rl.supervise.ownership import end_when_fenced
from hpc_rl.trials.user_code import fingerprint_judges

logger = logging.getLogger(__name__)

LISTENER_VARIABLE = "HPC_RL_LISTENER_FD"


def serve_rollout(context: role.Context) -> int:
    assert isinstance(context.config, GRPOConfig), "only its plan has a rollout role"
    end_when_fenced(open_names(context.trial, context.config), context.attempt)
    return asyncio.run(serve(context, context.config))


def open_prompts(config: GRPOConfig) -> tuple[Curriculum, dict[str, Prompts]]:
    """Return the training prompts (None if environments have them) and the held-out prompts by set."""
    tokenizer = Tokenizer(config.tokenizer_path or config.actor.path)
    dataset = config.train_dataset if has_own_prompts(config) else None
    prompts = Curriculum(dataset, tokenizer, config.seed)
    return prompts, open_held_out_sets(config, tokenizer)


async def serve(context: role.Context, config: GRPOConfig) -> int:
    prompts, held_out = open_prompts(config)
    names = open_names(context.trial, config)
    sequencer = Sequencer(make_rules(config))
    trial = context.trial

    def list_lineages() -> tuple[int, list[LineageRecord]]:
        return find_newest_number(trial), load_lineages(trial)

    executor = Executor(lambda number: make_worker_argv(context, number), config.rollout.num_workers)
    service = RolloutService(
        trial.rollout, sequencer, prompts, held_out, list_lineages, executor, lambda: context.deadline.left_s
    )
    judges = await asyncio.to_thread(fingerprint_judges, config, sys.path)
    service.judged = Judged(trial.rollout, judges)
    service.evaluations.options = config.evaluator
    service.evaluations.identity = json.dumps([judges, digest_options(config)], sort_keys=True)
    await executor.start()

    rosters = {pool.name: RosterReader(names, keys.servers(pool.name)) for pool in context.plan.pools}

    def count_live_servers() -> dict[str, int]:
        """Return the number of live servers in each pool."""
        return {name: sum(seen.alive for seen in one.list_leases().values()) for name, one in rosters.items()}

    trained = RosterReader(names, keys.servers(find_trained_pool(config)))

    def count_servers() -> int:
        """Return the number of live servers in the pool that follows the trainer."""
        return sum(seen.alive for seen in trained.list_leases().values())

    stack = contextlib.AsyncExitStack()
    if config.environments is None:
        defs = routes.make_rollout_routes(service, count_servers)
    else:
        own_names, length = open_names(trial, config), find_context(config)
        hosting = host_environments(service, config, own_names, trial, length, count_servers)
        defs = await stack.enter_async_context(hosting)
    app = routes.make_application(defs, context.tokens)
    http = HttpService(app, close_timeout_s=1.0)
    inherited = os.environ.get(LISTENER_VARIABLE)  # the socket of roles/rollout_front.py
    listener = socket.socket(fileno=int(inherited)) if inherited else net.bind_published(context.address)
    await http.start(listener)
    url = net.make_http_url(context.address, listener.getsockname()[1])
    who = {"attempt": context.attempt.id, "pid": os.getpid(), "host": socket.gethostname()}
    record = {"url": url, **who}
    lease = await asyncio.to_thread(names.lease, keys.ROLLOUT, record)
    logger.info("the rollout role serves batches at %s", url)
    report_to = context.attempt.rollout_report(context.incarnation)
    report = keep_reporting(
        report_to, lambda: describe_progress(service), lambda: report_servers(count_live_servers())
    )
    renewing = _renew(lease, record, service)
    spare_collector()
    duties = {
        asyncio.create_task(duty)
        for duty in (service.run(), executor.wait_for_failure(), renewing, _wait_for_stop(context), report)
    }
    try:
        done, _ = await asyncio.wait(duties, return_when=asyncio.FIRST_COMPLETED)
        for duty in done:
            duty.result()
        lease.release()
        return ExitCode.STOPPED
    finally:
        for duty in duties:
            duty.cancel()
        await http.close()
        await stack.aclose()
        await executor.close()
        await service.close()


def report_servers(by_pool: dict[str, int]) -> dict[str, Any]:
    """Return the servers' part of the report."""
    return {"servers": sum(by_pool.values()), "pools": by_pool}


def make_worker_argv(context: role.Context, number: int) -> list[str]:
    where = ["--trial_dir", str(context.trial.dir), "--attempt", context.attempt.id]
    return [sys.executable, "-m", "hpc_rl.roles.rollout_worker", *where, "--index", str(number)]


async def _renew(lease: Lease, record: dict, service: RolloutService) -> None:
    """Renew the lease for ever. Raises Stale once another incarnation has taken over."""
    while True:
        await asyncio.sleep(1.0)
        try:
            sequencer = service.sequencer
            waits = {
                keys.WAITS_FOR_ROOM: service.ledger.room.waiting,
                keys.WAITS_FOR_GROUPS: sequencer.rules.batch_sequences is not None and not sequencer.running,
            }
            if lease.is_due(record | waits):
                await asyncio.to_thread(lease.renew, record | waits)
        # a shared file system may fail for a while; the ledger's own writes decide whether we live
        except OSError as error:
            logger.warning("the rollout role can't write its heartbeat and tries again: %s", error)


async def _wait_for_stop(context: role.Context) -> None:
    while not context.stopping.is_set():
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    role.run("rollout", serve_rollout)
