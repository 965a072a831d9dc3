"""Takeover: what a supervisor does before it starts anything, so that nobody writes behind its back.

It takes the owner's lease with a higher epoch, which fences a supervisor that still lives elsewhere, and waits for the
processes of earlier attempts and incarnations. Those of this host are known by their records; those of other hosts end by
the pipe from their supervisor.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_rl.launch.steps import Child
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.base import Lease, NameResolve
from hpc_rl.plan.schema import Unit
from hpc_rl.proc import end_processes, is_alive, start_ticks
from hpc_rl.stats.read import JsonLines
from hpc_rl.trial import Attempt, Trial, read_json, write_json

logger = logging.getLogger(__name__)
LEASE_TTL_S = 15.0
RENEW_EVERY_S = 2.0
FENCE_S = 3 * RENEW_EVERY_S  # for an owner on another host to notice that it is no longer the owner
WAIT_S, TERM_S, KILL_S = 10.0, 10.0, 5.0
_FILE = re.compile(r"(?:client-)?(?P<role>[a-z]+)-(?P<index>\d+)\.(?P<incarnation>\d+)(?:-rank\d+)?\.(?:json|log)")


@dataclass(frozen=True)
class ProcessRecord:
    """One process of the trial, by what tells it from any other."""

    pid: int
    start_ticks: int | None
    host: str
    role: str
    rank: int
    step: str = ""  # Slurm's number of its step


def take_ownership(names: NameResolve, attempt: Attempt) -> Lease:
    """Become the one supervisor of the trial; waits until one on another host must have noticed. Raises OSError."""
    before = names.leases(keys.OWNER).get(keys.OWNER)
    me = {"attempt": attempt.id, "host": socket.gethostname(), "pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    lease = names.lease(keys.OWNER, me, LEASE_TTL_S)
    if before is not None and before.value.get("host") != socket.gethostname():
        logger.warning("an earlier supervisor on %s left no word: waiting %g s for it", before.value.get("host"), FENCE_S)
        time.sleep(FENCE_S)
    return lease


def end_leftovers(trial: Trial) -> list[ProcessRecord]:
    """End what still runs on this host of earlier supervisors; returns what could not be ended. Raises OSError."""
    found = {(record.pid, record.start_ticks): record for record in _records(trial)}
    alive = [(pid, ticks) for pid, ticks in found if ticks is not None and pid != os.getpid() and is_alive(pid, ticks)]
    if alive:
        logger.warning("waiting for %d processes of earlier starts to end", len(alive))
    return [found[one] for one in end_processes(alive, WAIT_S, TERM_S, KILL_S)]


def leave_record(attempt: Attempt, role: str, index: int, incarnation: int) -> None:
    """Put the supervisor's own process on record. Raises OSError."""
    me = ProcessRecord(os.getpid(), start_ticks(os.getpid()), socket.gethostname(), role, 0)
    write_json(attempt.processes / f"{role}-{index}.{incarnation}-rank0.json", asdict(me))


def leave_client_records(attempt: Attempt, unit: Unit, incarnation: int, children: list[Child]) -> None:
    """Put what was started for a unit on record; the roles' own records come only once they have loaded. Raises OSError."""
    for child in children:
        record = ProcessRecord(child.pid, child.start_ticks, socket.gethostname(), unit.role, child.rank)
        write_json(attempt.processes / f"client-{unit.role}-{unit.index}.{incarnation}-rank{child.rank}.json", asdict(record))


def next_incarnations(attempt: Attempt) -> dict[tuple[str, int], int]:
    """The first number that is free for each unit in this attempt, by every trace that one could have left. Raises OSError."""
    taken = [
        (row["role"], row["index"], row["incarnation"])
        for row in JsonLines(attempt.events).poll()
        if row.get("event") == "started" and isinstance(row.get("incarnation"), int)
    ]
    for folder in ("logs", "exits", "processes"):
        names = os.listdir(attempt.dir / folder) if (attempt.dir / folder).is_dir() else []
        for match in filter(None, map(_FILE.fullmatch, names)):
            taken.append((match["role"], int(match["index"]), int(match["incarnation"])))
    following: dict[tuple[str, int], int] = {}
    for role, index, incarnation in taken:
        following[role, index] = max(following.get((role, index), 0), incarnation + 1)
    return following


def _records(trial: Trial) -> list[ProcessRecord]:
    records = []
    for path in trial.attempts.glob("*/processes/*.json"):
        record = _record(path)
        if record is not None and record.host == socket.gethostname():
            records.append(record)
    return records


def _record(path: Path) -> ProcessRecord | None:
    try:
        record = ProcessRecord(**(read_json(path) or {}))
    except TypeError:
        return None
    return record if isinstance(record.pid, int) and record.pid > 1 else None
