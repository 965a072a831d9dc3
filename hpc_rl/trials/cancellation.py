"""Cancelling a trial: first the request, durable in the trial directory, then the scheduler."""

import enum
import socket
import time
from dataclasses import dataclass

from hpc_rl.core.errors import CannotWrite, SchedulerError
from hpc_rl.core.files import is_full
from hpc_rl.core.trial import Trial, find_account_name, write_json
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.status.scheduler_view import make_job_scheduler, query
from hpc_rl.status.submitted_jobs import TrialJob, load_jobs
from hpc_rl.supervise.server_array import list_server_jobs, load_arrays

POLL_S = 1.0  # of files


class CancelOutcome(enum.StrEnum):
    OVER = "over"  # nothing: it has ended
    REMOVED = "removed"  # it was pending, and was removed from the queue
    DRAINING = "draining"  # it saves its state and exits
    KILLED = "killed"  # the scheduler terminates it: TERM, its grace period, KILL
    SERVERS = "servers"  # of layout jobs: the scheduler terminates them now, they hold no state
    UNSURE = "unsure"  # the scheduler does not know it; the request stays recorded


@dataclass(frozen=True)
class CancelledJob:
    job: TrialJob
    outcome: CancelOutcome
    was: JobState | None


def cancel(trial: Trial, now: bool = False) -> list[CancelledJob]:
    """Cancel every job of the trial that may be alive, the newest last. Repeating it is harmless.

    Args:
        trial: The trial.
        now: Have the scheduler terminate running jobs; otherwise their supervisors save and exit.

    Raises CannotWrite, or SchedulerError where a scheduler failed; every request is recorded then.
    """
    jobs = load_jobs(trial)
    done: list[CancelledJob] = []
    problems: list[str] = []
    for job in jobs:  # a failure must not keep the request from the next one
        if not job.over or job is jobs[-1]:
            try:
                done.append(_cancel(trial, job, now))
            except SchedulerError as error:
                problems.append(str(error))
    try:
        done = [*_cancel_servers(trial, jobs[-1].cluster if jobs else ""), *done]
    except SchedulerError as error:
        problems.append(str(error))
    if problems:
        raise SchedulerError("\n".join(problems))
    return done


def _cancel_servers(trial: Trial, cluster: str) -> list[CancelledJob]:
    """Cancel the server arrays of all submissions; they hold no state. Raises SchedulerError."""
    done = []
    for array in load_arrays(trial):
        job = TrialJob(array.job_id, native_id=array.job_id, scheduler="slurm", cluster=cluster)
        if all(task.state == "ended" for task in array.tasks) and array.tasks:
            continue
        scheduler = make_job_scheduler(trial, job)
        for job_id in list_server_jobs(trial, array):
            scheduler.cancel(job_id)
        done.append(CancelledJob(job, CancelOutcome.SERVERS, None))
    return done


def _cancel(trial: Trial, job: TrialJob, now: bool) -> CancelledJob:
    try:
        scheduler = make_job_scheduler(trial, job)
        state = scheduler.query_states([job.native_id]).get(
            job.native_id, JobState(job.native_id, State.UNKNOWN)
        )
    except SchedulerError as error:
        write_request(trial, job, now)
        raise SchedulerError(
            f"{error}\nThe request to cancel is recorded; the trial stops as soon as its supervisor reads it."
        ) from error
    if not state.state.alive and (state.state is not State.UNKNOWN or job.ended):
        return CancelledJob(job, CancelOutcome.OVER, state)
    write_request(trial, job, now)
    if state.state is State.PENDING or job.ended:  # there is no script to notify
        scheduler.cancel(job.native_id)
        return CancelledJob(job, CancelOutcome.REMOVED, state)
    if state.state is State.UNKNOWN:
        return CancelledJob(job, CancelOutcome.UNSURE, state)
    if now:
        scheduler.cancel(job.native_id)
        return CancelledJob(job, CancelOutcome.KILLED, state)
    scheduler.nudge(job.native_id)
    return CancelledJob(job, CancelOutcome.DRAINING, state)


def write_request(trial: Trial, job: TrialJob, now: bool) -> None:
    """Record that the user cancels a job. Raises CannotWrite."""
    request = {"time": time.time(), "user": find_account_name(), "host": socket.gethostname(), "now": now}
    path = trial.cancel_intent(job.job_id)
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, request)
    except OSError as error:
        by_hand = f" Free some space, or: scancel {job.native_id}" if job.scheduler == "slurm" else ""
        raise CannotWrite(
            f"{path} can't be written: {error.strerror or error}. Nothing was cancelled."
            f"{by_hand if is_full(error) else ''}"
        ) from error


def wait_until_over(trial: Trial, job: TrialJob, timeout_s: float) -> JobState | None:
    """Wait until the job's script or the scheduler reports that it is over; return None at the timeout.

    Raises SchedulerError.
    """
    deadline, since = time.monotonic() + timeout_s, time.time()
    while True:
        if any(now.job_id == job.job_id and now.over for now in load_jobs(trial)):
            return JobState(job.job_id, State.UNKNOWN, reason="its script has ended")
        answer = query(trial, since, patience_s=0.0)
        state = answer.states.get(job.job_id)
        if answer.complaint:
            raise SchedulerError(answer.complaint)
        if answer.asked_at >= since and (state is None or not state.state.alive):
            return state or JobState(job.job_id, State.UNKNOWN)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return None
        time.sleep(min(POLL_S, left_s))
