"""Slurm's job states: base states, flags that hide a base state, reasons for waiting.

The names come from Slurm 22.05 to 26.05 (job_state_string, job_state_string_compact and the flags of
slurm.h); the tests compare them with Slurm's own library. This module also summarizes jobs that Slurm lists
in parts (tasks of an array `12_0` or `12_[1-3%2]`, components of a heterogeneous job `12+0`).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hpc_rl.core.errors import FailureClass
from hpc_rl.schedulers.base import JobState, State


@dataclass(frozen=True)
class SlurmState:
    """One base state or flag."""

    name: str  # as squeue and sacct print it
    short: str  # compact form, or empty
    state: State  # for a trial; a job that still holds nodes is running
    meaning: str  # for users; continues a sentence about the job
    failure: FailureClass | None = None  # class of an end in this state, if known
    is_flag: bool = False  # whether it hides a base state


_F, _INFRASTRUCTURE = FailureClass, FailureClass.INFRASTRUCTURE
_BASE = [
    SlurmState("PENDING", "PD", State.PENDING, "waits in the queue"),
    SlurmState("RUNNING", "R", State.RUNNING, "runs"),
    SlurmState("SUSPENDED", "S", State.RUNNING, "is suspended, and keeps its nodes"),
    SlurmState("COMPLETED", "CD", State.DONE, "its script ended with code 0"),
    SlurmState("CANCELLED", "CA", State.CANCELLED, "was cancelled", _F.USER),
    SlurmState("FAILED", "F", State.FAILED, "its script ended with a code other than 0"),
    SlurmState("TIMEOUT", "TO", State.TIMEOUT, "reached its time limit", _F.WALL_TIME),
    SlurmState("NODE_FAIL", "NF", State.NODE_FAIL, "lost a node", _F.NODE),
    SlurmState(
        "PREEMPTED", "PR", State.PREEMPTED, "was preempted by a job of higher priority", _F.PREEMPTION
    ),
    SlurmState("BOOT_FAIL", "BF", State.NODE_FAIL, "had a node that did not boot", _F.NODE),
    SlurmState("DEADLINE", "DL", State.TIMEOUT, "can't meet its --deadline any more", _F.WALL_TIME),
    SlurmState("OUT_OF_MEMORY", "OOM", State.OUT_OF_MEMORY, "exceeded its memory limit", _F.OUT_OF_MEMORY),
]
_HELD_BY_USER = "was requeued and is held; `scontrol release` starts it again"
_FLAGS = [
    SlurmState("COMPLETING", "CG", State.RUNNING, "is being cleaned up"),
    SlurmState("CONFIGURING", "CF", State.PENDING, "waits for its nodes to boot"),
    SlurmState("POWER_UP_NODE", "", State.PENDING, "waits for its nodes to be powered up"),
    SlurmState("RECONFIG_FAIL", "", State.NODE_FAIL, "had a node that could not be reconfigured", _F.NODE),
    SlurmState("LAUNCH_FAILED", "", State.PENDING, "could not be launched, and waits again", _INFRASTRUCTURE),
    SlurmState("REQUEUED", "RQ", State.PENDING, "is being requeued"),
    SlurmState("REQUEUE_HOLD", "RH", State.PENDING, _HELD_BY_USER, _INFRASTRUCTURE),
    SlurmState(
        "SPECIAL_EXIT", "SE", State.PENDING, "was requeued and is held by a site rule", _INFRASTRUCTURE
    ),
    SlurmState("REQUEUE_FED", "RF", State.PENDING, "is being requeued in the federation", _INFRASTRUCTURE),
    SlurmState("REVOKED", "RV", State.UNKNOWN, "runs on another cluster of the federation", _INFRASTRUCTURE),
    SlurmState("RESV_DEL_HOLD", "RD", State.PENDING, "is held: its reservation was deleted", _INFRASTRUCTURE),
    SlurmState("EXPEDITING", "", State.PENDING, "was requeued at top priority"),
    SlurmState("RESIZING", "RS", State.RUNNING, "is being resized"),
    SlurmState("SIGNALING", "SI", State.RUNNING, "is being signalled"),
    SlurmState("STAGE_OUT", "SO", State.RUNNING, "its burst buffer is being written back"),
    SlurmState("STOPPED", "ST", State.RUNNING, "was stopped by SIGSTOP, and keeps its nodes"),
    SlurmState("UPDATE_DB", "", State.RUNNING, "is being written to the accounting database"),
]
SLURM_STATES = [*_BASE, *(replace(flag, is_flag=True) for flag in _FLAGS)]
_BY_NAME = {name: known for known in SLURM_STATES for name in (known.name, known.short) if name}

LAUNCH_FAILED = (
    "a node could not start it (see sinfo -R), so Slurm holds it: `scontrol release` lets it start"
)
# Reasons of a waiting job, by Slurm's name: class (None: it only waits), and text for users.
REASONS: dict[str, tuple[FailureClass | None, str]] = {
    "Priority": (None, "jobs of higher priority come first"),
    "Resources": (None, "no nodes are free"),
    "Dependency": (None, "it waits for another job"),
    "JobArrayTaskLimit": (None, "its job array already runs as many tasks as its limit allows"),
    "BeginTime": (None, "its earliest start has not come; a requeued job waits about two minutes"),
    "Licenses": (None, "no license is free"),
    "Reservation": (None, "its reservation has not begun"),
    "Cleaning": (None, "its last run is being cleaned up"),
    "DependencyNeverSatisfied": (_F.USER, "the job that it waits for has failed: cancel it"),
    "InvalidAccount": (_F.USER, "its account is not valid"),
    "InvalidQOS": (_F.USER, "its quality of service is not valid"),
    "PartitionTimeLimit": (_F.USER, "it asks for more time than its partition allows"),
    "PartitionNodeLimit": (_F.USER, "it asks for more nodes than its partition has"),
    "BadConstraints": (_F.USER, "no node fits its request"),
    "JobHeldUser": (_F.USER, "you hold it: `scontrol release` lets it start"),
    "JobHeldAdmin": (_INFRASTRUCTURE, "an administrator holds it"),
    "launch": (_INFRASTRUCTURE, LAUNCH_FAILED),  # failed requeued held
    "launch_failed_requeued_held": (_INFRASTRUCTURE, LAUNCH_FAILED),
    "JobLaunchFailure": (_INFRASTRUCTURE, "it could not be launched"),
    "JobHoldMaxRequeue": (_INFRASTRUCTURE, "it failed to launch too often, and is held"),
    "PartitionDown": (_INFRASTRUCTURE, "its partition is down"),
    "PartitionInactive": (_INFRASTRUCTURE, "its partition is inactive"),
    "ReqNodeNotAvail": (_INFRASTRUCTURE, "nodes that it needs are down, drained or reserved"),
    "NodeDown": (_INFRASTRUCTURE, "nodes that it needs are down"),
    "SystemFailure": (_INFRASTRUCTURE, "Slurm failed"),
}


def find_state(native: str) -> SlurmState | None:
    """Return the state that Slurm printed, None for an unknown name.

    Also parses `CANCELLED by 1000`, `OUT_OF_ME+` (cut by a column) and `RUNNING,COMPLETING`. Among several
    names a flag counts before the base state, as in Slurm's own output.
    """
    parts = [part for part in re.split(r"[\s,|]+", native.split(" by ")[0].strip().upper()) if part]
    found = [known for part in parts if (known := _find_by_name(part)) is not None]
    return next((known for known in found if known.is_flag), found[0] if found else None)


def _find_by_name(part: str) -> SlurmState | None:
    stem = part.rstrip("+")
    if stem in _BY_NAME:
        return _BY_NAME[stem]
    is_cut = part.endswith("+") and len(stem) >= 4
    fitting = [known for known in SLURM_STATES if is_cut and known.name.startswith(stem)]
    return fitting[0] if len({known.state for known in fitting}) == 1 else None


def classify_state(native: str) -> State:
    """Map a state of Slurm to the state for a trial; UNKNOWN for states missing from the table."""
    known = find_state(native)
    return known.state if known else State.UNKNOWN


def explain_pending(reason: str) -> tuple[FailureClass | None, str]:
    """Return class (None: it only waits) and description of a waiting job's reason."""
    name = reason.strip("() ").partition(",")[0].split(" ")[0]
    if name in REASONS:
        return REASONS[name]
    if name.startswith(("Assoc", "QOS", "MaxCpu", "MaxMem")):
        return FailureClass.USER, f"a limit of its account or quality of service is reached ({name})"
    return None, name


