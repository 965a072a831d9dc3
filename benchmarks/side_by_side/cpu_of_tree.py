"""CPU seconds of all processes that this process started, directly or not, also of those that detach.

`adopt_orphans` makes Linux give orphans to this process instead of to init, so that none is missed.
"""

import ctypes
import os
import resource
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
ROLES = "hpc_rl.roles."  # begin of the modules of roles
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@dataclass(frozen=True)
class Process:
    parent: int
    state: str
    used_s: float  # user and system time
    reaped_s: float  # the same, of children that it reaped
    role: str  # of a trial, or ''


def measure_cpu_s(keep: int = 0) -> float:
    """Return user and system time of all descendants so far, living and reaped, in seconds.

    Reaps orphans that have ended, but not the child with the id `keep`, which its owner waits for.
    """
    found = _list_descendants()
    total_s = sum(one.used_s + one.reaped_s for one in found.values())
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    for pid, one in found.items():
        if one.state == "Z" and one.parent == os.getpid() and pid != keep:
            os.waitpid(pid, 0)
    return total_s + reaped.ru_utime + reaped.ru_stime


def measure_role_cpu_s() -> dict[str, float]:
    """Return user and system time so far of the living processes of each role below this one, in seconds."""
    used_s: dict[str, float] = {}
    for one in _list_descendants().values():
        if one.role:
            used_s[one.role] = used_s.get(one.role, 0.0) + one.used_s
    return used_s


def _list_descendants() -> dict[int, Process]:
    found = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            words = Path("/proc", entry, "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        role = next((word.removeprefix(ROLES) for word in words[:4] if word.startswith(ROLES)), "")
        used_s, reaped_s = (sum(map(int, fields[at : at + 2])) / TICKS_PER_S for at in (11, 13))
        found[int(entry)] = Process(int(fields[1]), fields[0], used_s, reaped_s, role)
    return {pid: one for pid, one in found.items() if _is_below(one, os.getpid(), found)}


def _is_below(process: Process | None, ancestor: int, known: dict[int, Process]) -> bool:
    while process is not None and process.parent != ancestor:
        process = known.get(process.parent)
    return process is not None
