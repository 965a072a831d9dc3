"""The interface to job schedulers. Two implementations: slurm.py and local.py."""

import enum
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hpc_rl.core.records import JsonRecord


class State(enum.StrEnum):
    """State of a job, as far as a trial is concerned; UNKNOWN for a state missing from our tables."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    NODE_FAIL = "node_fail"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    UNKNOWN = "unknown"

    @property
    def alive(self) -> bool:
        return self in (State.PENDING, State.RUNNING)


@dataclass(frozen=True)
class JobSpec:
    """One submission of a rendered script."""

    name: str
    script: Path
    tag: str  # unique; finds the job if the answer to its submission was lost
    arguments: tuple[str, ...] = ()  # of the script
    options: tuple[str, ...] = ()  # of sbatch; they override the script's


@dataclass(frozen=True)
class JobState(JsonRecord):
    """The scheduler's answer about a job. `native` is its name for the state; times are Unix seconds."""

    job_id: str
    state: State
    native: str = ""
    reason: str = ""
    end_time: float | None = None
    nodes: str = ""
    start_time: float | None = None  # an estimate for a pending job


@dataclass(frozen=True)
class SchedulerAnswer:
    """A scheduler's answer about several jobs, for example the jobs of a trial."""

    states: dict[str, JobState] = field(default_factory=dict)
    asked_at: float = 0.0  # when it was queried, Unix seconds; 0 for never
    complaint: str = ""  # error message, if the newest query failed
    newest: JobState | None = None  # of the trial's newest job; None if unknown

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.asked_at)


class Scheduler(Protocol):
    """All methods raise SchedulerError if the scheduler refuses or can't be reached."""

    name: str

    def submit(self, spec: JobSpec) -> str:
        """Submit a script; return the job id at once."""

    def query_states(self, job_ids: list[str]) -> dict[str, JobState]:
        """Return the state of each job, by one query; UNKNOWN for jobs that the scheduler does not know."""

    def cancel(self, *job_ids: str) -> None:
        """Terminate jobs now: TERM, then KILL. Unknown or ended jobs are accepted."""

    def nudge(self, *job_ids: str) -> None:
        """Ask the supervisors of jobs to read the intents now (USR1 to the batch scripts)."""
