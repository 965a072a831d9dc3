"""The state of a trial and its reason, from its files and from the scheduler's answer if there is one.

What files tell for certain comes before the scheduler's answer, and that before the age of files.
"""

import re
import time

from hpc_rl.core.errors import ExitCode, JobEvent, StopCause
from hpc_rl.core.records import EndedRecord, TrialState
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.schedulers.shared_query import NOT_LISTED
from hpc_rl.schedulers.slurm_states import explain_pending, find_state
from hpc_rl.status.attempts import AttemptStatus
from hpc_rl.status.formatting import format_time
from hpc_rl.status.submitted_jobs import TrialJob

SILENT_AFTER_S = 120.0  # a trial whose files are older is not called running without the scheduler's answer
SKEW_S = 2.0  # largest difference between the clocks of a node and this machine

EXITS: dict[int | None, tuple[TrialState, str]] = {
    ExitCode.DONE: (TrialState.DONE, "reached its last step"),
    ExitCode.NOTHING_TO_RESUME: (TrialState.FAILED, "found nothing to resume"),
    ExitCode.REFUSED: (TrialState.FAILED, "refused its configuration or data"),
    ExitCode.BAD_CONFIG: (TrialState.FAILED, "refused its configuration or data"),
    ExitCode.STOPPED: (TrialState.STOPPED, "stopped on request"),
    ExitCode.FAILED: (TrialState.FAILED, ""),  # the state says it already
    ExitCode.CANNOT_WRITE: (TrialState.FAILED, "could not write its files"),
    ExitCode.KILLED_BY_PERSON: (TrialState.KILLED, "killed by the user"),
    ExitCode.KILLED_BY_SYSTEM: (TrialState.KILLED, "killed by the system"),
}
DEAD_JOBS = {
    State.CANCELLED: TrialState.CANCELLED,
    State.FAILED: TrialState.FAILED,
    State.TIMEOUT: TrialState.KILLED,
    State.NODE_FAIL: TrialState.KILLED,
    State.OUT_OF_MEMORY: TrialState.KILLED,
    State.PREEMPTED: TrialState.KILLED,
    State.DONE: TrialState.KILLED,  # the supervisor recorded nothing
}
NOTHING_SAVED = "nothing is saved (recover.mode disabled)"
RESULTS_SAVED = "finished prompts are saved"
SERVERS_ENDED = "its servers have ended"
ALL_FINISHED = "finished every prompt"
FIRST_NODE_LOST = (
    "its first node failed, and the rest of the job was terminated; where it may not be requeued "
    "(launcher.slurm.continue_by successor, recover.mode disabled) it has to be recovered by hand"
)


def describe_state(state: TrialState, reason: str) -> str:
    """Return a state and its reason as one line, without a repeated state word.

    "failed: rollout-0 exited", "cancelled by the user", "done". All texts with both are written here.
    """
    word = state.value
    while reason.startswith(f"{word}: "):
        reason = reason.removeprefix(f"{word}: ")
    if not reason or _begins_with(reason, word):
        return reason or word
    return f"{word}: {reason}"


def _begins_with(text: str, word: str) -> bool:
    return re.match(rf"{re.escape(word)}\b(?!:)", text) is not None


def _describe_cancel(job: TrialJob) -> str:
    return f"cancelled by a callback: {job.cancel_reason}" if job.cancel_reason else "cancelled by the user"


def _describe_saving(job: TrialJob) -> str:
    """Return what a job that has not ended does at a request to stop."""
    if job.purpose == "serve":
        return "its servers end"
    return "it saves its state first" if job.saves else NOTHING_SAVED


def _describe_saved(job: TrialJob, final_step: int | None, saved_step: int | None) -> str:
    if not job.trains:
        return SERVERS_ENDED if job.purpose == "serve" else RESULTS_SAVED
    if not job.saves:
        return NOTHING_SAVED
    if saved_step is None:
        return "no checkpoint was saved"
    if final_step is not None and final_step > saved_step:
        return f"steps after checkpoint {saved_step} were not saved"
    return "state saved"


def describe_exit(
    ended: EndedRecord, job: TrialJob, final_step: int | None, saved_step: int | None
) -> tuple[TrialState, str]:
    """Return the state and the reason of an attempt of a job that recorded its end.

    `final_step` is where its training ended, `saved_step` its newest checkpoint, as in AttemptStatus.
    """
    code, reason = ended.exit_code, ended.reason
    unknown = "exited" if code is None else f"exited with code {code}"
    state, text = EXITS.get(code, (TrialState.FAILED, unknown))
    if state is TrialState.DONE:  # the recorded reason adds nothing
        return state, text if job.trains else ALL_FINISHED
    if job.cancelled and state in (TrialState.STOPPED, TrialState.KILLED):
        state, text = TrialState.CANCELLED, _describe_cancel(job)
        reason = "" if job.cancel_reason else reason
    repeats = state is not TrialState.FAILED and _begins_with(reason, state.value)
    if repeats or (reason and state is TrialState.CANCELLED and ended.cause is StopCause.CANCELLED):
        text, reason = reason, ""  # it is more precise than the general text
    if code == ExitCode.STOPPED:
        text = f"{text}, {_describe_saved(job, final_step, saved_step)}"
    return state, ": ".join(filter(None, [text, reason])) or "without a recorded reason"


def describe_job_exit(
    job: TrialJob, final_step: int | None, saved_step: int | None
) -> tuple[TrialState, str]:
    """Return the same for an attempt without a record of its end, by the job script's record."""
    ended = EndedRecord(exit_code=job.code, reason=f"{job.reason} (code {job.code})")
    return describe_exit(ended, job, final_step, saved_step)


