"""The scheduler's view of trials, queried rarely: shared queries for Slurm, direct ones for this machine.

Without an answer the status comes from the files of the trial.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_rl.core.errors import SchedulerError
from hpc_rl.core.records import TrialState
from hpc_rl.core.trial import Trial
from hpc_rl.schedulers import make_scheduler
from hpc_rl.schedulers.base import Scheduler, SchedulerAnswer
from hpc_rl.schedulers.shared_query import Poller, find_cluster_name
from hpc_rl.status.formatting import format_duration
from hpc_rl.status.submitted_jobs import TrialJob, load_jobs
from hpc_rl.status.trial_status import StatusReader, TrialStatus

WAIT_FOR_OTHERS_S = 5.0  # for another command's query, if nothing is known yet
MIN_INTERVAL_S = 2.0  # between two queries of one view, which is redrawn twice a second
OLD_ANSWER_S = 60.0  # older answers count as stale
CONFIRM_END_S = 120.0  # an end that only old files suggest waits so long for the scheduler


def make_job_scheduler(trial: Trial, job: TrialJob) -> Scheduler:
    """Return the scheduler that a job was submitted to.

    Raises SchedulerError, also on another cluster, where the id belongs to another job.
    """
    here = find_cluster_name() if job.cluster else ""
    if here and here != job.cluster:
        raise SchedulerError(
            f"job {job.job_id} of {trial} was submitted to the cluster {job.cluster}, and the local Slurm "
            f"commands are configured for {here}: run this on a login node of {job.cluster}."
        )
    return make_scheduler(job.scheduler, trial)


def query(trial: Trial, newer_than: float = 0.0, patience_s: float = WAIT_FOR_OTHERS_S) -> SchedulerAnswer:
    """Return the scheduler's answer on a trial's jobs, by at most one query.

    An answer from before `newer_than`, in Unix seconds, is queried again soon, though not at once. Where
    nothing is known yet another command's query is waited for, up to `patience_s`.
    """
    return query_all([trial], newer_than, patience_s).get(trial.dir, SchedulerAnswer())


def query_if(is_wanted: bool, trial: Trial) -> SchedulerAnswer:
    """Return the answer of `query`, or an empty one for a command that must not query."""
    return query(trial) if is_wanted else SchedulerAnswer()


def describe_complaint(answer: SchedulerAnswer) -> str:
    """Return why an answer is missing or stale; "" if it is neither."""
    if answer.complaint:
        source = f"its answer of {format_duration(answer.age_s)} ago" if answer.asked_at else "files only"
        return f"could not query the scheduler; showing data from {source}: {answer.complaint}"
    if answer.asked_at and answer.age_s > OLD_ANSWER_S:
        return f"scheduler state is {format_duration(answer.age_s)} old (queries are rate-limited)"
    return ""


def query_all(
    trials: Iterable[Trial], newer_than: float = 0.0, patience_s: float = WAIT_FOR_OTHERS_S
) -> dict[Path, SchedulerAnswer]:
    """Return the same for many trials, by trial directory; the jobs of one account share a query."""
    answers: dict[Path, SchedulerAnswer] = {}
    shared: dict[int, tuple[Any, list[tuple[Trial, list[TrialJob]]]]] = {}  # by account
    for trial in trials:
        every = load_jobs(trial)
        jobs = [job for job in every if not job.over]
        if not jobs or trial.done.exists():
            continue  # files tell how it ended
        try:
            scheduler = make_job_scheduler(trial, jobs[-1])
            if hasattr(scheduler, "query_account"):
                shared.setdefault(_find_owner(trial), (scheduler, []))[1].append((trial, every))
            else:
                states = scheduler.query_states([job.native_id for job in jobs])
                answers[trial.dir] = _select_answer(every, SchedulerAnswer(states, time.time()))
        except SchedulerError as error:
            answers[trial.dir] = SchedulerAnswer(complaint=str(error))
    for owner, (scheduler, members) in shared.items():
        wanted = {job.native_id: job.time for _, every in members for job in every if not job.over}
        seen = Poller(scheduler).look(wanted, owner, newer_than, patience_s)
        answers |= {trial.dir: _select_answer(every, seen) for trial, every in members}
    return answers


def _select_answer(jobs: list[TrialJob], seen: SchedulerAnswer) -> SchedulerAnswer:
    """Return an answer by the ids of a trial's submissions."""
    states = {job.job_id: seen.states[job.native_id] for job in jobs if job.native_id in seen.states}
    return replace(seen, states=states, newest=states.get(jobs[-1].job_id))


def _find_owner(trial: Trial) -> int:
    try:
        return trial.jobs.stat().st_uid
    except OSError:
        return os.getuid()


def load_current_status(trial: Trial) -> TrialStatus:
    """Return the status of a trial by its files and at most one query."""
    answer = query(trial)
    return StatusReader(trial).read(answer.newest, answer.asked_at or None)


class TrialWatch:
    """The status of a trial while it changes.

    An end that no file tells for certain is believed once the scheduler was queried after it showed.
    """

    def __init__(self, trial: Trial) -> None:
        self._reader = StatusReader(trial)
        self._answer, self._query_at = SchedulerAnswer(), float("-inf")
        self._doubt_at = 0.0  # Unix seconds; 0 for none
        self._shown: TrialStatus | None = None
        self._is_final = False

    def poll(self) -> TrialStatus:
        if time.monotonic() >= self._query_at or self._doubt_at > self._answer.asked_at:
            self._answer = query(self._reader.trial, self._doubt_at, patience_s=0.0)
            self._query_at = time.monotonic() + MIN_INTERVAL_S
        answer = self._answer
        status = self._reader.read(answer.newest, answer.asked_at)
        if not status.over or is_final(status):
            if status.over and not self._is_final:  # the end was read after files that were written before it
                status = self._reader.read(answer.newest, answer.asked_at)
            self._doubt_at, self._shown, self._is_final = 0.0, status, status.over
            return status
        self._doubt_at = self._doubt_at or time.time()  # the job script may be about to start it again
        if answer.asked_at >= self._doubt_at or time.time() > self._doubt_at + CONFIRM_END_S:
            return status
        return self._shown or replace(
            status, state=TrialState.UNKNOWN, reason="the scheduler is being queried"
        )


def is_final(status: TrialStatus) -> bool:
    """Return whether files alone exclude that the job of a trial continues."""
    if status.state in (TrialState.DONE, TrialState.RENDERED) or (status.jobs and status.jobs[-1].over):
        return True
    failed = status.state in (TrialState.FAILED, TrialState.CANCELLED)
    return failed and bool(status.attempts) and status.attempts[-1].exit_code is not None
