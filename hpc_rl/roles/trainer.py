"""One rank of the trainer: join the other ranks, choose the state to continue from, compose, train."""

import logging
import os
import socket
from collections.abc import MutableMapping
from contextlib import ExitStack
from pkgutil import resolve_name

from hpc_rl.core import net
from hpc_rl.core.allocation import parse
from hpc_rl.core.collector import pause_collector, spare_collector
from hpc_rl.core.proc import keep_freed_memory
from hpc_rl.engines import ENGINES
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.roles import role
from hpc_rl.roles.role import Context
from hpc_rl.supervise.ownership import end_when_fenced

logger = logging.getLogger(__name__)
JOIN_TIMEOUT_S = 600.0
# ranks wait for rank 0 during publishes and evaluations; a dead rank is noticed at once
COLLECTIVE_TIMEOUT_S = 4 * 3600.0


def train_rank(context: Context) -> int:
    train_part = parse(context.plan.allocation).train
    assert train_part is not None, "a plan with a trainer names its engine"
    # imported here because torch takes seconds: the process record is already written
    with pause_collector():
        from hpc_rl.engines.shared import (
            collectives,
            distributed,
        )
        from hpc_rl.trainers.compose import COMPOSE
        from hpc_rl.trainers.loop import train
        from hpc_rl.trainers.ranks import Ranks
        from hpc_rl.trainers.start import TrainerContext

        resolve_name(ENGINES[train_part.backend])

    log_start(context, "libraries are imported")
    names = open_names(context.trial, context.config)
    if context.rank == 0:  # only rank 0 commits
        end_when_fenced(open_names(context.trial, context.config), context.attempt)
    device = choose_device(context)
    if device == "cpu":
        keep_freed_memory()
    key = keys.rendezvous(context.attempt.id, context.incarnation)  # of the process group's store

    mpi = context.mpi

    def publish(address: str, port: int) -> None:
        mpi.share((address, port)) if mpi else names.put(key, {"address": address, "port": port})

    def find() -> tuple[str, int]:
        if mpi:
            return mpi.share(None)
        record = names.wait(key, JOIN_TIMEOUT_S)
        return record["address"], record["port"]

    if context.plan.n_nodes > 1:
        use_interface(os.environ, context.address)
    store = distributed.init_ranks(
        context.rank,
        context.num_ranks,
        device,
        publish=publish,
        find=find,
        timeout_s=COLLECTIVE_TIMEOUT_S,
        join_timeout_s=JOIN_TIMEOUT_S,
        address=context.address,
    )
    if mpi:
        mpi.finish()
    log_start(context, "all ranks of the trainer have joined")
    if store is not None and context.config.launcher.check_collectives:
        found = collectives.check(store, device, os.environ.get("SLURMD_NODENAME") or socket.gethostname())
        log_start(context, f"the collectives work: {found.summary}")
        for node, reason in found.slow.items():
            logger.warning("the network of node %s is slow: %s", node, reason)
    start = TrainerContext(
        trial=context.trial,
        attempt=context.attempt,
        incarnation=context.incarnation,
        config=context.config,
        tokens=context.tokens,
        names=names,
        train=train_part,
        device=device,
        ranks=Ranks(),
        stopping=context.stopping,
        copies=context.copies,
        address=context.address,
        is_one_node=len(next(one for one in context.plan.units if one.role == "trainer").nodes) == 1,
        shares_gpus=context.plan.shares_gpus,
    )
    with ExitStack() as stack:
        run, recipe = COMPOSE[context.plan.trainer](start, stack)
        log_start(context, f"the state of step {run.step} is loaded; this start is lineage {run.lineage}")
        spare_collector()
        code = train(run, recipe)
    distributed.shutdown()
    return code


def use_interface(environ: MutableMapping[str, str], address: str) -> None:
    """Let NCCL and gloo use the interface with this address, unless the user chose another."""
    if interface := net.find_interface(address):
        environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # `=` for an exact match, not a prefix
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def log_start(context: Context, milestone: str) -> None:
    """Log a milestone of the start, on rank 0: the timestamps show the duration of each part."""
    if context.rank == 0:
        logger.info("trainer start: %s", milestone)


def choose_device(context: Context) -> str:
    """Return the GPU of this rank among the visible GPUs, or the CPU."""
    if context.plan.device != "cuda":
        return "cpu"
    import torch

    unit = next(unit for unit in context.plan.units if unit.role == "trainer")
    local_rank = context.mpi.local_rank if context.mpi else context.rank % unit.tasks_per_node
    return f"cuda:{local_rank % max(1, torch.cuda.device_count())}"


if __name__ == "__main__":
    role.run("trainer", train_rank)
