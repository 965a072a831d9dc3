"""Holds the listening socket of a rollout role that environments talk to, and starts the role again.

Environments of atroposlib end after a few refused connections. While the role itself is away, the kernel
keeps their connections waiting on the socket that this process holds.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from hpc_rl import log, net
from hpc_rl.app.rollout import LISTENER_VARIABLE

logger = logging.getLogger(__name__)
MAX_RESTARTS = 5  # in a row; then the supervisor decides
HEALTHY_LIFE_S = 60.0


class RolloutFront:
    """The role's process, over its restarts. Signals and the supervisor's lines are passed on to it."""

    def __init__(self, arguments: list[str], listener_fd: int) -> None:
        self._argv = [sys.executable, "-m", "hpc_rl.app.rollout", *arguments]
        self._fd = listener_fd
        self._role: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Return the exit code of the role once it has ended for good."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._pass_on)
        threading.Thread(target=self._relay, daemon=True, name="supervisor-pipe").start()
        restarts = 0
        while True:
            begun = time.monotonic()
            environment = os.environ | {LISTENER_VARIABLE: str(self._fd)}
            self._role = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, env=environment, pass_fds=[self._fd]
            )
            code = self._role.wait()
            restarts = 0 if time.monotonic() - begun > HEALTHY_LIFE_S else restarts + 1
            # only a kill: what the role decides by itself is for the supervisor
            if self._stopping or code >= 0 or restarts > MAX_RESTARTS:
                return code if code >= 0 else 128 - code
            logger.warning("the rollout role was ended by signal %d; starting it again", -code)

    def _pass_on(self, number: int, _frame: object) -> None:
        self._stopping |= number != signal.SIGUSR1
        if self._role is not None:
            with contextlib.suppress(ProcessLookupError):
                self._role.send_signal(number)

    def _relay(self) -> None:
        """Pass on what the supervisor writes. Its end ends the role, and with it this process."""
        # not through sys.stdin, whose lock a thread that reads would hold at the interpreter's end
        while data := os.read(sys.stdin.fileno(), 65536):
            self._stopping |= b"stop" in data.split()
            self._write(data)
        os._exit(self._end())

    def _write(self, data: bytes) -> None:
        role = self._role
        if role is not None and role.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                role.stdin.write(data)
                role.stdin.flush()

    def _end(self) -> int:
        role = self._role
        if role is not None:
            role.kill()
        return 128 + signal.SIGKILL


def main(arguments: list[str]) -> int:
    trial_dir = Path(arguments[arguments.index("--trial_dir") + 1])
    log.setup("rollout-front")
    section = json.loads((trial_dir / "config.json").read_bytes()).get("environments") or {}
    listener = net.bind(port=section.get("port", 0))
    return RolloutFront(arguments, listener.fileno()).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
