"""Hold the listening socket of a rollout role for environments, and restart the role.

Environments of atroposlib end after a few refused connections. While the role is down, their connections
wait in the kernel, on the socket of this process. If this process is killed, its successor on this host
takes the same port.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from hpc_rl.core import (
    log,
    net,
)
from hpc_rl.core.trial import Trial, load_object, write_json
from hpc_rl.roles.rollout import LISTENER_VARIABLE

logger = logging.getLogger(__name__)
MAX_RESTARTS = 5  # in a row; after that the supervisor decides
HEALTHY_LIFE_S = 60.0
PORT_WAIT_S = 5.0  # for the previous port, until a killed role has freed it
PORT_POLL_S = 0.1


class RolloutFront:
    """The role's process and its restarts. Signals and the supervisor's lines are passed on to it."""

    def __init__(self, arguments: list[str], listener_fd: int) -> None:
        self._argv = [sys.executable, "-m", "hpc_rl.roles.rollout", *arguments]
        self._fd = listener_fd
        self._role: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Run the role until it ends for good; return its exit code."""
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
            # restart only after a kill: the supervisor handles other exits
            if self._stopping or code >= 0 or restarts > MAX_RESTARTS:
                return code if code >= 0 else 128 - code
            logger.warning("the rollout role was killed by signal %d, so it is started again", -code)

    def _pass_on(self, number: int, _frame: object) -> None:
        self._stopping |= number != signal.SIGUSR1
        if self._role is not None:
            with contextlib.suppress(ProcessLookupError):
                self._role.send_signal(number)

    def _relay(self) -> None:
        """Pass the supervisor's lines on. The end of its pipe ends the role, and then this process."""
        # not through sys.stdin: a reading thread would hold its lock at the interpreter's exit
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
    log.configure("rollout-front")
    section = json.loads((trial_dir / "config.json").read_bytes()).get("environments") or {}
    listener = listen(Trial(trial_dir), section.get("port", 0))
    return RolloutFront(arguments, listener.fileno()).run()


def listen(trial: Trial, port: int) -> socket.socket:
    """Return a socket that listens on a port; 0 picks the previous port on this host, or a free one.

    Raises OSError if the requested port is taken.
    """
    if port:
        return net.bind(port=port)
    host, last = socket.gethostname(), load_object(trial.rollout_port)
    listener = None
    if last.get("host") == host and isinstance(last.get("port"), int):
        listener = _bind_again(last["port"])
    listener = listener or net.bind()
    write_json(trial.rollout_port, {"host": host, "port": listener.getsockname()[1]})
    return listener


def _bind_again(port: int) -> socket.socket | None:
    """Return a socket that listens on a port; None if it stays taken longer than an ending role needs."""
    until_s = time.monotonic() + PORT_WAIT_S
    while True:
        try:
            return net.bind(port=port)
        except OSError as error:
            if time.monotonic() > until_s:
                logger.warning(
                    "port %d is taken (%s), so the rollout API moves; `hpc-rl env urls` shows its new URL",
                    port,
                    error,
                )
                return None
            time.sleep(PORT_POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