def determine_state(
    job: TrialJob,
    own: AttemptStatus | None,
    job_state: JobState,
    asked_at: float | None,
    last_sign: float | None,
) -> tuple[TrialState, str]:
    """Return the state and the reason of a trial that is not done.

    Args:
        job: The newest submission; without an id if nothing was submitted.
        own: The newest attempt, where it belongs to that job.
        job_state: The scheduler's answer for the job; UNKNOWN if it was not queried.
        asked_at: When it was queried, Unix seconds; None for just now.
        last_sign: When a file of the attempt last changed, Unix seconds.
    """
    if not job.job_id and own is None:
        return TrialState.RENDERED, "never submitted"
    has_started = own is not None and asked_at is not None and (own.started or 0.0) > asked_at - SKEW_S
    if job_state.state is State.PENDING and not has_started:
        if job.cancelled:
            return TrialState.STOPPING, f"{_describe_cancel(job)}; the scheduler has not confirmed it yet"
        return TrialState.PENDING, _describe_pending(job_state, again=own is not None)
    dead = job_state.native == NOT_LISTED or job_state.state in DEAD_JOBS
    if dead and job.event is JobEvent.FIRST_NODE_LOST and not job.cancelled:
        return TrialState.KILLED, FIRST_NODE_LOST
    doubt = ""
    if job.ended and not job.over and not dead:
        doubt = "; only the scheduler knows whether it starts the job again"
        # Slurm calls a job that it cleans up running.
        if job_state.state is State.RUNNING:
            return TrialState.STOPPING, f"{job.reason}{doubt}, and it has not reported that yet"
    if own is None:
        state, reason = _judge_unstarted(job, job_state)
    elif own.state is TrialState.RUNNING:
        state, reason = _judge_unended(job, own, job_state, last_sign)
    else:
        state, reason = _judge_recorded_end(job, own, dead)
    return state, reason + doubt


def _judge_recorded_end(job: TrialJob, own: AttemptStatus, dead: bool) -> tuple[TrialState, str]:
    """Judge a recorded end. `dead`: the scheduler knows that the job is over."""
    if own.state is TrialState.DONE:
        return TrialState.DONE, ""
    if dead or job.ended or own.state in (TrialState.FAILED, TrialState.CANCELLED):
        # The job script knows why a job that stopped was not started again.
        more = f" ({job.reason})" if job.ended and job.reason and own.state is TrialState.STOPPED else ""
        return own.state, own.cause + more
    return TrialState.PENDING, f"{own.cause}; it is being started again"


def _describe_pending(job_state: JobState, again: bool) -> str:
    text = "waiting to be started again" if again else "waiting to be started"
    if job_state.start_time is not None and job_state.start_time > time.time():
        text += f", expected to start {format_time(job_state.start_time)}"
    if job_state.reason in ("", "None"):
        return text
    meaning = explain_pending(job_state.reason)[1]
    return f"{text} ({job_state.reason}" + (f": {meaning})" if meaning != job_state.reason else ")")


def _judge_unstarted(job: TrialJob, job_state: JobState) -> tuple[TrialState, str]:
    if job.ended:
        text = f"exited before the supervisor recorded anything: {job.reason} (code {job.code})"
        return (TrialState.CANCELLED if job.cancelled else TrialState.FAILED), text
    if job_state.state.alive:
        return TrialState.RUNNING, "the job has started, the supervisor has not recorded anything yet"
    if job_state.state in DEAD_JOBS:
        return DEAD_JOBS[
            job_state.state
        ], f"before it started anything; {_describe_scheduler_state(job_state)}"
    if job.cancelled:
        return TrialState.CANCELLED, "cancelled before it started"
    if job_state.native == NOT_LISTED:
        return TrialState.KILLED, f"before it started anything; {_describe_scheduler_state(job_state)}"
    if time.time() - job.time < SILENT_AFTER_S:
        return TrialState.PENDING, "submitted, has not recorded anything yet"
    return TrialState.UNKNOWN, "submitted, has not recorded anything yet, and the scheduler does not list it"


def _judge_unended(
    job: TrialJob, own: AttemptStatus, job_state: JobState, last_sign: float | None
) -> tuple[TrialState, str]:
    """Return the state of an attempt that has not recorded an end."""
    if job.ended:
        return describe_job_exit(job, own.final_step, own.saved_step)
    if job_state.state in DEAD_JOBS:
        return DEAD_JOBS[job_state.state], _describe_scheduler_state(job_state)
    if job_state.native == NOT_LISTED:
        return TrialState.KILLED, f"exited without recording a reason; {_describe_scheduler_state(job_state)}"
    silent_s = time.time() - last_sign if last_sign is not None else SILENT_AFTER_S
    # The age of files decides only what is shown.
    if job_state.state.alive or silent_s < SILENT_AFTER_S:
        request = own.stopping
        if job.cancelled:
            request = f"{_describe_cancel(job)}; {_describe_saving(job)}"
        return (TrialState.STOPPING, request) if request else (TrialState.RUNNING, "")
    return TrialState.UNKNOWN, f"no end recorded, and no heartbeat for {silent_s / 60:.0f} min"


def _describe_scheduler_state(job_state: JobState) -> str:
    native = job_state.native or job_state.state.value
    if job_state.native == NOT_LISTED:
        return f"the scheduler {job_state.reason}"
    if job_state.state is State.CANCELLED:
        return f"cancelled by the user: the scheduler reports {native}"
    why = "" if job_state.reason == "None" else job_state.reason
    # The local scheduler gives a sentence, Slurm one of its names.
    reported = f"{native}{': ' if ' ' in why else ' '}{why}" if why else native
    known = find_state(job_state.native)
    return f"the scheduler reports {reported}" + (f": it {known.meaning}" if known and known.failure else "")
