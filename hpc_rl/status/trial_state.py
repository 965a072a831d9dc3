"""The state of a trial in one word with its reason, from what its files say and what the scheduler says, if it was asked.

What files say for certain comes before the scheduler's word, and that before the age of files.
"""

from __future__ import annotations

import time
from typing import Protocol

from hpc_rl.errors import ExitCode
from hpc_rl.schedulers import record
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.schedulers.shared_query import GONE
from hpc_rl.schedulers.slurm_states import find, why_pending
from hpc_rl.status.formatting import format_time

SILENCE_S = (
    120.0  # without a scheduler's word, a trial whose files rest for so long is no longer called running
)
SKEW_S = 2.0  # by which the clocks of a node and of this machine may differ


class JobFacts(Protocol):
    """What is read of a submission (story.Job)."""

    job_id: str
    time: float
    cancelled: bool
    event: str
    code: int | None
    reason: str
    saves: bool

    @property
    def over(self) -> bool: ...


class AttemptFacts(Protocol):
    """What is read of an attempt (story.AttemptStory)."""

    job_id: str
    state: str
    cause: str
    started: float | None
    stopping: str


ENDS: dict[int, tuple[str, str]] = {
    ExitCode.DONE: ("done", "reached its end"),
    ExitCode.NOTHING_TO_RESUME: ("failed", "found nothing to resume"),
    ExitCode.REFUSED: ("failed", "refused its configuration"),
    ExitCode.BAD_CONFIG: ("failed", "refused its configuration"),
    ExitCode.STOPPED: ("stopped", "stopped on purpose, state saved"),
    ExitCode.FAILED: ("failed", "failed"),
    ExitCode.CANNOT_WRITE: ("failed", "could not write where it must"),
    ExitCode.KILLED_BY_PERSON: ("killed", "killed by a person"),
    ExitCode.KILLED_BY_SYSTEM: ("killed", "killed by the system"),
}


NOTHING_SAVED = "nothing is saved (recover.mode disabled)"


def describe_exit(code: int | None, reason: str, cancelled: bool, saves: bool = True) -> tuple[str, str]:
    """State and words for an exit code with its recorded reason; `saves`: it was a trial that saves when it stops."""
    state, words = (
        ENDS.get(code, ("failed", f"ended with exit code {code}"))
        if code is not None
        else ("failed", "ended")
    )
    if cancelled and state in ("stopped", "killed"):
        state, words = (
            "cancelled",
            "cancelled by a person" + (", state saved" if code == ExitCode.STOPPED else ""),
        )
    words = words if saves else words.replace("state saved", NOTHING_SAVED)
    return state, f"{words}: {reason}" if reason and reason not in words else words


FIRST_NODE_LOST = (
    "its first node died, and what was left of the job was ended; where it may not be requeued (launcher.slurm.continue_by "
    "successor, recover.mode disabled) nothing starts it again by itself"
)

DEAD_JOBS = {
    State.CANCELLED: "cancelled",
    State.FAILED: "failed",
    State.TIMEOUT: "killed",
    State.NODE_FAIL: "killed",
    State.OUT_OF_MEMORY: "killed",
    State.PREEMPTED: "killed",
    State.DONE: "killed",  # without a word of the supervisor, that is
}


def determine_state(
    job: JobFacts | None,
    own: AttemptFacts | None,
    job_state: JobState | None,
    asked_at: float | None = None,
    last_sign: float | None = None,
) -> tuple[str, str]:
    """State and reason of a trial that is not done.

    Args:
        job: The newest submission.
        own: The newest attempt, if it is one of that job.
        job_state: What the scheduler said of the job, None where it was not asked.
        asked_at: When it said so, Unix seconds; None for just now.
        last_sign: When a file of the attempt last changed, Unix seconds.
    """
    if job is None and own is None:
        return "rendered", "never submitted"
    if job_state is not None and job_state.state is State.PENDING and not _has_started_since(own, asked_at):
        if job is not None and job.cancelled:
            return "stopping", "a person cancelled it; the scheduler has not confirmed it yet"
        return "pending", _waiting(job_state, again=own is not None)
    dead = job_state is not None and (job_state.native == GONE or job_state.state in DEAD_JOBS)
    if dead and job is not None and job.event == record.FIRST_NODE_LOST and not job.cancelled:
        return "killed", FIRST_NODE_LOST
    doubt = ""
    if job is not None and job.event == "ended" and not job.over and not dead:
        doubt = "; only the scheduler knows whether it starts the job again"
        if job_state is not None and job_state.state is State.RUNNING:  # as it calls one that it cleans up
            return "stopping", f"{job.reason}{doubt}, and it has not said yet"
    state, reason = _by_files(job, own, job_state, last_sign, dead)
    return state, reason + doubt


