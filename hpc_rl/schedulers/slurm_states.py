"""Slurm's words for what a job does: every base state, every flag that hides one, every reason of waiting that matters.

The words are those of Slurm 22.05 to 25.11 (job_state_string, job_state_string_compact and the flags of slurm.h). Slurm's
own library is asked for its words in the tests. A word that no table has is UNKNOWN, never an exception.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_rl.errors import FailureClass
from hpc_rl.schedulers.base import State


@dataclass(frozen=True)
class Word:
    """One state or flag.

    Args:
        name: As squeue and sacct print it.
        short: Compact form; empty where Slurm has none.
        state: What it means to a trial. Whatever still holds nodes runs.
        meaning: In words, for people.
        failure: What an end in this state comes of; None where it is no end, or says nothing.
        is_flag: Hides a base state.
    """

    name: str
    short: str
    state: State
    meaning: str
    failure: FailureClass | None = None
    is_flag: bool = False


_F = FailureClass
_BASE = [
    Word("PENDING", "PD", State.PENDING, "waits in the queue"),
    Word("RUNNING", "R", State.RUNNING, "runs"),
    Word("SUSPENDED", "S", State.RUNNING, "is suspended, and keeps its nodes"),
    Word("COMPLETED", "CD", State.DONE, "its script ended with code 0"),
    Word("CANCELLED", "CA", State.CANCELLED, "was cancelled by a person", _F.USER),
    Word("FAILED", "F", State.FAILED, "its script ended with another code than 0"),
    Word("TIMEOUT", "TO", State.TIMEOUT, "ran into its time limit", _F.WALL_TIME),
    Word("NODE_FAIL", "NF", State.NODE_FAIL, "lost a node", _F.NODE),
    Word("PREEMPTED", "PR", State.PREEMPTED, "was ended for a job of higher priority", _F.PREEMPTION),
    Word("BOOT_FAIL", "BF", State.NODE_FAIL, "a node did not boot", _F.NODE),
    Word("DEADLINE", "DL", State.TIMEOUT, "its --deadline can't be met any more", _F.WALL_TIME),
    Word(
        "OUT_OF_MEMORY",
        "OOM",
        State.OUT_OF_MEMORY,
        "was killed for using more memory than it asked for",
        _F.OUT_OF_MEMORY,
    ),
]
_FLAGS = [
    Word("COMPLETING", "CG", State.RUNNING, "is being cleaned up"),
    Word("CONFIGURING", "CF", State.PENDING, "its nodes boot"),
    Word("POWER_UP_NODE", "", State.PENDING, "its nodes are powered up"),
    Word("RECONFIG_FAIL", "", State.NODE_FAIL, "its node could not be reconfigured", _F.NODE),
    Word("LAUNCH_FAILED", "", State.PENDING, "could not be launched, and waits again", _F.INFRASTRUCTURE),
    Word("REQUEUED", "RQ", State.PENDING, "is being requeued"),
    Word(
        "REQUEUE_HOLD",
        "RH",
        State.PENDING,
        "was requeued and is held: `scontrol release` lets it go on",
        _F.INFRASTRUCTURE,
    ),
    Word(
        "SPECIAL_EXIT",
        "SE",
        State.PENDING,
        "was requeued and is held by a rule of the site",
        _F.INFRASTRUCTURE,
    ),
    Word("REQUEUE_FED", "RF", State.PENDING, "is being requeued in the federation", _F.INFRASTRUCTURE),
    Word("REVOKED", "RV", State.UNKNOWN, "runs on another cluster of the federation", _F.INFRASTRUCTURE),
    Word("RESV_DEL_HOLD", "RD", State.PENDING, "is held: its reservation was deleted", _F.INFRASTRUCTURE),
    Word("EXPEDITING", "", State.PENDING, "was requeued, and comes first"),
    Word("RESIZING", "RS", State.RUNNING, "is being resized"),
    Word("SIGNALING", "SI", State.RUNNING, "is being signalled"),
    Word("STAGE_OUT", "SO", State.RUNNING, "its burst buffer is being written back"),
    Word("STOPPED", "ST", State.RUNNING, "was stopped by SIGSTOP, and keeps its nodes"),
    Word("UPDATE_DB", "", State.RUNNING, "is being written to the accounting database"),
]
WORDS = [*_BASE, *(Word(**{**vars(word), "is_flag": True}) for word in _FLAGS)]
BY_NAME = {name: word for word in WORDS for name in (word.name, word.short) if name}

_W = None  # it only waits
REASONS: dict[str, tuple[FailureClass | None, str]] = {
    "Priority": (_W, "jobs of higher priority come first"),
    "Resources": (_W, "no nodes are free"),
    "Dependency": (_W, "it waits for another job"),
    "BeginTime": (_W, "its earliest start has not come; a requeued job waits about two minutes"),
    "Licenses": (_W, "no license is free"),
    "Reservation": (_W, "its reservation has not begun"),
    "Cleaning": (_W, "its last run is being cleaned up"),
    "DependencyNeverSatisfied": (_F.USER, "the job that it waits for has failed: cancel it"),
    "InvalidAccount": (_F.USER, "its account is not valid"),
    "InvalidQOS": (_F.USER, "its quality of service is not valid"),
    "PartitionTimeLimit": (_F.USER, "it asks for more time than its partition allows"),
    "PartitionNodeLimit": (_F.USER, "it asks for more nodes than its partition has"),
    "BadConstraints": (_F.USER, "no node has what it asks for"),
    "JobHeldUser": (_F.USER, "you hold it: `scontrol release` lets it go"),
    "JobHeldAdmin": (_F.INFRASTRUCTURE, "an administrator holds it"),
    "JobLaunchFailure": (_F.INFRASTRUCTURE, "it could not be launched"),
    "JobHoldMaxRequeue": (_F.INFRASTRUCTURE, "it failed to launch too often, and is held"),
    "PartitionDown": (_F.INFRASTRUCTURE, "its partition is down"),
    "PartitionInactive": (_F.INFRASTRUCTURE, "its partition is inactive"),
    "ReqNodeNotAvail": (_F.INFRASTRUCTURE, "nodes that it needs are down, drained or reserved"),
    "NodeDown": (_F.INFRASTRUCTURE, "nodes that it needs are down"),
    "SystemFailure": (_F.INFRASTRUCTURE, "Slurm failed"),
}


def find(native: str) -> Word | None:
    """`CANCELLED by 1000`, `OUT_OF_ME+` (cut by a column) and `RUNNING,COMPLETING` are read too; None for an unknown word.

    Of several words a flag that ends or moves the job counts before the base state, as Slurm itself prints them.
    """
    parts = [part for part in re.split(r"[\s,|]+", native.split(" by ")[0].strip().upper()) if part]
    found = [word for part in parts if (word := _one(part)) is not None]
    return next((word for word in found if word.is_flag), found[0] if found else None)


def _one(part: str) -> Word | None:
    stem = part.rstrip("+")
    if stem in BY_NAME:
        return BY_NAME[stem]
    fitting = [word for word in WORDS if part.endswith("+") and len(stem) >= 4 and word.name.startswith(stem)]
    return fitting[0] if len({word.state for word in fitting}) == 1 else None


def parse(native: str) -> State:
    """What a word of Slurm's means to a trial; UNKNOWN for one that no table has."""
    word = find(native)
    return word.state if word else State.UNKNOWN


def why_pending(reason: str) -> tuple[FailureClass | None, str]:
    """Class (None: it only waits) and words for the reason of a waiting job; limits are told by their own names."""
    name = reason.strip("() ").partition(",")[0].split(" ")[0]
    if name in REASONS:
        return REASONS[name]
    if name.startswith(("Assoc", "QOS", "MaxCpu", "MaxMem")):
        return FailureClass.USER, f"a limit of its account or quality of service is reached ({name})"
    return None, name
