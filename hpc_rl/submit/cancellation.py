"""Ending a trial for good: first the wish, durable in the trial directory, then the scheduler."""

from __future__ import annotations

import enum
import socket
import time
from dataclasses import dataclass

from hpc_rl.errors import CannotWrite, SchedulerError
from hpc_rl.files import is_full
from hpc_rl.schedulers.base import JobState, Scheduler, State
from hpc_rl.status.scheduler_view import ThrottledQuery, scheduler_of
from hpc_rl.status.trial_status import TrialJob, read_jobs
from hpc_rl.supervise.server_array import read_arrays, successors
from hpc_rl.trial import Trial, account, write_json

POLL_S = 0.5  # of files; the scheduler is asked as rarely as ask.py does


class CancelOutcome(enum.StrEnum):
    """What was done about one job."""

    OVER = "over"  # nothing: it has ended
    REMOVED = "removed"  # it waited, and was taken out of the queue
    DRAINING = "draining"  # it saves its state and ends
    KILLED = "killed"  # the scheduler ends it: TERM, its grace, KILL
    SERVERS = "servers"  # of layout jobs: the scheduler ends them now, they hold no state
    UNSURE = "unsure"  # the scheduler does not know it; the wish stands


@dataclass(frozen=True)
class CancelledJob:
    """One job and what was done about it."""

    job: TrialJob
    outcome: CancelOutcome
    was: JobState | None


def cancel(trial: Trial, now: bool = False) -> list[CancelledJob]:
    """End every job of the trial that may be alive; the newest last. Doing it again does no harm.

    With `now` the scheduler ends running jobs at once, otherwise their supervisors save and stop.
    Raises CannotWrite, or SchedulerError where a scheduler did not take its part; every wish is written then.
    """
    jobs = read_jobs(trial)
    done: list[CancelledJob] = []
    problems: list[str] = []
    for job in jobs:  # each is told, whatever comes of another
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
    """Take the server arrays away, those of earlier submissions too. They hold nothing that could be lost; the wish that they
    see is the trial's. Raises SchedulerError."""
    done = []
    for array in read_arrays(trial):
        job = TrialJob(array.job_id, native_id=array.job_id, scheduler="slurm", cluster=cluster)
        if all(task.state == "ended" for task in array.tasks) and array.tasks:
            continue
        scheduler = scheduler_of(trial, job)
        for job_id in (array.job_id, *successors(trial, array.job_id)):
            scheduler.cancel(job_id)
        done.append(CancelledJob(job, CancelOutcome.SERVERS, None))
    return done


def _cancel(trial: Trial, job: TrialJob, now: bool) -> CancelledJob:
    try:
        scheduler = scheduler_of(trial, job)
        state = scheduler.states([job.native_id]).get(job.native_id, JobState(job.native_id, State.UNKNOWN))
    except SchedulerError as error:
        _wish(trial, job, now)
        raise SchedulerError(
            f"{error}\nThe wish to cancel is written down; the supervisor obeys it once it sees it."
        ) from error
    if not state.state.alive and state.state is not State.UNKNOWN:
        return CancelledJob(job, CancelOutcome.OVER, state)
    if job.event == "ended" and state.state is State.UNKNOWN:
        return CancelledJob(job, CancelOutcome.OVER, state)
    _wish(trial, job, now)
    return CancelledJob(job, _tell(scheduler, job, state, now), state)


def _tell(scheduler: Scheduler, job: TrialJob, state: JobState, now: bool) -> CancelOutcome:
    if state.state is State.PENDING or job.event == "ended":  # no script is there to be told
        scheduler.cancel(job.native_id)
        return CancelOutcome.REMOVED
    if state.state is State.UNKNOWN:
        return CancelOutcome.UNSURE
    if now:
        scheduler.cancel(job.native_id)
        return CancelOutcome.KILLED
    scheduler.nudge(job.native_id)
    return CancelOutcome.DRAINING


def _wish(trial: Trial, job: TrialJob, now: bool) -> None:
    wish = {"time": time.time(), "user": account(), "host": socket.gethostname(), "now": now}
    path = trial.cancel_intent(job.job_id)
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, wish)
    except OSError as error:
        otherwise = (
            f" Make room, or: scancel {job.native_id}" if job.scheduler == "slurm" and is_full(error) else ""
        )
        words = f"{path} can't be written: {error.strerror or error}. Nothing was cancelled.{otherwise}"
        raise CannotWrite(words) from error


def wait_until_over(trial: Trial, job: TrialJob, timeout_s: float) -> JobState | None:
    """Wait until the job's script or the scheduler says that it is over; None when it is not by then. Raises SchedulerError."""
    deadline, since = time.monotonic() + timeout_s, time.time()
    watcher = ThrottledQuery(trial)
    while True:
        if any(now.job_id == job.job_id and now.over for now in read_jobs(trial)):
            return JobState(job.job_id, State.UNKNOWN, reason="its script said so")
        answer = watcher.look(since)
        state = answer.states.get(job.job_id)
        if answer.complaint:
            raise SchedulerError(answer.complaint)
        if answer.asked_at >= since and (state is None or not state.state.alive):
            return state or JobState(job.job_id, State.UNKNOWN)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return None
        time.sleep(min(POLL_S, left_s))
