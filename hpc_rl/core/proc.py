"""Processes of this host: start commands that end with this process, and identify other processes.

A process is known by pid and kernel start time together, never by name or command line.
"""

import contextlib
import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

POLL_S = 0.05
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt


# Becomes the command, and leaves a watch in its session. PR_SET_PDEATHSIG alone is not enough: it does not
# cover the children of the command, and a setuid program (apptainer may be one) loses it. Once the command
# has ended, the watch kills the session. After a TERM to the whole session, the other processes first get
# time to end by themselves.
_TIE = """
import ctypes, os, signal, sys, time
parent, main = int(sys.argv[1]), os.getpid()
def stat(pid):
    try:
        with open('/proc/%%s/stat' %% pid) as file:
            return file.read().rpartition(')')[2].split()
    except OSError:
        return ['X', '0', '0', '0']
def others():
    for pid in os.listdir('/proc'):
        if pid.isdigit() and int(pid) != os.getpid():
            fields = stat(pid)
            if int(fields[3]) == main and fields[0] not in 'ZX':
                return True
    return False
if os.fork() == 0:
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
    while os.getppid() == main and int(stat(main)[1]) == parent:
        time.sleep(0.05 if asked else 0.5)
    while asked and time.monotonic() < asked[0] + %(grace_s)d and stat(parent)[0] not in 'ZX' and others():
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)
ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL; exec keeps it
if os.getppid() != parent:  # it died before the tie was set
    sys.exit('the parent has gone')
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and exec would keep that
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print("%%r can't be started: %%s" %% (sys.argv[2], error), file=sys.stderr)
    sys.exit(127)
"""
# the longest time that a session gets after the end of its first process
SESSION_GRACE_S = 60


class TiedProcess(subprocess.Popen[bytes]):
    """A command in a new session, killed when the thread that started it dies: use the main thread.

    When the command ends, the processes that it started are killed. It reads `stdin` (default: empty) and
    writes to `output`. A command that can't be started prints the reason and exits with 127.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        output: int | IO[bytes],
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        super().__init__(
            [sys.executable, "-I", "-S", "-c", _TIE % {"grace_s": SESSION_GRACE_S}, str(os.getpid()), *argv],
            env=env,
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def exit_status(self) -> str:
        """Return how the command ended; an empty text while it runs."""
        code = self.poll()
        if code is None:
            return ""
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def end(self, grace_s: float, whole_session: bool = False) -> None:
        """Send TERM to the command, or to its whole session, and wait; then send KILL to the session."""
        if self.poll() is None:
            deadline = time.monotonic() + grace_s
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if whole_session else os.kill)(self.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(grace_s)
            while whole_session and time.monotonic() < deadline and self._has_session():
                time.sleep(POLL_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def _has_session(self) -> bool:
        """Return whether a process of the session still runs. Its watch runs until the others have ended."""
        fields = (_load_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
        return any(stat is not None and int(stat[3]) == self.pid for stat in fields)


def keep_freed_memory() -> None:
    """Let this process keep up to 256 MiB of freed memory, where the C library is glibc.

    Each step frees its tensors, and with glibc's defaults returns their pages to the system and gets them
    again, which takes up to a tenth of a small model's step. `trim_memory` returns them.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc accepts
        libc.mallopt(M_TRIM_THRESHOLD, 256 << 20)


def trim_memory() -> None:
    """Return the freed memory of this process to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def count_oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for memory in this process's cgroup; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            mount, file = {"": ("", "memory.events"), "memory": ("memory", "memory.oom_control")}.get(
                kinds, ("", "")
            )
            with contextlib.suppress(OSError):
                counts = (root / "sys/fs/cgroup" / mount / path.lstrip("/") / file).read_text()
                if found := re.search(r"^oom_kill (\d+)$", counts, re.MULTILINE):
                    return int(found[1])
    return 0


def _load_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None if the process has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


def find_start_ticks(pid: int) -> int | None:
    """Return the kernel start time of a process, in clock ticks; None if it has ended or is a zombie."""
    fields = _load_stat(pid)
    return None if fields is None else int(fields[19])


def is_alive(pid: int, ticks: int | None) -> bool:
    """Return whether the process with this start time still runs."""
    return ticks is not None and find_start_ticks(pid) == ticks


def end_processes(
    processes: Iterable[tuple[int, int]], wait_s: float, term_s: float, kill_s: float
) -> list[tuple[int, int]]:
    """Wait for `(pid, start_ticks)` to exit, then send TERM, then KILL; return the ones that still run."""
    left = _wait(list(processes), wait_s)
    for number, patience_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
        for pid, ticks in left:
            if is_alive(pid, ticks):
                # The process may end meanwhile, and another user's process may get its pid.
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
