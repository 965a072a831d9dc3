"""Processes of this host: resource limits, commands that end with this process, and what another one is.

A process is known by pid and kernel start time together, never by name or command line.
"""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

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


# Becomes the command. Sets a watch beside it, which the kernel's own tie needs: what the command started does
# not always end with it, and a program with rights of its own (apptainer may be one) loses the tie.
_TIE = """
import ctypes, os, signal, sys, time
parent, main = int(sys.argv[1]), os.getpid()
def is_child():
    try:
        with open('/proc/%d/stat' % main) as file:
            return int(file.read().rpartition(')')[2].split()[1]) == parent
    except OSError:
        return True
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while os.getppid() == main and is_child():
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)
ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL; exec keeps it
if os.getppid() != parent:  # it died before the tie was set
    sys.exit('the parent has gone')
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and exec would keep that
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print("%r can't be started: %s" % (sys.argv[2], error), file=sys.stderr)
    sys.exit(127)
"""


class TiedProcess(subprocess.Popen[bytes]):
    """A command with a session of its own, killed when the thread that starts it dies: use the main thread.

    What the command started is killed when it ends. It reads `stdin`, by default nothing; what it writes goes
    to `output`. One that can't be started exits with 127, and says why.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        output: int | IO[bytes],
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        super().__init__(
            [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *argv],
            env=env,
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def exit_status(self) -> str:
        """Empty while it runs, else how it ended."""
        code = self.poll()
        if code is None:
            return ""
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def end(self, grace_s: float, whole_session: bool = False) -> None:
        """TERM to the command, or to its whole session; then KILL to the session. Waits for the command."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if whole_session else os.kill)(self.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for memory in this process's cgroup; 0 if not known."""
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
