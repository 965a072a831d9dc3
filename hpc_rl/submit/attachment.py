"""How to get onto the node of a role: where its processes run, by the records that they left, and the command that goes there."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.errors import TrialStateError
from hpc_rl.files import JsonLines
from hpc_rl.status.attempts import ROLE_ORDER, roles_of
from hpc_rl.status.trial_status import TrialStatus
from hpc_rl.supervise.ownership import PROCESS_FILE
from hpc_rl.supervise.server_array import attempts_of
from hpc_rl.trial import Attempt, read_json

SHELL = ("bash", "--login")


@dataclass(frozen=True)
class RoleProcess:
    """Where one process of a role runs. `node` is the scheduler's name, empty on a machine without one."""

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


def role_processes(story: TrialStatus) -> list[RoleProcess]:
    """Where the processes of the live attempt and of its server jobs run: of each role, replica and rank the newest
    incarnation, trainer first."""
    names = [story.live.id] if story.live else []
    for task in story.servers[-1].tasks if story.servers else []:
        names += attempts_of(story.trial, task.id)[-1:] if task.state == "running" else []
    alive = [place for name in names for place in _places(story.trial.attempt(name))]
    order = {
        role: number
        for number, role in enumerate(
            sorted(ROLE_ORDER, key=lambda role: (role == "supervisor", ROLE_ORDER[role]))
        )
    }
    return sorted(alive, key=lambda place: (order.get(place.role, 9), place.role, place.index, place.rank))


def _places(attempt: Attempt) -> list[RoleProcess]:
    """Of one attempt, without the roles that have ended."""
    found: dict[tuple[str, int, int], RoleProcess] = {}
    for path in attempt.processes.glob("*.json"):
        place = _place(path, attempt.id)
        if place is not None:
            key = (place.role, place.index, place.rank)
            if key not in found or found[key].incarnation < place.incarnation:
                found[key] = place
    running = {
        (role.role, role.index): role.running for role in roles_of(attempt, JsonLines(attempt.events).poll())
    }
    return [place for place in found.values() if running.get((place.role, place.index), True)]


def _place(path: Path, attempt: str) -> RoleProcess | None:
    match, data = PROCESS_FILE.fullmatch(path.name), read_json(path)
    if match is None or path.name.startswith("client-") or not isinstance(data, dict):
        return None
    host, pid, rank = data.get("host"), data.get("pid"), data.get("rank", 0)
    if not isinstance(host, str) or not isinstance(pid, int) or not isinstance(rank, int):
        return None
    where = (str(data.get("node") or ""), str(data.get("job_id") or ""), attempt)
    return RoleProcess(match["role"], int(match["index"]), int(match["incarnation"]), rank, host, pid, *where)


def choose_process(story: TrialStatus, role: str | None, index: int | None, rank: int | None) -> RoleProcess:
    """The place that is meant; by default that of the trainer's first rank. Raises TrialStateError, with what there is."""
    every = role_processes(story)
    if story.live is None and not every:
        why = f" ({story.reason})" if story.reason else ""
        raise TrialStateError(f"{story.trial} is {story.state}{why}: no role of it runs anywhere.")
    for place in every:
        if role in (None, place.role) and index in (None, place.index) and rank in (None, place.rank):
            return place
    there = ", ".join(place.name for place in every) or "none has left its record yet"
    asked = " ".join(
        f"--{name} {value}"
        for name, value in (("role", role), ("index", index), ("rank", rank))
        if value is not None
    )
    raise TrialStateError(
        f"{story.trial} has nothing that runs for {asked or 'a shell'}; what runs: {there}."
    )


def attach_command(story: TrialStatus, place: RoleProcess, argv: list[str]) -> list[str]:
    """What to run for a shell there, or for `argv`. Raises TrialStateError where that is on another machine without Slurm."""
    job_id = place.job_id or place.attempt.rpartition(".")[0]
    if story.jobs and story.jobs[-1].scheduler == "slurm":
        # --overlap with --mem=0 waits for nothing that the roles hold; a step sees the GPUs of the whole job.
        component = _component(story.plan, place)
        where = [
            "srun",
            f"--jobid={job_id}",
            *([f"--het-group={component}"] if component is not None else []),
            "--overlap",
            "--mem=0",
            "--nodes=1",
            "--ntasks=1",
            "--cpus-per-task=1",
        ]
        where += [f"--nodelist={place.node or place.host}", f"--chdir={story.trial.dir}", "--export=ALL"]
        return [*where, *(argv or ["--pty", *SHELL])]
    if place.host != socket.gethostname():
        raise TrialStateError(f"{place.name} runs on {place.host}: give the command there.")
    return argv or [os.environ.get("SHELL") or "bash"]


def _component(plan: dict[str, Any], place: RoleProcess) -> int | None:
    """Which component of a heterogeneous job has the place; None for a job of one kind. srun sees the first one only, else."""
    if plan.get("layout") != "hetjob":
        return None
    units = [
        unit for unit in plan.get("units", []) if (unit["role"], unit["index"]) == (place.role, place.index)
    ]
    nodes = {node for unit in units for node in unit["nodes"]}
    return next(
        (number for number, group in enumerate(plan.get("groups", [])) if nodes & set(group["nodes"])), 0
    )
