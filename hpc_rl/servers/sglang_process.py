"""A foreign server process that dies with us: started in a session of its own, tied by PR_SET_PDEATHSIG, its log in a file.

The tie is set by a few lines that the child's own interpreter runs before it becomes the server, so nothing of ours runs
between fork and exec in a process with threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

_TIE = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)\n"  # PR_SET_PDEATHSIG, SIGKILL; exec keeps it
    "if os.getppid() != int(sys.argv[1]): sys.exit('the parent has gone')\n"  # it died before the tie was set
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
)


class TiedProcess:
    """`python arguments…`, which gets SIGKILL when this process dies. Raises OSError where it can't be started.

    Start it from the main thread: the tie is to the thread that starts it.
    """

    def __init__(self, python: str, arguments: list[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
            self._process = subprocess.Popen(
                [python, "-c", _TIE, str(os.getpid()), *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> str:
        """Empty while it runs, else how it ended."""
        code = self._process.poll()
        if code is None:
            return ""
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def last_lines(self, count: int = 20) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError), self.log.open("rb") as opened:
            opened.seek(max(0, self.log.stat().st_size - 32768))
            return "\n".join(opened.read().decode(errors="replace").splitlines()[-count:])
        return ""

    async def stop(self, grace_s: float = 15.0) -> None:
        """TERM to the process, then KILL to its session."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    while self._process.poll() is None:
                        await asyncio.sleep(0.05)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
