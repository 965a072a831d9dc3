"""The loop of a job script: it waits for signals, exits of children, and timers.

All signals in WATCHED are blocked from the first line of the program, and stay pending until `turn` takes
them, one at a time. So no signal interrupts anything, and none is lost.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

WATCHED = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
)
# Signals ignored by Python or by the head of the script; a program would inherit that.
DEFAULT_IN_CHILDREN = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1)
LOOK_EVERY_S = 5.0  # at children, in case their exit was not reported
KILL_AFTER_S = 10.0  # after a TERM, if a command does not end
NOT_STARTED = 127


def hold_signals() -> None:
    """Block all signals until the loop takes them. Call this before anything else."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, exits would not be reported


class Child:
    """A child process."""

    def __init__(self, pid: int, is_group: bool) -> None:
        """Describe a process; `is_group`: it leads a process group, which gets the signals."""
        self.pid, self._is_group = pid, is_group
        self.code: int | None = None  # 128 + signal of a death by signal

    def kill(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if self._is_group else os.kill)(self.pid, number)


class Timer(NamedTuple):
    """A call at a time of the monotonic clock."""

    due: float
    call: Callable[[], None]


class JobLoop:
    """Waits. `on_signal` is called for each signal, never in the middle of other work."""

    def __init__(self, on_signal: Callable[[signal.Signals], None]) -> None:
        self._on_signal = on_signal
        self._children: dict[int, tuple[Child, Callable[[], None] | None]] = {}
        self._timers: list[Timer] = []

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: int | None = None,
        errors: int | None = None,
        held: Collection[signal.Signals] = (),
        ignored: Collection[signal.Signals] = (),
        is_group: bool = False,
        on_exit: Callable[[], None] | None = None,
    ) -> Child:
        """Start a program with empty standard input. If it can't be started, the child exits with 127.

        `held` signals wait until the program unblocks them; it ignores the `ignored` signals.
        """
        pid = os.fork()
        if pid == 0:
            try:
                for number in DEFAULT_IN_CHILDREN:
                    signal.signal(number, signal.SIG_DFL)
                for number in ignored:
                    signal.signal(number, signal.SIG_IGN)
                if is_group:
                    os.setpgid(0, 0)
                null = os.open(os.devnull, os.O_RDONLY)
                for source, target in ((null, 0), (output, 1), (errors, 2)):
                    if source is not None:
                        os.dup2(source, target)
                signal.pthread_sigmask(signal.SIG_SETMASK, held)
                os.execvpe(argv[0], list(argv), {**os.environ, **(env or {})})
            except OSError as error:
                os.write(2, f"{argv[0]} can't be started: {error.strerror}\n".encode())
            finally:
                os._exit(NOT_STARTED)
        if is_group:
            with contextlib.suppress(OSError):  # whichever of the two comes first
                os.setpgid(pid, pid)
        child = Child(pid, is_group)
        self._children[pid] = (child, on_exit)
        return child

    def call_after(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Let `turn` make a call once, after some time."""
        timer = Timer(time.monotonic() + seconds, call)
        self._timers.append(timer)
        return timer

    def cancel(self, timer: Timer) -> None:
        """Drop a timer, if it is still pending."""
        self._timers = [one for one in self._timers if one is not timer]

    def turn(self) -> None:
        """Wait for the next event, and handle it."""
        now = time.monotonic()
        due_s = min([timer.due - now for timer in self._timers], default=LOOK_EVERY_S)
        came = signal.sigtimedwait(WATCHED, max(0.0, min(due_s, LOOK_EVERY_S)))
        if came is not None and came.si_signo != signal.SIGCHLD:
            self._on_signal(signal.Signals(came.si_signo))
        self._reap()
        now = time.monotonic()
        over = [timer for timer in self._timers if timer.due <= now]
        for timer in over:
            self.cancel(timer)
            timer.call()

    def take_pending(self) -> None:
        """Handle all pending signals."""
        while (came := signal.sigtimedwait(WATCHED, 0)) is not None:
            if came.si_signo != signal.SIGCHLD:
                self._on_signal(signal.Signals(came.si_signo))
        self._reap()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Take turns until a condition holds."""
        while not condition():
            self.turn()

    def sleep(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Take turns for some time, or until a condition holds."""
        passed: list[bool] = []
        timer = self.call_after(seconds, lambda: passed.append(True))
        self.wait_until(lambda: bool(passed) or is_over())
        self.cancel(timer)

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, is_disturbed: bool = True
    ) -> tuple[int, str]:
        """Return exit code and standard output of a command; kill it after its time limit.

        An undisturbed command ignores a TERM to all processes here, and reports its result.
        """
        output = os.memfd_create("output")  # a pipe would hold 64 KiB only
        ignored = () if is_disturbed else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        try:
            child = self.spawn(argv, output=output, ignored=ignored)
            timer = timeout_s and self.call_after(timeout_s, lambda: child.kill(signal.SIGKILL))
            self.wait_until(lambda: child.code is not None)
            if timer:
                self.cancel(timer)
            size = os.fstat(output).st_size
            return child.code or 0, os.pread(output, size, 0).decode(errors="replace")
        finally:
            os.close(output)

    def _reap(self) -> None:
        for child, on_exit in list(self._children.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                child.code = 128 - code if code < 0 else code
                del self._children[child.pid]
                if on_exit is not None:
                    on_exit()
