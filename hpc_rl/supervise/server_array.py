"""The servers of layout `jobs`: a job array, submitted with the trial, and again by a job that finds none.

In layout `allocation` the supervisor submits such an array for the servers of a node that Slurm has lost.

Its record `jobs/<array>.json` has the kind `servers` and names the submission that it serves; each task
writes `jobs/<array>_<task>.state`, and its attempts in `server_attempts/`.
"""

import enum
import json
import time
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.core.errors import ExitCode, JobEvent
from hpc_rl.core.records import EndedRecord, JobRecord, find_newest_job, load_job_state
from hpc_rl.core.trial import Trial, create_exclusive
from hpc_rl.plan.schema import Plan
from hpc_rl.schedulers.base import JobSpec, Scheduler
from hpc_rl.supervise.successor import make_comment_option

SCRIPT = "servers.sbatch"  # as in render/scripts.py; importing that would load jinja2 for every `status`
# A trainer job that starts at once waits this long for the submitter of its servers.
SUBMITTING_S = 60.0
POLL_S = 0.5


class TaskState(enum.StrEnum):
    """State of one task, from its script's records."""

    RUNNING = "running"
    WAITING = "waiting"  # for a restart
    SIGNALLED = "signalled"  # by Slurm, which restarts it after a preemption
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass
class ServerTask:
    """One task of an array: a server node, or the nodes of a replica; `starts` counts from 1."""

    id: str
    state: TaskState
    starts: int = 0
    reason: str = ""


@dataclass
class ServerArray:
    job_id: str
    serves: str  # the submission of the trial
    time: float = 0.0
    tasks: list[ServerTask] = field(default_factory=list)


def submit_servers(
    trial: Trial, plan: Plan, serves: str, tag: str, scheduler: Scheduler, *, again: bool = False
) -> str:
    """Submit the array, record it and return its id. `again`: use another tag than the script's.

    Raises SchedulerError, OSError.
    """
    tag = f"{tag}:servers"
    options = (make_comment_option(trial, tag),) if again else ()
    spec = JobSpec(f"{trial.job_name}.servers", trial.scripts / SCRIPT, tag, ("", "0", serves), options)
    return _submit(trial, spec, serves, scheduler, num_tasks=len(plan.list_server_tasks()))


def _submit(trial: Trial, spec: JobSpec, serves: str, scheduler: Scheduler, **more: Any) -> str:
    """Submit servers and record the job; return its id."""
    job_id = scheduler.submit(spec)
    made = JobRecord(
        job_id=job_id,
        kind=JobRecord.SERVERS,
        serves=serves,
        scheduler=scheduler.name,
        time=time.time(),
        tag=spec.tag,
        **more,
    )
    create_exclusive(trial.job(job_id), json.dumps(made.to_json(), indent=2) + "\n")
    return job_id


def ensure_servers(trial: Trial, plan: Plan, serves: str, tag: str, scheduler: Scheduler) -> str:
    """Submit the servers of a submission if none waits or runs; return the id of the new array, or "".

    Queries the scheduler once. Raises SchedulerError, OSError.
    """
    # The trial's job may start before its servers are submitted. A submitter that died leaves its lock.
    deadline = time.monotonic() + SUBMITTING_S
    while trial.submitting.exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    own = [array for array in load_arrays(trial) if array.serves == serves]
    ids = [job_id for array in own for job_id in list_server_jobs(trial, array)]
    states = scheduler.query_states(ids) if ids else {}
    if any(state.state.alive for state in states.values()):
        return ""
    return submit_servers(trial, plan, serves, f"{tag}:{len(own)}", scheduler, again=True)


def replace_servers(
    trial: Trial, plan: Plan, serves: str, attempt: str, number: int, tag: str, scheduler: Scheduler
) -> str:
    """Submit task `number` of the servers, whose nodes the attempt has lost; return the id of the job.

    Raises SchedulerError, OSError.
    """
    tag = f"{tag}:servers:{attempt}:{number}"
    num_nodes = len(plan.list_server_tasks()[number])
    options = (make_comment_option(trial, tag), f"--array={number}", f"--nodes={num_nodes}")
    spec = JobSpec(f"{trial.job_name}.servers", trial.scripts / SCRIPT, tag, ("", "0", serves), options)
    return _submit(trial, spec, serves, scheduler, num_tasks=1, first_task=number, replaces=attempt)


def list_server_jobs(trial: Trial, array: ServerArray) -> list[str]:
    """Return the ids of an array and of jobs that continue single tasks because requeue was refused."""
    tasks = {path.stem for path in trial.jobs.glob(f"{array.job_id}_*.next-*")}
    return [array.job_id, *sorted(find_newest_job(trial, task) for task in tasks)]


def load_arrays(trial: Trial) -> list[ServerArray]:
    """Return the server arrays of a trial, oldest first."""
    arrays = []
    for job in map(JobRecord.read, trial.jobs.glob("*.json")):
        if job is not None and job.kind == JobRecord.SERVERS:
            numbers = range(job.first_task, job.first_task + job.num_tasks)
            tasks = [_parse_task(trial, f"{job.job_id}_{number}") for number in numbers]
            arrays.append(ServerArray(job.job_id, job.serves, job.time, tasks))
    return sorted(arrays, key=lambda array: (array.time, array.job_id))


def _parse_task(trial: Trial, task: str) -> ServerTask:
    lines = load_job_state(trial, task)
    if not lines:
        return ServerTask(task, TaskState.UNKNOWN)
    last, state, reason = lines[-1], TaskState.RUNNING, ""
    if last.event is JobEvent.REQUEUED:
        state = TaskState.WAITING
        reason = f"continued by job {last.successor}" if last.successor else ""
    elif last.event is JobEvent.ENDED:
        # After a TERM, the script can't know whether Slurm restarts it.
        state = TaskState.SIGNALLED if last.cancelled else TaskState.ENDED
        ended = EndedRecord.read(trial.attempt(f"{task}.{last.restart}").ended)
        by_supervisor = ended is not None and last.code in (ExitCode.DONE, ExitCode.FAILED)
        reason = ended.reason if ended and by_supervisor else last.reason
    return ServerTask(task, state, sum(line.event is JobEvent.STARTED for line in lines), reason)


TASK_TEXTS = {
    TaskState.RUNNING: "running",
    TaskState.WAITING: "waiting for a restart",
    TaskState.ENDED: "ended",
    TaskState.UNKNOWN: "not started",
    TaskState.SIGNALLED: "stopped by Slurm, which restarts them after a preemption",
}


def describe_array(array: ServerArray) -> str:
    """Describe an array in one line, for `hpc-rl status`."""
    counts = {kind: sum(task.state is kind for task in array.tasks) for kind in TASK_TEXTS}
    text = ", ".join(f"{count} {TASK_TEXTS[kind]}" for kind, count in counts.items() if count)
    restarts = sum(max(0, task.starts - 1) for task in array.tasks)
    if restarts:
        text += f", restarted {restarts} time{'s' if restarts != 1 else ''}"
    nodes = f"{len(array.tasks)} server node{'s' if len(array.tasks) != 1 else ''}"
    return f"job {array.job_id}, {nodes}: {text}"
