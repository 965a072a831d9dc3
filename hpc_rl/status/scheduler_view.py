"""Asking the scheduler about trials, rarely: what many people share is asked through polling.py, this machine directly.

Its silence is an answer too: then the files of the trial tell what they can.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_rl.errors import SchedulerError
from hpc_rl.schedulers import make_scheduler
from hpc_rl.schedulers.base import JobState, Scheduler
from hpc_rl.schedulers.shared_query import Poller, Seen, cluster_name
from hpc_rl.status.trial_status import StatusReader, TrialJob, TrialStatus, read_jobs
from hpc_rl.trial import Trial

PATIENCE_S = 5.0  # for another command's query, by one that would know nothing otherwise
DOUBT_S = 120.0  # so long a scheduler that gives no answer can put off an end that files only suggest
PROMPT_S = 2.0  # between two questions of one watcher to a scheduler that answers from files


@dataclass(frozen=True)
class SchedulerAnswer:
    """What a scheduler says of a trial's jobs.

    Args:
        states: Of each job that was asked about.
        newest: Of the newest job; None where nothing is known.
        asked_at: When the scheduler was asked, Unix seconds; 0 for never.
        complaint: Its last words where the newest question got no answer.
    """

    states: dict[str, JobState] = field(default_factory=dict)
    newest: JobState | None = None
    asked_at: float = 0.0
    complaint: str = ""

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.asked_at)


def scheduler_of(trial: Trial, job: TrialJob) -> Scheduler:
    """The scheduler that a job was handed to. Raises SchedulerError, also on another cluster, where its id means another job."""
    here = cluster_name() if job.cluster else ""
    if here and here != job.cluster:
        raise SchedulerError(
            f"job {job.job_id} of {trial} was handed to the cluster {job.cluster}, and Slurm's commands here speak to {here}: "
            "give this command on a login node of that cluster."
        )
    return make_scheduler(job.scheduler, trial)


def query(trial: Trial, newer_than: float = 0.0, patience_s: float = PATIENCE_S) -> SchedulerAnswer:
    """What the scheduler says of a trial's jobs that may go on: one query, or none where the last is recent.

    An answer from before `newer_than` (Unix seconds) is of little use: it is asked again soon, but not at once.
    """
    return query_all([trial], newer_than, patience_s).get(trial.dir, SchedulerAnswer())


def query_all(
    trials: Iterable[Trial], newer_than: float = 0.0, patience_s: float = PATIENCE_S
) -> dict[Path, SchedulerAnswer]:
    """The same for many trials, by trial directory; the jobs of one account are asked for together."""
    answers: dict[Path, SchedulerAnswer] = {}
    together: dict[tuple[str, int], tuple[Any, list[tuple[Trial, list[TrialJob], str]]]] = {}
    for trial in trials:
        every = read_jobs(trial)
        jobs = [job for job in every if not job.over]
        if not jobs or trial.done.exists():
            continue  # files tell how it ended
        try:
            scheduler = scheduler_of(trial, jobs[-1])
            if hasattr(scheduler, "survey"):
                owner = _owner(trial)
                together.setdefault((jobs[-1].scheduler, owner), (scheduler, []))[1].append(
                    (trial, jobs, every[-1].job_id)
                )
            else:
                states = scheduler.states([job.native_id for job in jobs])
                answers[trial.dir] = _answer(jobs, every[-1].job_id, Seen(states, time.time()))
        except SchedulerError as error:
            answers[trial.dir] = SchedulerAnswer(complaint=str(error))
    for (_, owner), (scheduler, asked) in together.items():
        wanted = {job.native_id: job.time for _, jobs, _ in asked for job in jobs}
        seen = Poller(scheduler).look(wanted, owner, newer_than, patience_s)
        answers |= {trial.dir: _answer(jobs, newest, seen) for trial, jobs, newest in asked}
    return answers


def _answer(jobs: list[TrialJob], newest: str, seen: Seen) -> SchedulerAnswer:
    states = {job.job_id: seen.states[job.native_id] for job in jobs if job.native_id in seen.states}
    return SchedulerAnswer(states, states.get(newest), seen.asked_at, seen.complaint)


def _owner(trial: Trial) -> int:
    try:
        return trial.jobs.stat().st_uid
    except OSError:
        return os.getuid()


class ThrottledQuery:
    """Asks for one trial again and again, for a view that is drawn twice a second."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._answer = SchedulerAnswer()
        self._next = float("-inf")

    def look(self, newer_than: float = 0.0) -> SchedulerAnswer:
        """The newest answer that there is."""
        if time.monotonic() >= self._next or newer_than > self._answer.asked_at:
            self._answer = query(self.trial, newer_than, patience_s=0.0)
            self._next = time.monotonic() + PROMPT_S
        return self._answer


class TrialWatch:
    """The story of now. An end that no file tells for certain is believed once the scheduler was asked after it showed."""

    def __init__(self, trial: Trial) -> None:
        self._reader = StatusReader(trial)
        self._watcher = ThrottledQuery(trial)
        self._doubt_at = 0.0  # Unix seconds; 0 for none
        self._shown: TrialStatus | None = None

    def look(self) -> TrialStatus:
        """The story of now."""
        answer = self._watcher.look(self._doubt_at)
        story = self._reader.read(answer.newest, answer.asked_at)
        if not story.over or is_final(story):
            self._doubt_at, self._shown = 0.0, story
            return story
        self._doubt_at = self._doubt_at or time.time()  # the batch script may be about to start it again
        if answer.asked_at >= self._doubt_at or time.time() > self._doubt_at + DOUBT_S:
            return story
        return self._shown or replace(story, state="unknown", reason="the scheduler is being asked")


def is_final(story: TrialStatus) -> bool:
    """Whether the files of a trial that seems over leave no room for its job to go on."""
    if story.state in ("done", "rendered") or (story.jobs and story.jobs[-1].over):
        return True
    return (
        story.state in ("failed", "cancelled")
        and bool(story.attempts)
        and story.attempts[-1].exit_code is not None
    )
