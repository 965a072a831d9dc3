"""Cancelling a trial: first the request, durable in the trial directory, then the scheduler."""

import enum
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.core.errors import CannotWrite, SchedulerError
from hpc_rl.core.files import is_full
from hpc_rl.core.trial import Trial, find_account_name, write_json
from hpc_rl.schedulers.base import JobState, Scheduler, State
from hpc_rl.schedulers.slurm import SlurmScheduler
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


@dataclass(frozen=True)
class _Wish:
    """A job of a trial that may be alive."""

    trial: Trial
    job: TrialJob


def cancel(trial: Trial, now: bool = False) -> list[CancelledJob]:
    """Cancel every job of the trial that may be alive, the newest last. Repeating it is harmless.

    Args:
        trial: The trial.
        now: Have the scheduler terminate running jobs; otherwise their supervisors save and exit.

    Raises CannotWrite, or SchedulerError where a scheduler failed; every request is recorded then.
    """
    return cancel_all([trial], now)[trial.dir]


def cancel_all(trials: Sequence[Trial], now: bool = False) -> dict[Path, list[CancelledJob]]:
    """Cancel several trials as `cancel` does, and return the outcomes by the directory of the trial.

    Slurm gets one query, and at most three calls that cancel, however many trials there are. Raises as
    `cancel`.
    """
    problems: dict[str, None] = {}  # a failure must not keep the request from the next job
    done: dict[Path, list[CancelledJob]] = {trial.dir: [] for trial in trials}
    for scheduler, wishes in _group_by_scheduler(_list_wishes(trials), now, problems):
        try:
            for wish, one in _cancel_jobs(scheduler, wishes, now):
                done[wish.trial.dir].append(one)
        except SchedulerError as error:
            problems[str(error)] = None
    try:  # after the jobs, which would replace lost servers
        for trial, servers in _cancel_servers(trials).items():
            done[trial] = [*servers, *done[trial]]
    except SchedulerError as error:
        problems[str(error)] = None
    if problems:
        raise SchedulerError("\n".join(problems))
    return done


def _list_wishes(trials: Iterable[Trial]) -> Iterator[_Wish]:
    for trial in trials:
        jobs = load_jobs(trial)
        for job in jobs:
            if not job.over or job is jobs[-1]:
                yield _Wish(trial, job)


def _group_by_scheduler(
    wishes: Iterable[_Wish], now: bool, problems: dict[str, None]
) -> list[tuple[Scheduler, list[_Wish]]]:
    """Return schedulers and their jobs: Slurm with all of them, another scheduler with one.

    Without a scheduler the request is recorded, and the error is added to the problems.
    """
    of_slurm: list[_Wish] = []
    groups: list[tuple[Scheduler, list[_Wish]]] = []
    for wish in wishes:
        try:
            scheduler = make_job_scheduler(wish.trial, wish.job)
        except SchedulerError as error:
            problems[str(_record_only([wish], now, error))] = None
            continue
        if scheduler.name != SlurmScheduler.name:
            groups.append((scheduler, [wish]))
            continue
        if not of_slurm:
            groups.append((scheduler, of_slurm))
        of_slurm.append(wish)
    return groups


def _cancel_servers(trials: Iterable[Trial]) -> dict[Path, list[CancelledJob]]:
    """Cancel the server arrays of all submissions; they hold no state. Raises SchedulerError."""
    found: dict[Path, list[CancelledJob]] = {}
    job_ids: list[str] = []
    scheduler = None
    for trial in trials:
        arrays = load_arrays(trial)
        jobs = load_jobs(trial) if arrays else []
        for array in arrays:
            if all(task.state == "ended" for task in array.tasks) and array.tasks:
                continue
            cluster = jobs[-1].cluster if jobs else ""
            job = TrialJob(array.job_id, native_id=array.job_id, scheduler="slurm", cluster=cluster)
            scheduler = make_job_scheduler(trial, job)
            job_ids += list_server_jobs(trial, array)
            found.setdefault(trial.dir, []).append(CancelledJob(job, CancelOutcome.SERVERS, None))
    if scheduler is not None:
        scheduler.cancel(*job_ids)
    return found


def _record_only(wishes: Iterable[_Wish], now: bool, error: SchedulerError) -> SchedulerError:
    """Record requests that the scheduler did not get; return the error for the user."""
    for wish in wishes:
        write_request(wish.trial, wish.job, now)
    return SchedulerError(
        f"{error}\nThe request to cancel is recorded; the trial stops as soon as its supervisor reads it."
    )


def _cancel_jobs(
    scheduler: Scheduler, wishes: Sequence[_Wish], now: bool
) -> list[tuple[_Wish, CancelledJob]]:
    """Cancel jobs of one scheduler: first the pending ones, so that no end of another starts them."""
    try:
        states = scheduler.query_states([wish.job.native_id for wish in wishes])
    except SchedulerError as error:
        raise _record_only(wishes, now, error) from error
    done = []
    for wish in wishes:
        state = states.get(wish.job.native_id, JobState(wish.job.native_id, State.UNKNOWN))
        done.append((wish, CancelledJob(wish.job, _choose_outcome(wish.job, state, now), state)))
    for wish, one in done:
        if one.outcome is not CancelOutcome.OVER:
            write_request(wish.trial, wish.job, now)
    problems = []
    for outcome in (CancelOutcome.REMOVED, CancelOutcome.KILLED, CancelOutcome.DRAINING):
        job_ids = [one.job.native_id for _, one in done if one.outcome is outcome]
        try:
            if job_ids and outcome is CancelOutcome.DRAINING:
                scheduler.nudge(*job_ids)
            elif job_ids:
                scheduler.cancel(*job_ids)
        except SchedulerError as error:
            problems.append(str(error))
    if problems:
        raise SchedulerError("\n".join(problems))
    return done


def _choose_outcome(job: TrialJob, state: JobState, now: bool) -> CancelOutcome:
    if not state.state.alive and (state.state is not State.UNKNOWN or job.ended):
        return CancelOutcome.OVER
    if state.state is State.PENDING or job.ended:  # there is no script to notify
        return CancelOutcome.REMOVED
    if state.state is State.UNKNOWN:
        return CancelOutcome.UNSURE
    return CancelOutcome.KILLED if now else CancelOutcome.DRAINING


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
