"""The supervisor of one attempt: the job script starts it on the first node, and restarts it if killed."""

import argparse
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpc_rl.config.load.stored import from_dict
from hpc_rl.config.options.experiment import Config
from hpc_rl.config.rules.file_rules import check_on_node
from hpc_rl.core import log
from hpc_rl.core.errors import ConfigError, ExitCode, HpcRlError, TrialBusy
from hpc_rl.core.files import AWAY_S, Room
from hpc_rl.core.records import EndedRecord
from hpc_rl.core.resource_limits import raise_limits
from hpc_rl.core.trial import Attempt, Trial, load_json, write_atomic, write_json
from hpc_rl.plan.schema import Plan
from hpc_rl.supervise.agents import open_steps
from hpc_rl.supervise.deadline import JobEndTime
from hpc_rl.supervise.mpiexec import add_mpiexec
from hpc_rl.supervise.network_check import Preflight
from hpc_rl.supervise.processes import ProcessSteps, SrunSteps
from hpc_rl.supervise.runner import TrialRunner
from hpc_rl.supervise.server_runner import ServerRunner

logger = logging.getLogger(__name__)
ROOM_BYTES = 64 << 10  # more than all that is written before the first role starts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.roles.supervisor", description=__doc__)
    parser.add_argument("--trial_dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True, help="<job id>.<restart>")
    parser.add_argument(
        "--steps", required=True, choices=("srun", "process"), help="how processes are started"
    )
    args = parser.parse_args()
    raise_limits()
    trial = Trial(args.trial_dir)
    attempt = trial.attempt(args.attempt)
    log.configure("supervisor")
    try:
        log.configure("supervisor", secrets=trial.load_every_secret())
        plan_data, config_data = load_json(trial.plan_json), load_json(trial.config_json)
        if plan_data is None or config_data is None:
            raise ConfigError(
                f"{trial.plan_json} or {trial.config_json} can't be read; submit the trial again"
            )
        plan = Plan.from_json(plan_data)
        config = from_dict(config_data)
        check_inputs(attempt, config)
        _wait_for_room(attempt)
        if attempt.is_server_task:
            return _keep_servers_running(attempt, plan, config, args.steps)
        if plan.layout == "jobs":  # the servers run in other jobs
            plan = replace(plan, units=plan.list_units_on(plan.groups[0].nodes))
        own_steps = open_steps(args.steps, plan)
        steps = add_mpiexec(own_steps, plan, config.cluster.interface)
        preflight = _make_preflight(own_steps, plan, config)
        return TrialRunner(attempt, plan, config, steps, JobEndTime(), preflight).run()
    except HpcRlError as error:
        logger.error("%s", error)
        code = _exit_code(error)
        record = EndedRecord(exit_code=int(code), reason=str(error), time=time.time())
        with suppress(OSError):
            attempt.make_dirs()
            write_json(attempt.ended, record.to_json())
        return code
    except OSError as error:
        logger.error("the trial directory can't be used: %s", error)
        return ExitCode.CANNOT_WRITE


def check_inputs(attempt: Attempt, config: Config) -> None:
    """Raise ConfigError for models and datasets that are missing on this node.

    A server of layout `jobs` needs only its own model; its role checks that.
    """
    if not attempt.is_server_task:
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        check_on_node(config, node, AWAY_S if attempt.restart > 0 else 0.0)


def _make_preflight(steps: ProcessSteps | SrunSteps, plan: Plan, config: Config) -> Preflight | None:
    limit_s = config.launcher.preflight_timeout_s
    if not limit_s or not isinstance(steps, SrunSteps):
        return None
    hosts = steps.hosts[: plan.n_nodes]  # the job of `hpc-rl run` may have more nodes
    if len(hosts) < 2:
        return None
    components = steps.components and steps.components[: plan.n_nodes]
    interface = config.cluster.interface or os.environ.get("HPC_RL_INTERFACE", "")
    return Preflight(hosts, components, plan.n_nodes, interface, limit_s)


def _wait_for_room(attempt: Attempt) -> None:
    """Wait while the disk is full: the supervisor's first writes decide who owns the trial."""

    def try_to_write() -> None:
        attempt.make_dirs()
        probe = attempt.dir / ".room"
        write_atomic(probe, bytes(ROOM_BYTES))
        probe.unlink()

    Room(attempt.trial.dir).write("the supervisor's files", try_to_write)


def _exit_code(error: HpcRlError) -> int:
    if isinstance(error, ConfigError):
        return ExitCode.BAD_CONFIG
    if isinstance(error, TrialBusy):  # with 75 the job would restart, and find the trial busy again
        return ExitCode.FAILED
    return error.exit_code


def _keep_servers_running(attempt: Attempt, plan: Plan, config: Config, kind: str) -> int:
    """Run the server nodes of one task of layout `jobs`; the task's number in the array selects them."""
    nodes = plan.list_server_tasks()[int(os.environ["HPC_RL_ARRAY_TASK"])]
    own = (plan.list_units_on(nodes), os.environ.get("HPC_RL_TRIAL_JOB", ""))
    return ServerRunner(attempt, plan, config, open_steps(kind, plan), JobEndTime(), *own).run()


if __name__ == "__main__":
    sys.exit(main())
