"""Control of a role process: lines through the supervisor's pipe, and signals.

Lines: `stop` (save and exit), `ends_in <seconds>` (time until the attempt is stopped), `stacks` (dump the
stacks of all threads), `unit …` (to the agent of a node, see node_agent.py). End of the pipe: the supervisor
is gone, exit at once. Signals: TERM and USR2 mean `stop`, a later TERM ends the process, USR1 means `stacks`
and works even if the interpreter is stuck.
"""

import contextlib
import faulthandler
import logging
import os
import queue
import signal
import socket
import threading
import time
from pathlib import Path
from typing import IO

from hpc_rl.core.errors import ExitCode

logger = logging.getLogger(__name__)
CONNECT_S = 60.0
LEAVE_S = 120.0  # more than the supervisor's wait for the other ranks
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
}  # seconds, seconds, times
SAME_TERM_S = 2.0  # a scheduler's TERM may come twice, through the launcher too


exit_code: int | None = None  # of this process, after its work
# Requests of the supervisor to a node's agent: index, incarnation, word, value.
about_units: queue.SimpleQueue[list[str]] = queue.SimpleQueue()


class Deadline:
    """Time at which the attempt will be stopped, by this process's monotonic clock; None if unknown."""

    def __init__(self) -> None:
        self.at: float | None = None

    @property
    def left_s(self) -> float | None:
        return None if self.at is None else self.at - time.monotonic()


class Stacks:
    """The file for the stacks of a process. USR1 writes it from C, even while the GIL is held."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        if path is not None:
            self.open(path)

    def open(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(exist_ok=True)
            file = self._file = path.open("ab", buffering=0)
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        except OSError as error:  # a full disk must not keep a role from starting
            logger.warning(
                "this process can't write its Python stacks, which would help to debug a hang: %s", error
            )

    def dump(self) -> None:
        if self._file is not None:
            faulthandler.dump_traceback(file=self._file, all_threads=True)

    def close(self) -> None:
        """Remove the file if it is empty."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            if self._path.stat().st_size == 0:
                self._path.unlink()


def obey_signals(stopping: threading.Event) -> None:
    """Set `stopping` on TERM and USR2; a TERM more than SAME_TERM_S after the first ends the process."""
    # A thread counts the TERMs: while the main thread is in a collective, Python's own handlers don't run.
    owner = os.getpid()
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(read_end, True)

    def count() -> None:
        first: float | None = None
        while numbers := os.read(read_end, 64):
            if {signal.SIGTERM, signal.SIGUSR2} & set(numbers):
                stopping.set()
            if signal.SIGTERM in numbers:
                first = first or time.monotonic()
                if time.monotonic() - first > SAME_TERM_S:
                    os._exit(ExitCode.KILLED_BY_SYSTEM)

    def on_signal(_number: int, _frame: object) -> None:
        if os.getpid() == owner:  # a forked child inherits this
            stopping.set()

    def forget() -> None:
        signal.set_wakeup_fd(-1)  # Slurm signals every process of a step: ignore signals to children

    threading.Thread(target=count, daemon=True, name="signals").start()
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=forget)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGUSR2, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles a Ctrl-C


def connect(where: str, token: str) -> None:
    """Use a connection to the supervisor as standard input: mpiexec passes its own to rank 0 only.

    Raises OSError.
    """
    host, _, port = where.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=CONNECT_S) as connection:
        connection.settimeout(None)
        # The node of the supervisor may vanish without closing the connection.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.sendall(f"{token}\n".encode())
        os.dup2(connection.fileno(), 0)


def leave(code: int) -> None:
    """Tell the supervisor that this process is done, and exit when all ranks are.

    mpiexec ends all ranks as soon as one has exited.
    """
    global exit_code
    exit_code = code
    with contextlib.suppress(OSError):
        os.write(0, f"exited {code}\n".encode())
        time.sleep(LEAVE_S)  # listen ends the process


def listen(stopping: threading.Event, deadline: Deadline, stacks: Stacks) -> None:
    """Execute the supervisor's lines from standard input until its pipe closes; then end the process."""
    left = b""
    # Lines, not signals: signals would also reach the children, which don't expect them.
    while data := _receive():
        *lines, left = (left + data).split(b"\n")
        for line in lines:
            obey(line.decode(errors="replace").split(), stopping, deadline, stacks)
    if exit_code is None:
        logger.error("the supervisor has ended, so this process stops immediately")
    os._exit(ExitCode.KILLED_BY_SYSTEM if exit_code is None else exit_code)


def _receive() -> bytes:
    try:
        return os.read(0, 4096)
    except OSError:  # connection reset
        return b""


def obey(line: list[str], stopping: threading.Event, deadline: Deadline, stacks: Stacks) -> None:
    match line:
        case ["stop"]:
            stopping.set()
        case ["stacks"]:
            stacks.dump()
        case ["ends_in", seconds]:
            deadline.at = time.monotonic() + float(seconds)
        case ["unit", *words]:
            about_units.put(words)
        case _:
            logger.warning("the supervisor sent an unknown message, which is ignored: %s", line)
