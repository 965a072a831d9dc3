"""What every role process does the same way: parse, log, leave records, obey signals and the supervisor's pipe.

A role is started as `python -m hpc_rl.app.<role> --trial_dir D --attempt A --index I --incarnation K` with its standard
input tied to the supervisor. End of that input means that the supervisor is gone: the process ends at once, so that
nobody writes behind the back of the next incarnation. Anything that comes through it sets `stopping`, and so do USR2 and the
first TERM; a second TERM ends the process.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_rl import log
from hpc_rl.config.load import from_dict
from hpc_rl.config.root import Config
from hpc_rl.errors import ConfigError, ExitCode, HpcRlError, TrialBusy
from hpc_rl.plan.schema import Plan
from hpc_rl.proc import start_ticks
from hpc_rl.trial import Attempt, Trial, write_json

logger = logging.getLogger(__name__)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
SAME_TERM_S = 2.0  # a scheduler's TERM may come twice, by way of the launcher too


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


def run(role: str, body: Callable[[Context], int | None]) -> None:
    """Run `body` as this process's role and exit with its code. Never returns."""
    args = _arguments(role)
    rank = int(os.environ.get("SLURM_PROCID" if os.environ.get("HPC_RL_STEPS") == "srun" else "HPC_RL_RANK", 0))
    trial = Trial(Path(args.trial_dir))
    attempt = trial.attempt(args.attempt)
    tokens = trial.tokens()
    log.setup(role, f"{args.index}/{rank}", list(tokens.values()))
    stopping = threading.Event()
    _obey_signals(stopping)
    threading.Thread(target=_listen_to_supervisor, args=(stopping,), daemon=True, name="supervisor-pipe").start()

    def start() -> int | None:
        _leave_process_record(attempt, role, args.index, args.incarnation, rank)
        config = from_dict(json.loads(trial.config_json.read_bytes()))
        plan = Plan.from_json(json.loads(trial.plan_json.read_bytes()))
        num_ranks = int(os.environ.get("HPC_RL_NUM_RANKS", 1))
        return body(Context(role, trial, attempt, args.index, args.incarnation, rank, num_ranks, config, plan, tokens, stopping))

    code, reason = _guarded(start)
    record = attempt.exit_record(role, args.index, args.incarnation, rank)
    try:
        write_json(record, {"code": int(code), "reason": reason, "time": time.time()})
    except OSError as error:  # a full disk: the code still tells
        logger.error("the exit record can't be written: %s", error)
    logging.shutdown()
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


def _guarded(start: Callable[[], int | None]) -> tuple[int, str]:
    try:
        return int(start() or 0), ""
    except (ConfigError, TrialBusy) as error:  # of a role, 64 and 75 would mean something else
        logger.error("%s", error)
        return ExitCode.BAD_CONFIG, str(error)
    except HpcRlError as error:
        logger.error("%s", error)
        return error.exit_code, str(error)
    except BaseException as error:
        logger.error("%s", traceback.format_exc())
        no_room = isinstance(error, OSError) and error.errno in NO_ROOM
        return ExitCode.CANNOT_WRITE if no_room else ExitCode.FAILED, f"{type(error).__name__}: {error}"


def _leave_process_record(attempt: Attempt, role: str, index: int, incarnation: int, rank: int) -> None:
    record = {
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
        "host": socket.gethostname(),
        "role": role,
        "rank": rank,
        "node": os.environ.get("SLURMD_NODENAME", ""),  # the scheduler's name for it, and its job: what `hpc-rl attach` needs
        "job_id": os.environ.get("SLURM_JOB_ID", ""),
    }
    write_json(attempt.processes / f"{role}-{index}.{incarnation}-rank{rank}.json", record)


def _obey_signals(stopping: threading.Event) -> None:
    owner = os.getpid()
    first_term: list[float] = []

    def on_signal(number: int, _frame: object) -> None:
        if os.getpid() != owner:
            return
        if number == signal.SIGTERM:
            first_term.append(time.monotonic())
            if first_term[-1] - first_term[0] > SAME_TERM_S:
                os._exit(ExitCode.KILLED_BY_SYSTEM)
        stopping.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGUSR2, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the supervisor's to handle


def _listen_to_supervisor(stopping: threading.Event) -> None:
    while os.read(0, 4096):  # whatever it writes means "stop"; a signal would also reach the children, which don't expect it
        stopping.set()
    logger.error("the supervisor's pipe closed: ending at once")
    os._exit(ExitCode.KILLED_BY_SYSTEM)
