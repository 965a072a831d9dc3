"""Where the processes of a trial run, by their records, and the command that opens a shell there."""

import os
import socket
from dataclasses import dataclass
from typing import Any

from hpc_rl.core.errors import TrialStateError
from hpc_rl.core.records import ProcessFile, ProcessRecord, load_events
from hpc_rl.core.trial import Attempt
from hpc_rl.status.attempts import ROLE_ORDER, list_roles
from hpc_rl.status.trial_status import TrialStatus

SHELL = ("bash", "--login")


@dataclass(frozen=True)
class RoleProcess:
    """One process of a role. `node` is the scheduler's name of its node, empty on a machine without one."""

    role: str
    index: int
    incarnation: int
    rank: int
    host: str
    pid: int
    node: str
    job_id: str
    attempt: str

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index} rank {self.rank}"


def list_role_processes(status: TrialStatus) -> list[RoleProcess]:
    """Return the newest processes of the live attempt and of its server jobs, trainer first."""
    attempts = [status.trial.attempt(status.live.id)] if status.live else []
    for task in status.servers[-1].tasks if status.servers else []:
        attempts += status.trial.list_attempts(task.id)[-1:] if task.state == "running" else []
    alive = [process for attempt in attempts for process in _list_live_processes(attempt)]
    order = ROLE_ORDER | {"supervisor": 10}  # last
    return sorted(alive, key=lambda one: (order.get(one.role, 9), one.role, one.index, one.rank))


def _list_live_processes(attempt: Attempt) -> list[RoleProcess]:
    found: list[RoleProcess] = []
    for path in attempt.processes.glob("*.json"):
        file, record = ProcessFile.parse(path), ProcessRecord.read(path)
        if file is not None and file.role in ROLE_ORDER and record is not None and not file.by_client:
            where = (record.host, record.pid, record.node, record.job_id, attempt.id)
            found.append(RoleProcess(file.role, file.index, file.incarnation, record.rank, *where))
    found.sort(key=lambda one: one.incarnation)
    newest = {(one.role, one.index, one.rank): one for one in found}
    running = {(role.role, role.index): role.running for role in list_roles(attempt, load_events(attempt))}
    return [one for one in newest.values() if running.get((one.role, one.index), True)]


def choose_process(status: TrialStatus, role: str | None, index: int | None, rank: int | None) -> RoleProcess:
    """Return the process that is asked for, by default the trainer's first rank.

    Raises TrialStateError that lists the running ones.
    """
    processes = list_role_processes(status)
    if status.live is None and not processes:
        why = f" ({status.reason})" if status.reason else ""
        raise TrialStateError(f"{status.trial} is {status.state}{why}: none of its roles is running.")
    for one in processes:
        if role in (None, one.role) and index in (None, one.index) and rank in (None, one.rank):
            return one
    options = (("role", role), ("index", index), ("rank", rank))
    asked = " ".join(f"--{name} {value}" for name, value in options if value is not None)
    running = ", ".join(one.name for one in processes) or "none so far"
    raise TrialStateError(
        f"{status.trial}: no running process matches {asked or 'the request'} (running: {running})."
    )


def make_attach_command(status: TrialStatus, process: RoleProcess, argv: list[str]) -> list[str]:
    """Return the command that opens a shell at the process, or runs `argv` there.

    Raises TrialStateError if that is on another machine without Slurm.
    """
    if status.jobs and status.jobs[-1].scheduler != "local":
        # --overlap with --mem=0 does not wait for the roles' resources; a step sees all GPUs of the job.
        where = [
            "srun",
            f"--jobid={process.job_id or process.attempt.rpartition('.')[0]}",
            *_find_het_group(status, process),
            *(
                "--overlap",
                "--mem=0",
                "--nodes=1",
                "--ntasks=1",
                f"--cpus-per-task={_count_cpus(status, process)}",
            ),
            f"--nodelist={process.node or process.host}",
            f"--chdir={status.trial.dir}",
            "--export=ALL",
        ]
        return [*where, *(argv or ["--pty", *SHELL])]
    if process.host != socket.gethostname():
        raise TrialStateError(f"{process.name} runs on {process.host}: run this command there.")
    return argv or [os.environ.get("SHELL") or "bash"]


def _list_units(status: TrialStatus, process: RoleProcess) -> list[dict[str, Any]]:
    """Return the unit of a process in the plan; none for the supervisor."""
    own = (process.role, process.index)
    return [unit for unit in status.plan.get("units", []) if (unit["role"], unit["index"]) == own]


def _count_cpus(status: TrialStatus, process: RoleProcess) -> int:
    """Return the CPUs that the role has on a node, which the shell shares."""
    units = _list_units(status, process)
    return max((unit.get("tasks_per_node", 1) * unit.get("cpus_per_task", 1) for unit in units), default=1)


def _find_het_group(status: TrialStatus, process: RoleProcess) -> list[str]:
    """Return the option for the component of a heterogeneous job that has the process."""
    plan = status.plan
    if plan.get("layout") != "hetjob":
        return []
    units = _list_units(status, process)
    nodes = {node for unit in units for node in unit["nodes"]}
    with_them = (n for n, group in enumerate(plan.get("groups", [])) if nodes & set(group["nodes"]))
    return [f"--het-group={next(with_them, 0)}"]
