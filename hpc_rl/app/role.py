"""What every role process does the same way: parse, log, leave records, obey signals and the supervisor's pipe.

A role is started as `python -m hpc_rl.app.<role> --trial_dir D --attempt A --index I --incarnation K` with its standard
input tied to the supervisor. End of that input means that the supervisor is gone: the process ends at once, so that
nobody writes behind the back of the next incarnation. What comes through it, and what signals do, is control.py's.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hpc_rl import log, net
from hpc_rl.app.control import Deadline, Stacks, listen, obey_signals
from hpc_rl.config.loading.load import from_dict
from hpc_rl.config.sections.experiment import Config
from hpc_rl.errors import ConfigError, ExitCode, FailureClass, GivenUp, HpcRlError, TrialBusy
from hpc_rl.files import FULL, is_full
from hpc_rl.plan.schema import Plan
from hpc_rl.proc import start_ticks
from hpc_rl.schedulers.hostlist import peer_hosts
from hpc_rl.trial import Attempt, Trial, write_json

logger = logging.getLogger(__name__)
CANNOT_WRITE = (*FULL, errno.EROFS)


@dataclass
class Context:
    """Who this process is, and what it was given."""

    role: str
    trial: Trial
    attempt: Attempt
    index: int
    incarnation: int
    rank: int
    num_ranks: int
    config: Config
    plan: Plan
    tokens: dict[str, str]
    stopping: threading.Event
    deadline: Deadline = field(default_factory=Deadline)

    @property
    def interface(self) -> str:
        """The network interface that the user or the site asks for; empty to choose by route."""
        return self.config.cluster.interface or os.environ.get("HPC_RL_INTERFACE", "")

    @cached_property
    def address(self) -> str:
        """The address of this host to publish. Raises ConfigError where the other hosts can't reach any."""
        return net.published_address(self.plan.n_nodes, self.interface, peer_hosts(os.environ))


def run(role: str, body: Callable[[Context], int | None]) -> None:
    """Run `body` as this process's role and exit with its code. Never returns."""
    args = _arguments(role)
    rank = int(
        os.environ.get("SLURM_PROCID" if os.environ.get("HPC_RL_STEPS") == "srun" else "HPC_RL_RANK", 0)
    )
    trial = Trial(Path(args.trial_dir))
    attempt = trial.attempt(args.attempt)
    tokens = trial.tokens()
    log.setup(role, f"{args.index}/{rank}", list(tokens.values()))
    stopping, deadline = threading.Event(), Deadline()
    stacks = Stacks(attempt.stacks(role, args.index, args.incarnation, rank))
    obey_signals(stopping)
    threading.Thread(
        target=listen, args=(stopping, deadline, stacks), daemon=True, name="supervisor-pipe"
    ).start()

    def start() -> int | None:
        _leave_process_record(attempt, role, args.index, args.incarnation, rank)
        config = from_dict(json.loads(trial.config_json.read_bytes()))
        plan = Plan.from_json(json.loads(trial.plan_json.read_bytes()))
        num_ranks = int(os.environ.get("HPC_RL_NUM_RANKS", 1))
        who = (role, trial, attempt, args.index, args.incarnation, rank, num_ranks)
        return body(Context(*who, config, plan, tokens, stopping, deadline))

    code, reason, failure, final = _guarded(start)
    record = attempt.exit_record(role, args.index, args.incarnation, rank)
    try:
        more = {"final": True} if final else {}
        write_json(
            record, {"code": int(code), "reason": reason, "class": failure.value, "time": time.time(), **more}
        )
    except OSError as error:  # a full disk: the code still tells
        logger.error("the exit record can't be written: %s", error)
    stacks.close()
    logging.shutdown()
    with contextlib.suppress(OSError):  # of a full disk
        sys.stdout.flush()
    os._exit(int(code))  # threads of engines and HTTP servers must not hold the exit


def _arguments(role: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m hpc_rl.app.{role}", description="A process of a trial; started by the supervisor."
    )
    parser.add_argument("--trial_dir", required=True)
    parser.add_argument("--attempt", required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--incarnation", type=int, default=0)
    return parser.parse_args()


def _guarded(start: Callable[[], int | None]) -> tuple[int, str, FailureClass, bool]:
    """(exit code, reason, class, whether it is final) of a body."""
    try:
        return int(start() or 0), "", FailureClass.UNKNOWN, False
    except (ConfigError, TrialBusy) as error:  # of a role, 64 and 75 would mean something else
        logger.error("%s", error)
        return ExitCode.BAD_CONFIG, str(error), FailureClass.USER, True
    except HpcRlError as error:
        logger.error("%s", error)
        return error.exit_code, str(error), error.failure, isinstance(error, GivenUp)
    except BaseException as error:
        logger.error("%s", traceback.format_exc())
        cannot_write = isinstance(error, OSError) and error.errno in CANNOT_WRITE
        code = ExitCode.CANNOT_WRITE if cannot_write else ExitCode.FAILED
        return code, f"{type(error).__name__}: {error}", _class_of(error), False


def _class_of(error: BaseException) -> FailureClass:
    """PyTorch's own error for a full GPU is known by its name: not every role may import it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return FailureClass.OUT_OF_MEMORY
    if is_full(error):
        return FailureClass.DISK_FULL
    return FailureClass.INFRASTRUCTURE if isinstance(error, OSError) else FailureClass.UNKNOWN


def _leave_process_record(attempt: Attempt, role: str, index: int, incarnation: int, rank: int) -> None:
    record = {
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
        "host": socket.gethostname(),
        "role": role,
        "rank": rank,
        "step": os.environ.get("SLURM_STEP_ID", ""),
        "node": os.environ.get(
            "SLURMD_NODENAME", ""
        ),  # the scheduler's name for it, and its job: what `hpc-rl attach` needs
        "job_id": os.environ.get("SLURM_JOB_ID", ""),
    }
    write_json(attempt.processes / f"{role}-{index}.{incarnation}-rank{rank}.json", record)
