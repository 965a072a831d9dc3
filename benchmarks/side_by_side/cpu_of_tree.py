"""CPU seconds of all processes that this process started, directly or not, also of those that detach.

`adopt_orphans` makes Linux give orphans to this process instead of to init, so that none is missed.
"""

import ctypes
import os
import resource
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def measure_cpu_s(keep: int = 0) -> float:
    """Return user and system time of all descendants so far, living and reaped, in seconds.

    Reaps orphans that have ended, but not the child with the id `keep`, which its owner waits for.
    """
    parents, used_s, states = {}, {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            fields = stat.rpartition(")")[2].split()
            pid = int(entry)
            states[pid], parents[pid] = fields[0], int(fields[1])
            used_s[pid] = (
                sum(map(int, fields[11:15])) / TICKS_PER_S
            )  # its own, and of children that it reaped
    own = os.getpid()
    total_s = sum(used for pid, used in used_s.items() if pid != own and _is_below(pid, own, parents))
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    for pid, state in states.items():
        if state == "Z" and parents[pid] == own and pid != keep:
            os.waitpid(pid, 0)
    return total_s + reaped.ru_utime + reaped.ru_stime


def _is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False