def _by_files(
    job: JobFacts | None,
    own: AttemptFacts | None,
    job_state: JobState | None,
    last_sign: float | None,
    dead: bool,
) -> tuple[str, str]:
    """What the files say, where the scheduler does not say that the job waits. `dead`: it says that the job is over."""
    if own is None:
        return _unstarted(job, job_state) if job else ("unknown", "")
    if own.state == "running":
        return _unended(job, own, job_state, last_sign)
    job_ended = job is not None and job.event == "ended"
    if dead or job_ended or own.state in ("done", "failed", "cancelled"):
        # A job that did not go on after a stop says why in its own last words.
        more = (
            f" ({job.reason})"
            if own.state == "stopped" and job is not None and job_ended and job.reason
            else ""
        )
        return own.state, "" if own.state == "done" else own.cause + more
    return "pending", f"{own.cause}; it is being started again"


def _has_started_since(own: AttemptFacts | None, asked_at: float | None) -> bool:
    """Whether an attempt began after the scheduler called its job pending: the answer is an old one then."""
    return own is not None and asked_at is not None and (own.started or 0.0) > asked_at - SKEW_S


def _waiting(job_state: JobState, again: bool) -> str:
    words = "waits to be started again" if again else "waits to be started"
    if job_state.start_time is not None and job_state.start_time > time.time():
        words += f", expected to start {format_time(job_state.start_time)}"
    return words + _pending_words(job_state.reason)


def _pending_words(reason: str) -> str:
    if reason in ("", "None"):
        return ""
    words = why_pending(reason)[1]
    return f" ({reason})" if words == reason else f" ({reason}: {words})"


def _unstarted(job: JobFacts, job_state: JobState | None) -> tuple[str, str]:
    """The newest job has made no attempt."""
    if job.event == "ended":
        words = f"ended before the supervisor wrote anything: {job.reason} (code {job.code})"
        return ("cancelled" if job.cancelled else "failed"), words
    if job_state is not None and job_state.state.alive:
        return "running", "the job has started, the supervisor has not written yet"
    if job_state is not None and job_state.state in DEAD_JOBS:
        return DEAD_JOBS[job_state.state], f"before it started anything; {_scheduler_words(job_state)}"
    if job.cancelled:
        return "cancelled", "cancelled before it started"
    if job_state is not None and job_state.native == GONE:
        return "killed", f"before it started anything; {_scheduler_words(job_state)}"
    if time.time() - job.time < SILENCE_S:
        return "pending", "submitted, has not written yet"
    return "unknown", "submitted, has not written yet, and the scheduler does not say where it is"


def _unended(
    job: JobFacts | None, own: AttemptFacts, job_state: JobState | None, last_sign: float | None
) -> tuple[str, str]:
    """The newest attempt left no word of its end."""
    if job is not None and job.event == "ended":
        return describe_exit(job.code, f"{job.reason} (code {job.code})", job.cancelled, job.saves)
    if job_state is not None and job_state.state in DEAD_JOBS:
        return DEAD_JOBS[job_state.state], _scheduler_words(job_state)
    if job_state is not None and job_state.native == GONE:
        return "killed", f"left no word of its end; {_scheduler_words(job_state)}"
    silent_s = time.time() - last_sign if last_sign is not None else SILENCE_S
    if (
        job_state is not None and job_state.state.alive
    ) or silent_s < SILENCE_S:  # the age decides only what is shown
        wish = own.stopping
        if job is not None and job.cancelled:
            wish = f"a person asked it to stop; {'it saves its state first' if job.saves else NOTHING_SAVED}"
        return ("stopping", wish) if wish else ("running", "")
    return "unknown", f"no word of its end, and no sign of life for {silent_s / 60:.0f} min"


def _scheduler_words(job_state: JobState) -> str:
    if job_state.native == GONE:
        return f"the scheduler {job_state.reason}"
    if job_state.state is State.CANCELLED:
        return f"cancelled by a person: the scheduler says {job_state.native or job_state.state.value}"
    why = job_state.reason if job_state.reason != "None" else ""
    between = ": " if " " in why else " "  # a sentence of ours, or a word of Slurm's
    said = f"{job_state.native or job_state.state.value}{between}{why}".strip()
    known = find(job_state.native)
    return f"the scheduler says {said}" + (f": it {known.meaning}" if known and known.failure else "")
