"""The submissions of a trial, from their records and from what their job scripts reported."""

from dataclasses import dataclass, field

from hpc_rl.core.errors import JobEvent
from hpc_rl.core.records import GIVEN_BACK, JobRecord, JobStateLine, find_newest_job, load_job_state
from hpc_rl.core.trial import Trial, load_object


@dataclass
class TrialJob:
    """One submission: `jobs/<job id>.json`, and the last line of `jobs/<job id>.state`."""

    job_id: str
    time: float = 0.0  # Unix seconds
    scheduler: str = ""
    start_mode: str = ""
    cancelled: bool = False  # the user asked for it
    cancel_reason: str = ""  # of a callback that cancelled it
    event: JobEvent | None = None
    native_id: str = ""  # the scheduler's id of its newest job: of a successor, else job_id
    code: int | None = None  # exit code
    reason: str = ""  # of its end, by the job script
    cluster: str = ""  # Slurm's name of its cluster; empty if that is not known
    other_length: bool = False  # total_train_* differs from the submission before
    saves: bool = True  # at a stop: its recover.mode is not disabled
    purpose: str = "train"  # of its trial
    # starts that a watch on another node gave back, by restart number
    lost_starts: dict[int, JobStateLine] = field(default_factory=dict)
    by_signal: bool = False  # ended by a TERM: of a cancel, a preemption or an administrator's requeue

    @property
    def trains(self) -> bool:
        return self.purpose == "train"

    @property
    def ended(self) -> bool:
        """Whether its script has ended, perhaps to be started again by the scheduler."""
        return self.event is JobEvent.ENDED

    @property
    def over(self) -> bool:
        """Whether it has ended for good.

        After a TERM that no `hpc-rl cancel` asked for, only the scheduler knows.
        """
        return self.ended and (self.cancelled or not self.by_signal)


def load_jobs(trial: Trial) -> list[TrialJob]:
    """Return the submissions of a trial, oldest first. Records that are not sound are skipped."""
    jobs = []
    for path in trial.jobs.glob("*.json"):
        record = JobRecord.read(path)
        if record is not None and record.kind != JobRecord.SERVERS and "_" not in record.job_id:
            jobs.append(_make_job(trial, record))
    jobs.sort(key=lambda job: (job.time, job.job_id))
    plan = load_object(trial.plan_json) if jobs else {}
    if jobs and jobs[-1].start_mode == "resume":  # the mode of later starts is in the plan alone
        jobs[-1].saves = plan.get("recover_mode") != "disabled"
    for job in jobs:
        job.purpose = plan.get("purpose", "train")
    return jobs


def _make_job(trial: Trial, record: JobRecord) -> TrialJob:
    newest = find_newest_job(trial, record.job_id)
    intent = trial.cancel_intent(record.job_id)
    is_cancelled = intent.exists()
    job = TrialJob(
        job_id=record.job_id,
        time=record.time,
        scheduler=record.scheduler,
        cluster=record.cluster,
        start_mode=record.start_mode,
        saves=record.start_mode != "disabled",
        cancelled=is_cancelled,
        cancel_reason=str(load_object(intent).get("reason", "")) if is_cancelled else "",
        native_id=record.native_id if newest == record.job_id and record.native_id else newest,
        other_length=any(change.startswith("total_train_") for change in record.changed),
    )
    lines = load_job_state(trial, record.job_id)
    job.lost_starts = {line.restart: line for line in lines if line.event in GIVEN_BACK}
    for last in lines[-1:]:
        job.event, job.code, job.reason, job.by_signal = last.event, last.code, last.reason, last.cancelled
    return job
