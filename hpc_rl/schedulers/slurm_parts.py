"""Jobs that Slurm lists in parts: tasks of an array (`12_0`, `12_[1-3%2]`), components of a heterogeneous job (`12+0`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from hpc_rl.schedulers.base import JobState, State

_PART = re.compile(r"(?P<whole>\d+)[_+].*")


def whole(job_id: str) -> str:
    """The job that a part belongs to; any other id as it is."""
    match = _PART.fullmatch(job_id)
    return match["whole"] if match else job_id


def fold(parts: Iterable[JobState]) -> dict[str, JobState]:
    """States by the id that was submitted; those of single tasks stay, too.

    A job of parts runs while any of them does, and waits while any may still start. Once all are over it counts as the first
    of them that did not end well.
    """
    found: dict[str, JobState] = {}
    members: dict[str, list[JobState]] = {}
    for part in parts:
        found[part.job_id] = part
        if whole(part.job_id) != part.job_id:
            members.setdefault(whole(part.job_id), []).append(part)
    return found | {job_id: _one(job_id, states) for job_id, states in members.items()}


def _one(job_id: str, states: list[JobState]) -> JobState:
    for wanted in (State.RUNNING, State.PENDING):
        of_kind = [state for state in states if state.state is wanted]
        if of_kind:
            ends = [state.end_time for state in of_kind if state.end_time is not None]
            nodes = ",".join(state.nodes for state in of_kind if state.nodes)
            return replace(of_kind[0], job_id=job_id, end_time=min(ends, default=None), nodes=nodes)
    return replace(
        next((state for state in states if state.state is not State.DONE), states[0]), job_id=job_id
    )
