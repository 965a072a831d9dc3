"""Successor: the job that goes on where this one may not be requeued. Submitted from the job itself, once, whatever crashes.

The submission keeps its id: a successor is one more start of it, under another id of Slurm's. It depends on the end of its
predecessor, so that never two of them run. Which start it is makes its tag; before anything is submitted, and after, the
record of that start and Slurm's queue are looked at, and a person's wish to cancel.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from hpc_rl.errors import TrialBusy
from hpc_rl.schedulers.base import JobSpec
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.trial import Trial, create_exclusive, read_json

logger = logging.getLogger(__name__)


def go_on(
    trial: Trial,
    job_id: str,
    restart: int,
    *,
    after: str,
    name: str,
    script: Path,
    array: str = "",
    exclude: str | None = None,
    arguments: tuple[str, ...] = (),
    scheduler: SlurmScheduler | None = None,
) -> str:
    """Submit the job that is start number `restart` of a submission; returns its id. Doing it again gives the same job.

    Args:
        trial: Whose job it is.
        job_id: The submission.
        restart: Number of the start that the successor makes.
        after: Slurm's id of the job that runs now.
        name: Job name.
        script: The script, as it was submitted.
        array: Task of an array that goes on alone; empty for a job that is none.
        exclude: Nodes to avoid instead of those that the script names, empty for none; None leaves it to the script.
        arguments: What the script is called with, after the submission and the number of the start.
        scheduler: Whom to ask.

    Raises:
        TrialBusy where a person wants it dead; SchedulerError, OSError.
    """
    scheduler = scheduler or SlurmScheduler()
    record = trial.successor(job_id, restart)
    known = read_json(record)
    if isinstance(known, dict) and known.get("job_id"):
        return str(known["job_id"])
    refuse_cancelled(trial, job_id)
    tag = f"hpc-rl:{trial}:{job_id}.{restart}"
    spec = JobSpec(
        name,
        script,
        tag,
        arguments=(job_id, str(restart), *arguments),
        after=after,
        array=array,
        exclude=exclude,
        known_as=False,
        comment=users_comment(trial),
    )
    found = scheduler.find(spec)  # of a start of this very job that died before it could write the record
    if found:
        logger.warning("job %s goes on with job %s already", job_id, found)
    new = found or scheduler.submit(spec)
    content = json.dumps({"job_id": new, "after": after, "time": time.time()}) + "\n"
    if not create_exclusive(record, content):
        other = read_json(record)
        if isinstance(other, dict) and other.get("job_id") not in (None, new):
            scheduler.cancel(new)
            return str(other["job_id"])
    try:
        refuse_cancelled(
            trial, job_id
        )  # written while we submitted: whoever cancels has not seen the new job
    except TrialBusy:
        scheduler.cancel(new)
        raise
    return new


def users_comment(trial: Trial) -> str:
    """`launcher.slurm.comment` of the trial, by which a site may route or bill its jobs; empty where there is none."""
    config = read_json(trial.config_json)
    slurm = config.get("launcher", {}).get("slurm", {}) if isinstance(config, dict) else {}
    return str(slurm.get("comment") or "")


def refuse_cancelled(trial: Trial, job_id: str) -> None:
    """Raises TrialBusy where a person wants the submission dead."""
    if trial.cancel_intent(job_id).exists():
        raise TrialBusy(f"job {job_id} was cancelled by a person: nothing goes on.")