_PART = re.compile(r"(?P<whole>\d+)[_+].*")


def find_whole_job(job_id: str) -> str:
    """Return the job of a task or component; return other ids unchanged."""
    match = _PART.fullmatch(job_id)
    return match["whole"] if match else job_id


_WAITING_TASKS = re.compile(r"(?P<whole>\d+)_\[(?P<tasks>[\d,-]+)(%\d+)?\]")


def has_waiting_task(listed: str, job_id: str) -> bool:
    """Return whether `7_[2-11%4]`, as squeue lists tasks that wait, contains the task `7_3`."""
    match = _WAITING_TASKS.fullmatch(listed)
    whole, _, task = job_id.partition("_")
    if match is None or match["whole"] != whole or not task.isdecimal():
        return False
    spans = (part.partition("-") for part in match["tasks"].split(","))
    return any(int(first) <= int(task) <= int(last or first) for first, _, last in spans)


def summarize_parts(parts: Iterable[JobState]) -> dict[str, JobState]:
    """Return states by submitted id; also keep the states of single tasks and components."""
    found: dict[str, JobState] = {}
    members: dict[str, list[JobState]] = {}
    for part in parts:
        found[part.job_id] = part
        if find_whole_job(part.job_id) != part.job_id:
            members.setdefault(find_whole_job(part.job_id), []).append(part)
    return found | {job_id: _summarize(job_id, states) for job_id, states in members.items()}


def _summarize(job_id: str, states: list[JobState]) -> JobState:
    # A job of parts runs while any part runs, and waits while any part may still start.
    for wanted in (State.RUNNING, State.PENDING):
        of_kind = [state for state in states if state.state is wanted]
        if of_kind:
            ends = [state.end_time for state in of_kind if state.end_time is not None]
            nodes = ",".join(state.nodes for state in of_kind if state.nodes)
            return replace(of_kind[0], job_id=job_id, end_time=min(ends, default=None), nodes=nodes)
    failed = [state for state in states if state.state is not State.DONE]
    return replace((failed or states)[0], job_id=job_id)
