"""Scheduler: the only door to whatever runs jobs. Two implementations: slurm.py and local.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class State(enum.StrEnum):
    """What a job does, as far as a trial is concerned. A name that no table has is UNKNOWN, never an exception."""

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
    """One submission: a rendered script, and what is said of it beside the script.

    Args:
        name: Name of the job.
        script: The script.
        tag: Unique; the job is found again by it after a submission whose answer was lost.
        arguments: What the script is called with.
        after: Job that must have ended, however, before this one starts; empty for none.
        array: Tasks of the array instead of those that the script names; empty leaves it to the script.
        exclude: Nodes to avoid instead of those that the script names, empty for none; None leaves it to the script.
        known_as: Whether `tag` is the one that the script carries; otherwise it is said beside it, and replaces its comment.
        comment: The user's own words, which follow the tag where that is said beside the script.
    """

    name: str
    script: Path
    tag: str
    arguments: tuple[str, ...] = ()
    after: str = ""
    array: str = ""
    exclude: str | None = None
    known_as: bool = True
    comment: str = ""


@dataclass(frozen=True)
class JobState:
    """What the scheduler says of a job. `native` is its own word; times are Unix seconds or None, `start_time` may be a guess."""

    job_id: str
    state: State
    native: str = ""
    reason: str = ""
    end_time: float | None = None
    nodes: str = ""
    start_time: float | None = None


class Scheduler(Protocol):
    """Raises SchedulerError where the scheduler refuses or can't be reached."""

    name: str

    def submit(self, spec: JobSpec) -> str:
        """Hand in a script; returns the job id at once."""

    def states(self, job_ids: list[str]) -> dict[str, JobState]:
        """State of each job, by one query; a job that the scheduler does not know is UNKNOWN."""

    def cancel(self, job_id: str) -> None:
        """End the job now: TERM, then KILL. Unknown or ended jobs are no error."""

    def nudge(self, job_id: str) -> None:
        """Ask the job's supervisor to read the intents now (USR1 to the batch script)."""

    def requeue(self, job_id: str) -> None:
        """Start the job again under the same id."""

    def end_time(self, job_id: str) -> float | None:
        """When the scheduler will end the job, Unix seconds, or None."""
