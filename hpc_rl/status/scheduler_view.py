"""Asking the scheduler about trials, rarely: what many people share is asked through polling.py, this machine directly.

Its silence is an answer too: then the files of the trial tell what they can.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.errors import SchedulerError
from hpc_rl.schedulers import make_scheduler
from hpc_rl.schedulers.base import JobState, Scheduler
from hpc_rl.schedulers.shared_query import Poller, Seen, cluster_name
from hpc_rl.status.trial_status import Job, read_jobs
from hpc_rl.trial import Trial

PATIENCE_S = 5.0  # for another command's query, by one that would know nothing otherwise
PROMPT_S = 2.0  # between two questions of one watcher to a scheduler that answers from files


@dataclass(frozen=True)
class Answer:
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


def scheduler_of(trial: Trial, job: Job) -> Scheduler:
    """The scheduler that a job was handed to. Raises SchedulerError, also on another cluster, where its id means another job."""
    here = cluster_name() if job.cluster else ""
    if here and here != job.cluster:
        raise SchedulerError(
            f"job {job.job_id} of {trial} was handed to the cluster {job.cluster}, and Slurm's commands here speak to {here}: "
            "give this command on a login node of that cluster."
        )
    return make_scheduler(job.scheduler, trial)


def ask(trial: Trial, newer_than: float = 0.0, patience_s: float = PATIENCE_S) -> Answer:
    """What the scheduler says of a trial's jobs that may go on: one query, or none where the last is recent.

    An answer from before `newer_than` (Unix seconds) is of little use: it is asked again soon, but not at once.
    """
    return ask_all([trial], newer_than, patience_s).get(trial.dir, Answer())


def ask_all(
    trials: Iterable[Trial], newer_than: float = 0.0, patience_s: float = PATIENCE_S
) -> dict[Path, Answer]:
    """The same for many trials, by trial directory; the jobs of one account are asked for together."""
    answers: dict[Path, Answer] = {}
    together: dict[tuple[str, int], tuple[Any, list[tuple[Trial, list[Job], str]]]] = {}
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
            answers[trial.dir] = Answer(complaint=str(error))
    for (_, owner), (scheduler, asked) in together.items():
        wanted = {job.native_id: job.time for _, jobs, _ in asked for job in jobs}
        seen = Poller(scheduler).look(wanted, owner, newer_than, patience_s)
        answers |= {trial.dir: _answer(jobs, newest, seen) for trial, jobs, newest in asked}
    return answers


def _answer(jobs: list[Job], newest: str, seen: Seen) -> Answer:
    states = {job.job_id: seen.states[job.native_id] for job in jobs if job.native_id in seen.states}
    return Answer(states, states.get(newest), seen.asked_at, seen.complaint)


def _owner(trial: Trial) -> int:
    try:
        return trial.jobs.stat().st_uid
    except OSError:
        return os.getuid()


class Watcher:
    """Asks for one trial again and again, for a view that is drawn twice a second."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._answer = Answer()
        self._next = float("-inf")

    def look(self, newer_than: float = 0.0) -> Answer:
        """The newest answer that there is."""
        if time.monotonic() >= self._next or newer_than > self._answer.asked_at:
            self._answer = ask(self.trial, newer_than, patience_s=0.0)
            self._next = time.monotonic() + PROMPT_S
        return self._answer
