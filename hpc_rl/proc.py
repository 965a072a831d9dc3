"""Processes of this host: resource limits, and processes that are known by pid and start time.

A process is known by pid and kernel start time together, never by name or command line.
"""

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterable
from pathlib import Path

POLL_S = 0.05
# Programs that loop over every possible descriptor become slow beyond it.
MAX_OPEN_FILES = 1 << 20


def raise_limits() -> None:
    """Raise the soft limits of open files and locked memory to the hard ones; allow no core dumps."""
    for number, most in ((resource.RLIMIT_NOFILE, MAX_OPEN_FILES), (resource.RLIMIT_MEMLOCK, None)):
        soft, hard = resource.getrlimit(number)
        wanted = hard
        if most is not None and (hard == resource.RLIM_INFINITY or hard > most):
            wanted = most
        # A container may forbid it, even up to the hard limit.
        with contextlib.suppress(OSError, ValueError):
            if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or wanted > soft):
                resource.setrlimit(number, (wanted, hard))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def start_ticks(pid: int) -> int | None:
    """Return the kernel start time of a process, in clock ticks; None where it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, ticks: int | None) -> bool:
    """Return whether the process with this start time still runs."""
    return ticks is not None and start_ticks(pid) == ticks


def end_processes(
    processes: Iterable[tuple[int, int]], wait_s: float, term_s: float, kill_s: float
) -> list[tuple[int, int]]:
    """Wait for `(pid, start_ticks)` to exit, then send TERM, then KILL; return those that still run."""
    left = _wait(list(processes), wait_s)
    for number, patience_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
        for pid, ticks in left:
            if is_alive(pid, ticks):
                # It may end meanwhile, and its pid may go to another user's process.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        left = _wait(left, patience_s)
    return left


def _wait(processes: list[tuple[int, int]], timeout_s: float) -> list[tuple[int, int]]:
    deadline = time.monotonic() + timeout_s
    while left := [one for one in processes if is_alive(*one)]:
        if time.monotonic() >= deadline:
            return left
        time.sleep(POLL_S)
    return []
