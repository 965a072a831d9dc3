"""The servers of layout `jobs`: a job array, submitted with the trial, and again by a job that finds none.

Its record `jobs/<array>.json` is of the kind `servers` and names the submission that it serves; each task
leaves `jobs/<array>_<task>.state` and its attempts in `server_attempts/`.
"""

import enum
import json
import time
from dataclasses import dataclass, field

from hpc_rl.core.errors import ExitCode, JobEvent
from hpc_rl.core.records import EndedRecord, JobRecord, newest_job, read_job_state
from hpc_rl.core.trial import Trial, create_exclusive
from hpc_rl.plan.schema import Plan
from hpc_rl.schedulers.base import JobSpec, Scheduler
from hpc_rl.supervise.successor import comment_option

SCRIPT = "servers.sbatch"  # as render names it; importing that would bring jinja2 to every `status`
# A trainer job that starts at once waits this long for the submitter of its servers.
SUBMITTING_S = 60.0
POLL_S = 0.5


class TaskState(enum.StrEnum):
    """State of one task, as its script reports it."""

    RUNNING = "running"
    WAITING = "waiting"  # to be started again
    SIGNALLED = "signalled"  # by Slurm, which starts it again after a preemption
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass
class ServerTask:
    """One server node of an array; `starts` counts from 1."""

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
    """Submit the array, record it and return its id. `again`: its tag is not the one in the script.

    Raises SchedulerError, OSError.
    """
    tag = f"{tag}:servers"
    options = (comment_option(trial, tag),) if again else ()
    spec = JobSpec(f"{trial.job_name}.servers", trial.scripts / SCRIPT, tag, ("", "0", serves), options)
    job_id = scheduler.submit(spec)
    made = JobRecord(
        job_id=job_id,
        kind=JobRecord.SERVERS,
        serves=serves,
        scheduler=scheduler.name,
        time=time.time(),
        tag=tag,
        num_tasks=len(plan.group("servers").nodes),
    )
    create_exclusive(trial.job(job_id), json.dumps(made.to_json(), indent=2) + "\n")
    return job_id


def ensure_servers(trial: Trial, plan: Plan, serves: str, tag: str, scheduler: Scheduler) -> str:
    """Submit the servers of a submission where none waits or runs; return the id of the new array, or "".

    Queries the scheduler once. Raises SchedulerError, OSError.
    """
    # The trial's job may start before its servers are submitted. A submitter that died leaves its lock.
    deadline = time.monotonic() + SUBMITTING_S
    while trial.submitting.exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    own = [array for array in read_arrays(trial) if array.serves == serves]
    ids = [job_id for array in own for job_id in jobs_of(trial, array)]
    states = scheduler.states(ids) if ids else {}
    if any(state.state.alive for state in states.values()):
        return ""
    return submit_servers(trial, plan, serves, f"{tag}:{len(own)}", scheduler, again=True)


def jobs_of(trial: Trial, array: ServerArray) -> list[str]:
    """Return the ids of an array and of the jobs that continue single tasks, where requeue is refused."""
    tasks = {path.stem for path in trial.jobs.glob(f"{array.job_id}_*.next-*")}
    return [array.job_id, *sorted(newest_job(trial, task) for task in tasks)]


def read_arrays(trial: Trial) -> list[ServerArray]:
    """Return the server arrays of a trial, oldest first."""
    arrays = []
    for job in map(JobRecord.read, trial.jobs.glob("*.json")):
        if job is not None and job.kind == JobRecord.SERVERS:
            tasks = [_task(trial, f"{job.job_id}_{number}") for number in range(job.num_tasks)]
            arrays.append(ServerArray(job.job_id, job.serves, job.time, tasks))
    return sorted(arrays, key=lambda array: (array.time, array.job_id))


def _task(trial: Trial, task: str) -> ServerTask:
    lines = read_job_state(trial, task)
    if not lines:
        return ServerTask(task, TaskState.UNKNOWN)
    last, state, reason = lines[-1], TaskState.RUNNING, ""
    if last.event is JobEvent.REQUEUED:
        state = TaskState.WAITING
        reason = f"continued by job {last.successor}" if last.successor else ""
    elif last.event is JobEvent.ENDED:
        # After a TERM the script can't know whether Slurm starts it again.
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


def array_line(array: ServerArray) -> str:
    """Return one line of status."""
    counts = {kind: sum(task.state is kind for task in array.tasks) for kind in TASK_TEXTS}
    text = ", ".join(f"{count} {TASK_TEXTS[kind]}" for kind, count in counts.items() if count)
    restarts = sum(max(0, task.starts - 1) for task in array.tasks)
    if restarts:
        text += f", restarted {restarts} time{'s' if restarts != 1 else ''}"
    nodes = f"{len(array.tasks)} server node{'s' if len(array.tasks) != 1 else ''}"
    return f"job {array.job_id}, {nodes}: {text}"
