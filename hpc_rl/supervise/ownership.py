"""Exclusive ownership of a trial: a supervisor takes it before it starts anything.

It takes the owner's lease with a higher epoch, which fences an earlier start of the same job that still runs
elsewhere; it refuses if another job runs the trial. Then it waits for the processes of earlier attempts and
incarnations. Processes on this host are known by their records. Processes on other hosts exit when the pipe
from their supervisor closes; processes that write the trial's state also exit when they see the new lease.
"""

import logging
import os
import socket
import threading
import time
from contextlib import suppress

from hpc_rl.core.errors import ExitCode, TrialBusy
from hpc_rl.core.proc import end_processes, find_start_ticks, is_alive
from hpc_rl.core.records import EventKind, JobRecord, ProcessFile, ProcessRecord, load_events
from hpc_rl.core.trial import Attempt, AttemptId, Trial, parse_submission
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import LEASE_TTL_S, Lease, LeaseView, NameResolve

logger = logging.getLogger(__name__)
CHECK_EVERY_S = 2.0  # for another supervisor's lease
FENCE_S = 3 * CHECK_EVERY_S  # time for an owner on another host to notice that it lost ownership
WAIT_S, TERM_S, KILL_S = 10.0, 10.0, 5.0


def take_ownership(names: NameResolve, attempt: Attempt) -> Lease:
    """Become the only supervisor of the trial; first give an earlier one on another host time to notice.

    An earlier start of the same job is fenced: the scheduler has restarted the job, so it must stop. Raises
    TrialBusy if the supervisor of another job lives, OSError.
    """
    before = names.list_leases(keys.OWNER).get(keys.OWNER)
    if before is not None and parse_submission(str(before.value.get("attempt"))) != attempt.job_id:
        _refuse_while_alive(names, before, attempt)
    me = {
        "attempt": attempt.id,
        "host": socket.gethostname(),
        "node": os.environ.get("SLURMD_NODENAME", ""),
        "pid": os.getpid(),
        "start_ticks": find_start_ticks(os.getpid()),
    }
    lease = names.lease(keys.OWNER, me, LEASE_TTL_S)
    if before is not None and before.value.get("host") != socket.gethostname():
        host = before.value.get("host")
        logger.warning(
            "the previous supervisor, on %s, has not recorded its end; this supervisor waits %g s for it",
            host,
            FENCE_S,
        )
        time.sleep(FENCE_S)
    return lease


def end_when_fenced(names: NameResolve, attempt: Attempt) -> None:
    """Start a thread that ends this process within FENCE_S after a later attempt's supervisor owns the trial.

    Nothing else ends a role on a node that was cut off: the pipe from its supervisor stays open, and the
    shared disk may still be reachable.
    """

    def watch() -> None:
        while True:
            with suppress(OSError):  # file system away: nothing can be written either
                if later := find_later_owner(names, attempt):
                    logger.error("attempt %s runs the trial now, so this process ends immediately", later)
                    os._exit(ExitCode.KILLED_BY_SYSTEM)
            time.sleep(CHECK_EVERY_S)

    threading.Thread(target=watch, daemon=True, name="fence").start()


def find_later_owner(names: NameResolve, attempt: Attempt) -> str:
    """Return the attempt that owns the trial, if it began after this one; else an empty text."""
    owner = names.list_leases(keys.OWNER).get(keys.OWNER)
    other = str(owner.value.get("attempt")) if owner is not None else ""
    return other if _is_later(other, attempt) else ""


def _is_later(other: str, attempt: Attempt) -> bool:
    found, own = AttemptId.parse(other), AttemptId.parse(attempt.id)
    if found is None or own is None:
        return False
    if found.job_id == own.job_id:
        return found.restart > own.restart
    theirs, mine = (JobRecord.read(attempt.trial.job(one.job_id)) for one in (found, own))
    return theirs is not None and mine is not None and theirs.time > mine.time > 0


def _refuse_while_alive(names: NameResolve, before: LeaseView, attempt: Attempt) -> None:
    """Raise TrialBusy if the owner lives: by its process on this host, or by its lease's counter."""
    owner = before.value
    pid, ticks = owner.get("pid"), owner.get("start_ticks")
    if owner.get("host") == socket.gethostname() and isinstance(pid, int):
        alive = is_alive(pid, ticks)
    else:
        alive = _is_moving(names, before)
    if alive:
        raise TrialBusy(
            f"the trial is run by attempt {owner.get('attempt')} on {owner.get('host')} (process {pid}), "
            f"so attempt {attempt.id} stops now. Two jobs can't write one trial: end the other with "
            f"`hpc-rl cancel {attempt.trial}`, or wait for it."
        )


def _is_moving(names: NameResolve, before: LeaseView) -> bool:
    """Return whether the counter or the epoch of a lease changes within its time to live."""
    end = time.monotonic() + LEASE_TTL_S + CHECK_EVERY_S
    host = before.value.get("host")
    logger.warning(
        "the previous supervisor, on %s, has not recorded its end; this supervisor checks whether it runs",
        host,
    )
    last_age_s = before.age_s
    while time.monotonic() < end:
        time.sleep(CHECK_EVERY_S / 4)
        now = names.list_leases(keys.OWNER).get(keys.OWNER)
        if now is None:
            return False
        if now.epoch != before.epoch or now.age_s < last_age_s:
            return True
        last_age_s = now.age_s
    return False


def kill_leftovers(trial: Trial) -> list[ProcessRecord]:
    """Kill the processes of earlier supervisors on this host; return the survivors. Raises OSError."""
    alive: dict[tuple[int, int], ProcessRecord] = {}
    for record in map(ProcessRecord.read, trial.attempts.glob("*/processes/*.json")):
        if record is None or record.host != socket.gethostname() or record.pid <= 1:
            continue
        pid, ticks = record.pid, record.start_ticks
        if ticks is not None and pid != os.getpid() and is_alive(pid, ticks):
            alive[pid, ticks] = record
    if alive:
        logger.warning("the supervisor waits until %d processes of earlier starts have ended", len(alive))
    return [alive[one] for one in end_processes(alive, WAIT_S, TERM_S, KILL_S)]


def find_next_incarnations(attempt: Attempt) -> dict[tuple[str, int], int]:
    """Return the first free incarnation of each unit, after all traces of earlier ones. Raises OSError."""
    taken = [
        (event.unit, event.incarnation)
        for event in load_events(attempt)
        if event.kind is EventKind.STARTED and event.incarnation is not None
    ]
    for folder in ("logs", "exits", "processes"):
        names = os.listdir(attempt.dir / folder) if (attempt.dir / folder).is_dir() else []
        files = (ProcessFile.parse(attempt.dir / folder / name) for name in names)
        taken += [((file.role, file.index), file.incarnation) for file in files if file is not None]
    following: dict[tuple[str, int], int] = {}
    for unit, incarnation in taken:
        following[unit] = max(following.get(unit, 0), incarnation + 1)
    return following
