"""Common parts of all role processes: arguments, log, records, signals and the supervisor's pipe.

A role is started as `python -m hpc_rl.roles.<role> --trial_dir D --attempt A --index I --incarnation K` with
its standard input connected to the supervisor. The end of that input means that the supervisor is gone: the
process exits at once, so that it never writes at the same time as the next incarnation. The lines of that
input, and the signals, are described in control.py.
"""

import argparse
import contextlib
import errno
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from hpc_rl.config.load.stored import from_dict
from hpc_rl.config.options.experiment import Config, GRPOConfig, get_value
from hpc_rl.core import (
    log,
    net,
)
from hpc_rl.core.errors import (
    ConfigError,
    ExitCode,
    FailureClass,
    GivenUp,
    HpcRlError,
    NodeFailed,
    TrialBusy,
    TrialStateError,
)
from hpc_rl.core.files import FULL, is_full
from hpc_rl.core.node_copies import NodeCopies
from hpc_rl.core.records import ExitRecord, ProcessRecord
from hpc_rl.core.resource_limits import raise_limits
from hpc_rl.core.trial import Attempt, Trial, write_json
from hpc_rl.plan.schema import Plan
from hpc_rl.roles import control
from hpc_rl.roles.control import Deadline, Stacks
from hpc_rl.roles.mpi_ranks import MpiRanks
from hpc_rl.roles.node_environment import NodeDirectory, correct
from hpc_rl.schedulers.hostlist import list_job_hosts, list_peer_hosts

logger = logging.getLogger(__name__)
CANNOT_WRITE = (*FULL, errno.EROFS)
# The option of launcher with the variables of a role; the plan does not contain their secrets.
VARIABLES_OF = {"trainer": "trainer_env_vars", "server": "inference_server_env_vars"}
# For `hpc-rl attach`: the scheduler's numbers and names of step, node and job.
OF_SLURM = {"step": "SLURM_STEP_ID", "node": "SLURMD_NODENAME", "job_id": "SLURM_JOB_ID"}


@dataclass
class Context:
    """Identity and inputs of a role process."""

    role: str
    attempt: Attempt
    index: int
    incarnation: int
    rank: int
    num_ranks: int
    tokens: dict[str, str]
    mpi: MpiRanks | None = None  # if the ranks are started by MPI
    copies: NodeCopies = field(default_factory=NodeCopies)  # with cluster.local_dir
    stopping: threading.Event = field(default_factory=threading.Event)
    deadline: Deadline = field(default_factory=Deadline)

    @property
    def trial(self) -> Trial:
        return self.attempt.trial

    @cached_property
    def config(self) -> Config:
        return from_dict(json.loads(self.trial.config_json.read_bytes()))

    @cached_property
    def plan(self) -> Plan:
        return Plan.from_json(json.loads(self.trial.plan_json.read_bytes()))

    @property
    def interface(self) -> str:
        """The network interface chosen by the user or the site; empty to choose by route."""
        return self.config.cluster.interface or os.environ.get("HPC_RL_INTERFACE", "")

    @cached_property
    def address(self) -> str:
        """The address of this host to publish: loopback if no other host needs to reach this process.

        Raises ConfigError if the other hosts can't reach any address.
        """
        environments = isinstance(self.config, GRPOConfig) and self.config.environments is not None
        has_clients = environments or get_value(self.config, "purpose") == "serve"
        if self.plan.n_nodes == 1 and not has_clients and not self.interface:
            return net.LOOPBACK
        return net.choose_address(self.plan.n_nodes, self.interface, list_peer_hosts(os.environ))


