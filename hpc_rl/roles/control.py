"""What reaches a role process from outside: lines through the supervisor's pipe, and signals.

Lines: `stop` (save and exit), `ends_in <seconds>` (the attempt is stopped then), `stacks`
(dump the stacks of all threads), `unit …` (to the agent of a node, see node_agent.py). End of the pipe: the
supervisor is gone, exit at once. Signals: TERM and USR2 are `stop`, a later TERM ends the process, USR1 is
`stacks` and works whatever the interpreter is stuck in.
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
LEAVE_S = 120.0  # longer than the supervisor waits for the other ranks
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
}  # seconds, seconds, times
SAME_TERM_S = 2.0  # a scheduler's TERM may come twice, through the launcher too


exit_code: int | None = None  # of this process, once it has done its work
# What the supervisor asks a node's agent about its units: index, incarnation, word, value.
about_units: queue.SimpleQueue[list[str]] = queue.SimpleQueue()


class Deadline:
    """When the attempt will be stopped, by this process's monotonic clock; None where that is not known."""

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
            logger.warning("no stacks can be written: %s", error)

    def dump(self) -> None:
        if self._file is not None:
            faulthandler.dump_traceback(file=self._file, all_threads=True)

    def close(self) -> None:
        """Remove the file where it is empty."""
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
        if os.getpid() == owner:  # a child that was forked inherits this
            stopping.set()

    def forget() -> None:
        signal.set_wakeup_fd(-1)  # Slurm signals every process of a step: what a child gets is not ours

    threading.Thread(target=count, daemon=True, name="signals").start()
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=forget)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGUSR2, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles a Ctrl-C


def connect(where: str, token: str) -> None:
    """Make a connection to the supervisor the standard input, which mpiexec hands to rank 0 only.

    Raises OSError.
    """
    host, _, port = where.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=CONNECT_S) as connection:
        connection.settimeout(None)
        # The node of the supervisor may go without a word.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.sendall(f"{token}\n".encode())
        os.dup2(connection.fileno(), 0)


def leave(code: int) -> None:
    """Tell the supervisor at the other end that this process is done, and exit when the others are.

    mpiexec ends all ranks as soon as one has exited.
    """
    global exit_code
    exit_code = code
    with contextlib.suppress(OSError):
        os.write(0, f"exited {code}\n".encode())
        time.sleep(LEAVE_S)  # listen ends the process


def listen(stopping: threading.Event, deadline: Deadline, stacks: Stacks) -> None:
    """Obey the supervisor's lines on standard input until its pipe closes; then end the process."""
    left = b""
    # Not by signals: those would also reach the children, which don't expect them.
    while data := _read():
        *lines, left = (left + data).split(b"\n")
        for line in lines:
            obey(line.decode(errors="replace").split(), stopping, deadline, stacks)
    if exit_code is None:
        logger.error("the supervisor's pipe closed: exiting at once")
    os._exit(ExitCode.KILLED_BY_SYSTEM if exit_code is None else exit_code)


def _read() -> bytes:
    try:
        return os.read(0, 4096)
    except OSError:  # of a connection that was reset
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
            logger.warning("unknown control message from the supervisor: %s", line)
