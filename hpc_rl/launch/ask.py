"""Asking the scheduler about a trial: which one it is, and one question for its newest job. Its silence is an answer too."""

from __future__ import annotations

from hpc_rl.errors import SchedulerError
from hpc_rl.launch.story import Job, read_jobs
from hpc_rl.schedulers import make_scheduler
from hpc_rl.schedulers.base import JobState, Scheduler
from hpc_rl.trial import Trial


def scheduler_of(trial: Trial, job: Job) -> Scheduler:
    """The scheduler that a job was handed to. Raises SchedulerError."""
    return make_scheduler(job.scheduler, trial)


def ask_newest(trial: Trial) -> tuple[JobState | None, str]:
    """What the scheduler says of the newest job, by one query; None, and its complaint, where it says nothing."""
    jobs = read_jobs(trial)
    if not jobs:
        return None, ""
    job = jobs[-1]
    try:
        return scheduler_of(trial, job).states([job.native_id]).get(job.native_id), ""
    except SchedulerError as error:
        return None, str(error)
