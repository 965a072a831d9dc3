"""Successor: the job that continues a submission whose job may not be requeued.

The job itself submits it, exactly once, whatever crashes. The submission keeps its id: a successor is another
start of it, under a new Slurm id. It depends on the end of its predecessor, so that two never run at once.
Its tag contains the number of the start. Before the submission, the record of that start, Slurm's queue and a
request to cancel are checked; after it, the request to cancel is checked again.
"""

import json
import logging
import time
from pathlib import Path

from hpc_rl.core.errors import TrialBusy
from hpc_rl.core.records import SuccessorRecord
from hpc_rl.core.trial import Trial, create_exclusive, load_object
from hpc_rl.schedulers.base import JobSpec
from hpc_rl.schedulers.slurm import SlurmScheduler

logger = logging.getLogger(__name__)


def submit_successor(
    trial: Trial,
    job_id: str,
    restart: int,
    *,
    after: str,
    name: str,
    script: Path,
    options: tuple[str, ...] = (),
    arguments: tuple[str, ...] = (),
    scheduler: SlurmScheduler | None = None,
) -> str:
    """Submit the job for start number `restart` of a submission, and return its id. Idempotent.

    It starts once the current Slurm job (`after`) has ended, in any way. `options` are further options of
    sbatch; `arguments` follow the submission and the number of the start. Raises TrialBusy if the submission
    was cancelled; SchedulerError, OSError.
    """
    scheduler = scheduler or SlurmScheduler()
    record = trial.successor(job_id, restart)
    known = SuccessorRecord.read(record)
    if known is not None and known.job_id:
        return known.job_id
    refuse_cancelled(trial, job_id)
    tag = f"hpc-rl:{trial}:{job_id}.{restart}"
    options = (f"--dependency=afterany:{after}", make_comment_option(trial, tag), *options)
    spec = JobSpec(name, script, tag, (job_id, str(restart), *arguments), options)
    found = scheduler.find(spec)  # of a start of this job that died before it wrote the record
    if found:
        logger.warning("job %s already has a successor, job %s, so no other is submitted", job_id, found)
    new = found or scheduler.submit(spec)
    made = SuccessorRecord(job_id=new, after=after, time=time.time())
    if not create_exclusive(record, json.dumps(made.to_json()) + "\n"):
        other = SuccessorRecord.read(record)
        if other is not None and other.job_id != new:
            scheduler.cancel(new)
            return other.job_id
    try:
        # A cancel requested meanwhile has not seen the new job.
        refuse_cancelled(trial, job_id)
    except TrialBusy:
        scheduler.cancel(new)
        raise
    return new


def make_comment_option(trial: Trial, tag: str) -> str:
    """Return the --comment option for another tag than the script's.

    It is followed by `launcher.slurm.comment`, which a site may use to route or bill jobs.
    """
    slurm = load_object(trial.config_json).get("launcher", {}).get("slurm", {})
    return f"--comment={tag} {slurm.get('comment') or ''}".rstrip()


def refuse_cancelled(trial: Trial, job_id: str) -> None:
    """Raise TrialBusy if the submission was cancelled."""
    if trial.cancel_intent(job_id).exists():
        raise TrialBusy(f"job {job_id} was cancelled by its user, so no job continues it.")
