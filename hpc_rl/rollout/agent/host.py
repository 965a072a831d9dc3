"""The process that starts the agents of one executor worker: each episode is a separate process.

    python -m hpc_rl.rollout.agent.host FD [package.module:name]

It imports an agent function once, and forks for each episode, so that hundreds of episodes start fast and
share their memory. FD is a socket to the worker. A start is `{"id"}` with two file descriptors: the exchange
file, which holds `{"argv", "environment", "row", "options"}` as JSON, and the pipe for the agent's output.
`{"id", "stop": true}` ends an episode. The answer to each start is `{"id", "code"}`; a function leaves its
result in the exchange file. Messages are lines of JSON.

Between this process and each agent is a keeper, which kills all processes of its agent when that ends.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any, NoReturn

from hpc_rl.rollout.agent.functions import AgentFunction
from hpc_rl.sandbox import launcher

NO_PROGRAM = 127  # exit code of a command that can't be started, as of a shell
STOPPED = 128 + signal.SIGTERM
WAITED_FOR = {signal.SIGCHLD, signal.SIGTERM}


def main() -> int:
    connection = socket.socket(fileno=int(sys.argv[1]))
    launcher.prctl(launcher.PR_SET_PDEATHSIG, signal.SIGTERM)
    # no logging of ours: agents would inherit it
    try:
        function = AgentFunction(sys.argv[2]) if sys.argv[2:] else None
    except Exception as error:  # whatever the user's module raises
        _send(connection, {"error": str(error) or type(error).__name__})
        return 1
    _send(connection, {"ready": True})
    Host(connection, function).run()
    return 0


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


class Host:
    """Starts and ends episodes until the worker is gone."""

    def __init__(self, connection: socket.socket, function: AgentFunction | None) -> None:
        self._connection, self._function = connection, function
        self._keepers: dict[int, int] = {}  # id of the episode -> its keeper's process
        self._pid = os.getpid()
        self._received = b""
        self._fds: list[int] = []

    def run(self) -> None:
        wake_read, wake_write = socket.socketpair()
        for end in (wake_read, wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        stopping: list[bool] = []
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, lambda _number, _frame: stopping.append(True))
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while not stopping:
            for key, _ in selector.select():
                if key.fileobj is self._connection and not self._receive():
                    stopping.append(True)
                elif key.fileobj is wake_read:
                    with contextlib.suppress(BlockingIOError):
                        wake_read.recv(4096)
            self._reap()
        for keeper in self._keepers.values():
            os.kill(keeper, signal.SIGTERM)
        while self._keepers:
            pid, _ = os.wait()
            self._forget(pid)

    def _receive(self) -> bool:
        """Handle messages of the worker; return False once it is gone."""
        try:
            data, fds, *_ = socket.recv_fds(self._connection, 1 << 16, 64)
        except ConnectionError:
            return False
        self._fds += fds
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "stop" not in message:
                self._start(message["id"])
            elif message["id"] in self._keepers:
                os.kill(self._keepers[message["id"]], signal.SIGTERM)
        return bool(data)

    def _start(self, number: int) -> None:
        exchange, output = self._fds[:2]
        del self._fds[:2]
        # signals stay pending until the keeper waits for them
        before = signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
        try:
            keeper = os.fork()
        except OSError as error:
            os.write(output, f"the agent can't be started: {error}\n".encode())
            _send(self._connection, {"id": number, "code": NO_PROGRAM})
            keeper = -1
        if keeper == 0:
            self._become_keeper(exchange, output)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(exchange)
        os.close(output)
        if keeper > 0:
            self._keepers[number] = keeper

    def _become_keeper(self, exchange: int, output: int) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            code = keep_agent(self._function, exchange, output, self._pid)
        except BaseException as error:  # of a machine without room: the episode is lost, not this process
            os.write(output, f"the agent can't be started: {error}\n".encode())
            code = NO_PROGRAM
        os._exit(code)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                number = self._forget(pid)
                with contextlib.suppress(OSError):  # the worker is gone
                    _send(self._connection, {"id": number, "code": launcher.get_exit_code(status)})

    def _forget(self, pid: int) -> int:
        number = next(number for number, keeper in self._keepers.items() if keeper == pid)
        del self._keepers[number]
        return number


def keep_agent(function: AgentFunction | None, exchange: int, output: int, parent: int) -> int:
    """Run an agent; return its exit code once none of its processes is left.

    This process is a child of `parent`, and does not outlive it.
    """
    launcher.prctl(launcher.PR_SET_PDEATHSIG, signal.SIGTERM)
    launcher.prctl(launcher.PR_SET_CHILD_SUBREAPER)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    agent = os.fork()
    if agent == 0:
        become_agent(function, exchange, output)
    code = None
    while code is None:
        gone = os.getppid() != parent  # before this process asked for a signal
        if gone or signal.sigwait(WAITED_FOR) == signal.SIGTERM:
            code = STOPPED
        pid, status = os.waitpid(agent, os.WNOHANG)
        if pid and code is None:
            code = launcher.get_exit_code(status)
    launcher.end_all(proc, os.getpid())
    return code


def become_agent(function: AgentFunction | None, exchange: int, output: int) -> NoReturn:
    """Become the agent: a new session, with its row on standard input; never returns."""
    code = NO_PROGRAM
    try:
        os.setsid()
        for number in WAITED_FOR:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        launcher.prctl(launcher.PR_SET_PDEATHSIG, signal.SIGKILL)
        own = 10  # beyond the three standard ones
        for fd in (1, 2):
            os.dup2(output, fd)
        os.dup2(exchange, own, inheritable=False)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(3, own)
        os.closerange(own + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        with os.fdopen(own, "r+", encoding="utf-8", closefd=False) as file:
            work = json.load(file)
        os.environ.clear()
        os.environ.update(work["environment"])
        if function is None:
            _replace(own, json.dumps(work["row"], ensure_ascii=False, default=str))
            os.dup2(own, 0)
            os.execvpe(work["argv"][0], work["argv"], os.environ)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        if "numpy" in sys.modules:  # its generator would be in the same state in each episode
            sys.modules["numpy"].random.seed()
        _replace(own, function.call(work["row"], work["options"]))
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    except OSError as error:
        os.write(2, f"the agent can't be started: {error}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def _replace(fd: int, text: str) -> None:
    """Write a text in place of the content of a file, and go back to its beginning."""
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    data = memoryview(text.encode(errors="replace"))
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)


if __name__ == "__main__":
    sys.exit(main())
