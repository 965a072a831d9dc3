"""The servers of layout `jobs`: an array of Slurm's, submitted with the trial and again by a trainer job that finds none.

Also what the files tell of it. A record `jobs/<array>.json` has the kind `servers` and names the submission that it serves;
each task leaves `jobs/<array>_<task>.state` and its attempts in `server_attempts/`.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_rl.errors import ExitCode
from hpc_rl.plan.schema import Plan
from hpc_rl.schedulers import record
from hpc_rl.schedulers.base import JobSpec, JobState, Scheduler, State
from hpc_rl.supervise.successor import users_comment
from hpc_rl.trial import Trial, create_exclusive, read_json

KIND = "servers"
SCRIPT = "servers.sbatch"  # as render names it; importing that would bring jinja2 to every `status`
TASK = re.compile(r"(?P<array>\d+)_(?P<task>\d+)")
SUBMITTING_S = (
    60.0  # that a trainer job which starts at once waits for whoever is about to submit its servers
)
POLL_S = 0.5


@dataclass
class ServerTask:
    """One server node of an array. `state` is running | waiting | signalled | ended | unknown; `starts` counts from 1."""

    id: str
    state: str
    starts: int = 0
    reason: str = ""


@dataclass
class ServerArray:
    """One submission of servers."""

    job_id: str
    serves: str  # the submission of the trial
    time: float = 0.0
    tasks: list[ServerTask] = field(default_factory=list)


def submit_servers(
    trial: Trial, plan: Plan, serves: str, tag: str, name: str, scheduler: Scheduler, *, again: bool = False
) -> str:
    """Hand the array in and put it on record; returns its id. `again`: its tag is not the one that the script carries.

    Raises SchedulerError, OSError.
    """
    spec = JobSpec(f"{name}.servers", trial.scripts / SCRIPT, f"{tag}:servers", arguments=("", "0", serves))
    if again:
        spec = replace(spec, known_as=False, comment=users_comment(trial))
    job_id = scheduler.submit(spec)
    made = {
        "job_id": job_id,
        "kind": KIND,
        "serves": serves,
        "scheduler": scheduler.name,
        "time": time.time(),
        "tag": spec.tag,
    }
    num_tasks = len(next(group for group in plan.groups if group.name == "servers").nodes)
    create_exclusive(trial.job(job_id), json.dumps(made | {"num_tasks": num_tasks}, indent=2) + "\n")
    return job_id


def ensure(trial: Trial, plan: Plan, serves: str, tag: str, name: str, scheduler: Scheduler) -> str:
    """Submit the servers of a submission where none of them waits or runs; returns the id of the new array, else "".

    One question to the scheduler. Raises SchedulerError, OSError.
    """
    _wait_for_submitter(trial)
    own = [array for array in read_arrays(trial) if array.serves == serves]
    ids = {array.job_id for array in own} | {
        current for array in own for current in successors(trial, array.job_id)
    }
    states = scheduler.states(sorted(ids)) if ids else {}
    if any(state.state.alive for state in states.values()):
        return ""
    return submit_servers(trial, plan, serves, f"{tag}:{len(own)}", name, scheduler, again=True)


def _wait_for_submitter(trial: Trial) -> None:
    """The trial's job is handed in first, and may start before its servers are; the claim goes once they are on record."""
    deadline = time.monotonic() + SUBMITTING_S  # of a submitter that died there is left its claim alone
    while trial.submitting.exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def successors(trial: Trial, array: str) -> list[str]:
    """Ids of the jobs that go on with single tasks of an array, where requeue is refused."""
    tasks = {path.name.partition(".")[0] for path in trial.jobs.glob(f"{array}_*.next-*")}
    return sorted(record.current(trial, task) for task in tasks)


def attempts_of(trial: Trial, task: str) -> list[str]:
    """The attempts of one task, oldest first."""
    restarts = [path.name.rpartition(".")[2] for path in trial.server_attempts.glob(f"{task}.*")]
    return [
        f"{task}.{restart}" for restart in sorted(int(restart) for restart in restarts if restart.isdecimal())
    ]


def read_arrays(trial: Trial) -> list[ServerArray]:
    """The server arrays of a trial, oldest first."""
    arrays = []
    for path in trial.jobs.glob("*.json"):
        data = read_json(path)
        if isinstance(data, dict) and data.get("kind") == KIND:
            tasks = [
                _task(trial, f"{path.stem}_{number}") for number in range(int(data.get("num_tasks") or 0))
            ]
            arrays.append(
                ServerArray(path.stem, str(data.get("serves") or ""), float(data.get("time") or 0.0), tasks)
            )
    return sorted(arrays, key=lambda array: (array.time, array.job_id))


def _task(trial: Trial, task: str) -> ServerTask:
    events = record.read(trial, task)
    starts = sum(event["event"] == "started" for event in events)
    if not events:
        return ServerTask(task, "unknown")
    last = events[-1]
    if last["event"] == "requeued":
        return ServerTask(
            task, "waiting", starts, f"goes on as job {last['successor']}" if last.get("successor") else ""
        )
    if last["event"] != "ended":
        return ServerTask(task, "running", starts)
    # After a TERM the script can't know whether Slurm starts it again.
    state = "signalled" if last.get("cancelled") is True else "ended"
    return ServerTask(task, state, starts, _words(trial, task, last))


def _words(trial: Trial, task: str, last: dict[str, Any]) -> str:
    ended = read_json(trial.attempt(f"{task}.{last.get('restart', 0)}").ended)
    if isinstance(ended, dict) and last.get("code") in (ExitCode.DONE, ExitCode.FAILED):
        return str(ended.get("reason") or "")
    return str(last.get("reason") or "")


def array_line(array: ServerArray, state: JobState | None = None) -> str:
    """One line of status."""
    words = {
        "running": "run",
        "waiting": "wait to be started again",
        "ended": "ended",
        "unknown": "not started",
    }
    words["signalled"] = "told to end by Slurm, which starts them again after a preemption"
    counts = {kind: sum(task.state == kind for task in array.tasks) for kind in words}
    said = ", ".join(f"{count} {words[kind]}" for kind, count in counts.items() if count)
    again = sum(max(0, task.starts - 1) for task in array.tasks)
    more = f", started again {again} time{'s' if again != 1 else ''}" if again else ""
    asked = (
        f"; the scheduler says {state.native or state.state.value}"
        if state and state.state is not State.UNKNOWN
        else ""
    )
    return f"job {array.job_id}, {len(array.tasks)} server node{'s' if len(array.tasks) != 1 else ''}: {said}{more}{asked}"
