"""Processes of this host: telling a reused pid from the old process, and ending processes without naming them.

A process is known by pid and kernel start time together; nothing here looks at names or command lines.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

POLL_S = 0.05


def start_ticks(pid: int) -> int | None:
    """Kernel start time of a process, which tells a reused pid from the old one; None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, ticks: int | None) -> bool:
    """Whether the very process that had this start time still runs."""
    return ticks is not None and start_ticks(pid) == ticks


def end_processes(
    processes: Iterable[tuple[int, int]], wait_s: float, term_s: float, kill_s: float
) -> list[tuple[int, int]]:
    """Let `(pid, start_ticks)` end by themselves for wait_s, then TERM, then KILL; returns those that are still there."""
    left = _wait(list(processes), wait_s)
    for number, patience_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
        for pid, ticks in left:
            if is_alive(pid, ticks):
                _send(pid, number)
        left = _wait(left, patience_s)
    return left


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError:  # the pid went to another user's process between the check and the signal
        return


def _wait(processes: list[tuple[int, int]], timeout_s: float) -> list[tuple[int, int]]:
    deadline = time.monotonic() + timeout_s
    while left := [one for one in processes if is_alive(*one)]:
        if time.monotonic() >= deadline:
            return left
        time.sleep(POLL_S)
    return []
