"""Takeover: what a supervisor does before it starts anything, so that nobody writes behind its back.

It takes the owner's lease with a higher epoch, which fences an earlier start of the same job that still lives elsewhere, and
leaves the trial alone where another job runs it. Then it waits for the
processes of earlier attempts and incarnations. Those of this host are known by their records; those of other hosts end by
the pipe from their supervisor.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_rl.errors import TrialBusy
from hpc_rl.files import JsonLines
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.base import Lease, NameResolve, Seen
from hpc_rl.plan.schema import Unit
from hpc_rl.proc import end_processes, is_alive, start_ticks
from hpc_rl.supervise.processes import Child
from hpc_rl.trial import Attempt, Trial, read_json, submission_of, write_json

logger = logging.getLogger(__name__)
LEASE_TTL_S = 15.0
RENEW_EVERY_S = 2.0
FENCE_S = 3 * RENEW_EVERY_S  # for an owner on another host to notice that it is no longer the owner
WAIT_S, TERM_S, KILL_S = 10.0, 10.0, 5.0
PROCESS_FILE = re.compile(
    r"(?:client-)?(?P<role>[a-z]+)-(?P<index>\d+)\.(?P<incarnation>\d+)(?:-rank\d+)?\.(?:json|log)"
)


@dataclass(frozen=True)
class ProcessRecord:
    """One process of the trial, by what tells it from any other."""

    pid: int
    start_ticks: int | None
    host: str
    role: str
    rank: int
    step: str = ""  # Slurm's number of its step


def take_ownership(
    names: NameResolve, attempt: Attempt, clock: Callable[[], float] = time.monotonic
) -> Lease:
    """Become the one supervisor of the trial.

    An earlier start of the same job is fenced: its scheduler has started it again, so it is to end. One of another job that
    lives is not: raises TrialBusy. Waits until one on another host must have noticed, or is known to be dead. Raises OSError.
    """
    before = names.leases(keys.OWNER).get(keys.OWNER)
    if before is not None and submission_of(str(before.value.get("attempt"))) != submission_of(attempt.id):
        _refuse_while_alive(names, before, attempt, clock)
    me = {
        "attempt": attempt.id,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
    }
    lease = names.lease(keys.OWNER, me, LEASE_TTL_S)
    if before is not None and before.value.get("host") != socket.gethostname():
        logger.warning(
            "an earlier supervisor on %s left no word: waiting %g s for it", before.value.get("host"), FENCE_S
        )
        time.sleep(FENCE_S)
    return lease


def _refuse_while_alive(
    names: NameResolve, before: Seen, attempt: Attempt, clock: Callable[[], float]
) -> None:
    """Raises TrialBusy where the owner lives: its process, if that is on this host, else a counter that moves."""
    owner = before.value
    pid, ticks = owner.get("pid"), owner.get("start_ticks")
    if owner.get("host") == socket.gethostname() and isinstance(pid, int):
        alive = is_alive(pid, ticks)
    else:
        alive = _moves(names, before, clock)
    if alive:
        raise TrialBusy(
            f"the trial is run by attempt {owner.get('attempt')} on {owner.get('host')} (process {pid}), so attempt {attempt.id} "
            f"ends at once. Two jobs can't write one trial: end the other with `hpc-rl cancel {attempt.trial}`, or wait for it."
        )


def _moves(names: NameResolve, before: Seen, clock: Callable[[], float]) -> bool:
    """Whether the counter of a lease moves within its time to live; also a later epoch is somebody."""
    end = clock() + LEASE_TTL_S + RENEW_EVERY_S
    logger.warning(
        "an earlier supervisor on %s left no word: watching whether it lives", before.value.get("host")
    )
    last_age_s = before.age_s
    while clock() < end:
        time.sleep(RENEW_EVERY_S / 4)
        now = names.leases(keys.OWNER).get(keys.OWNER)
        if now is None:
            return False
        if now.epoch != before.epoch or now.age_s < last_age_s:
            return True
        last_age_s = now.age_s
    return False


def end_leftovers(trial: Trial) -> list[ProcessRecord]:
    """End what still runs on this host of earlier supervisors; returns what could not be ended. Raises OSError."""
    found = {(record.pid, record.start_ticks): record for record in _records(trial)}
    alive = [
        (pid, ticks)
        for pid, ticks in found
        if ticks is not None and pid != os.getpid() and is_alive(pid, ticks)
    ]
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
        write_json(
            attempt.processes / f"client-{unit.role}-{unit.index}.{incarnation}-rank{child.rank}.json",
            asdict(record),
        )


def next_incarnations(attempt: Attempt) -> dict[tuple[str, int], int]:
    """The first number that is free for each unit in this attempt, by every trace that one could have left. Raises OSError."""
    taken = [
        (row["role"], row["index"], row["incarnation"])
        for row in JsonLines(attempt.events).poll()
        if row.get("event") == "started" and isinstance(row.get("incarnation"), int)
    ]
    for folder in ("logs", "exits", "processes"):
        names = os.listdir(attempt.dir / folder) if (attempt.dir / folder).is_dir() else []
        for match in filter(None, map(PROCESS_FILE.fullmatch, names)):
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
        data = read_json(path) or {}
        record = ProcessRecord(**{name: data[name] for name in ProcessRecord.__dataclass_fields__})
    except (TypeError, KeyError):
        return None
    return record if isinstance(record.pid, int) and record.pid > 1 else None