def run(role: str, body: Callable[[Context], int | None], *, uses_node: bool = True) -> None:
    """Run `body` as this process's role and exit with its code. Never returns.

    With `uses_node` it uses the job's directory on this node for caches and copies.
    """
    args = parse_arguments(role)
    raise_limits()
    correct(os.environ, list_job_hosts(os.environ))
    steps = os.environ.get("HPC_RL_STEPS")
    num_ranks = int(os.environ.get("HPC_RL_NUM_RANKS", 1))
    trial = Trial(args.trial_dir)
    attempt = trial.attempt(args.attempt)
    try:
        tokens = trial.load_tokens()
        os.environ |= trial.load_variables(VARIABLES_OF[role]) if role in VARIABLES_OF else {}
    except TrialStateError as error:
        _end_without_secrets(attempt, args, error)
    stopping, deadline, stacks = threading.Event(), Deadline(), Stacks()
    if steps == "mpiexec":
        control.connect(os.environ["HPC_RL_SUPERVISOR"], tokens["control"])
    # Before starting MPI, which may hang.
    heard = (stopping, deadline, stacks)
    threading.Thread(target=control.listen, args=heard, daemon=True, name="supervisor-pipe").start()
    mpi = MpiRanks(num_ranks) if os.environ.get("HPC_RL_MPI") else None
    rank = mpi.rank if mpi else int(os.environ.get("SLURM_PROCID" if steps == "srun" else "HPC_RL_RANK", 0))
    process = (role, args.index, args.incarnation, rank)  # names its files
    if steps == "mpiexec" and num_ranks > 1:
        open_own_log(attempt.log(*process))
    log.configure(role, f"{args.index}/{rank}", trial.load_every_secret())
    stacks.open(attempt.stacks(*process))
    control.obey_signals(stopping)
    identity = (role, attempt, args.index, args.incarnation, rank, num_ranks, tokens)
    context = Context(*identity, mpi=mpi, stopping=stopping, deadline=deadline)

    node: NodeDirectory | None = None

    def start() -> int | None:
        nonlocal node
        local_dir, job_id = context.config.cluster.local_dir, os.environ.get("SLURM_JOB_ID", "")
        if uses_node and (local_dir or (steps != "process" and job_id)):
            node = NodeDirectory(os.environ, job_id or attempt.job_id, local_dir)
        if node and local_dir:
            context.copies = NodeCopies(node.copies)
        if mpi:
            mpi.check()
        own = {name: os.environ.get(variable, "") for name, variable in OF_SLURM.items()}
        own_record = ProcessRecord.of(role, os.getpid(), rank, **own)
        write_json(attempt.process_record(*process), own_record.to_json())
        return body(context)

    record = _catch_errors(start)
    try:
        write_json(attempt.exit_record(*process), record.to_json())
    except OSError as error:  # a full disk: the supervisor still sees the exit code
        logger.error("this process can't record why it ends; the trial sees only its exit code: %s", error)
    stacks.close()
    if node:
        node.leave(record.final or record.code in (ExitCode.DONE, ExitCode.STOPPED))
    logging.shutdown()
    with contextlib.suppress(OSError):  # of a full disk
        sys.stdout.flush()
    if steps == "mpiexec":
        control.leave(record.code)
    os._exit(record.code)  # threads of engines and HTTP servers must not hold the exit


def _end_without_secrets(attempt: Attempt, args: argparse.Namespace, error: TrialStateError) -> NoReturn:
    """End this process for good and record why: other starts of the submission have the same secrets."""
    log.configure(args.role, f"{args.index}")
    logger.error("%s", error)
    rank = int(
        os.environ.get("SLURM_PROCID" if os.environ.get("HPC_RL_STEPS") == "srun" else "HPC_RL_RANK", 0)
    )
    record = ExitRecord(
        code=int(ExitCode.BAD_CONFIG),
        reason=str(error),
        failure=FailureClass.USER,
        final=True,
        time=time.time(),
    )
    with contextlib.suppress(OSError):
        write_json(attempt.exit_record(args.role, args.index, args.incarnation, rank), record.to_json())
    os._exit(ExitCode.BAD_CONFIG)


def open_own_log(path: Path) -> None:
    """Redirect output to a log of this process: mpiexec mixes the output of all ranks."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)


def parse_arguments(role: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m hpc_rl.roles.{role}", description="A process of a trial; started by the supervisor."
    )
    parser.add_argument("--trial_dir", type=Path, required=True)
    parser.add_argument("--attempt", required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--incarnation", type=int, default=0)
    parser.set_defaults(role=role)
    return parser.parse_args()


def _catch_errors(start: Callable[[], int | None]) -> ExitRecord:
    code, reason, failure, final = 0, "", FailureClass.UNKNOWN, False
    nodes: list[str] | None = None
    try:
        code = int(start() or 0)
    except (ConfigError, TrialBusy) as error:  # exit codes 64 and 75 of a role mean something else
        logger.error("%s", error)
        code, reason, failure, final = ExitCode.BAD_CONFIG, str(error), FailureClass.USER, True
    except HpcRlError as error:
        logger.error("%s", error)
        code, reason, failure = error.exit_code, str(error), error.failure
        final = isinstance(error, GivenUp)
        nodes = error.nodes if isinstance(error, NodeFailed) else None
    except BaseException as error:
        logger.error("%s", traceback.format_exc())
        cannot_write = isinstance(error, OSError) and error.errno in CANNOT_WRITE
        code = ExitCode.CANNOT_WRITE if cannot_write else ExitCode.FAILED
        reason, failure = f"{type(error).__name__}: {error}", _classify_error(error)
    return ExitRecord(
        code=int(code), reason=reason, failure=failure, final=final, nodes=nodes, time=time.time()
    )


def _classify_error(error: BaseException) -> FailureClass:
    # PyTorch's error for a full GPU is recognized by name: not every role may import torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return FailureClass.OUT_OF_MEMORY
    if is_full(error):
        return FailureClass.DISK_FULL
    return FailureClass.INFRASTRUCTURE if isinstance(error, OSError) else FailureClass.UNKNOWN
