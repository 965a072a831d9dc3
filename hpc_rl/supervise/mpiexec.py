"""Start the trainer by mpiexec. A separate connection ties each rank to the supervisor.

mpiexec passes its standard input to rank 0 only (Open MPI's does not even pass its end), and ends all ranks
as soon as one has exited. So each rank first connects to the supervisor (roles/control.py) and uses the
connection as standard input: lines ask it to stop or to dump its stacks, the end of the connection ends it.
After writing its exit record it reports that, and exits once all ranks have: mpiexec ends none before it has
saved.
"""

from __future__ import annotations

import hmac
import logging
import os
import shutil
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpc_rl.core import net
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.proc import is_alive
from hpc_rl.core.records import ProcessRecord
from hpc_rl.core.trial import Attempt
from hpc_rl.plan.containers import make_common_env
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.schedulers.hostlist import list_peer_hosts
from hpc_rl.supervise import processes
from hpc_rl.supervise.processes import STEPS_SCRIPT, Handle, ProcessSteps, SrunHandle, SrunSteps, Steps

logger = logging.getLogger(__name__)
STRANGER_S = 10.0  # time for a connection to show the token
MAX_LINE_BYTES = 4096


class _Rank:
    """The supervisor's end of a rank's connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._unread = b""
        self._connected_at = time.monotonic()
        self.is_known = False  # it has shown the trial's token
        self.code: int | None = None  # as reported by the rank
        self.is_gone = False

    def receive_lines(self) -> list[str]:
        """Return the complete lines received so far."""
        while not self.is_gone:
            try:
                data = self._socket.recv(4096)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._unread += data
            self.is_gone = not data or len(self._unread) > MAX_LINE_BYTES
        if not self.is_known and time.monotonic() - self._connected_at > STRANGER_S:
            self.is_gone = True
        *lines, self._unread = self._unread.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def send(self, line: str) -> None:
        # A rank that does not read is noticed when it does not stop.
        with suppress(OSError):
            self._socket.send(f"{line}\n".encode())

    def end(self) -> None:
        """Close the rank's input; the rank closes its end when it exits."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.is_gone = True
        self._socket.close()


class MpiexecHandle(SrunHandle):
    """One mpiexec, and the connections of its ranks."""

    def __init__(self, unit: Unit, log: Path, records: Path, address: str, token: str) -> None:
        super().__init__(unit.role, log, records)
        self._listener = net.bind_published(address)
        self._listener.setblocking(False)
        self.where = f"{address}:{self._listener.getsockname()[1]}"
        self._token, self._num_ranks = token, unit.num_tasks
        self._ranks: list[_Rank] = []
        self._said: list[str] = []  # lines for ranks that connect later
        self._release_at = float("inf")  # of the monotonic clock: end of the other ranks' time
        self._is_released = False

    def poll(self) -> int | None:
        """Return mpiexec's exit code once all ranks have exited too, None before."""
        self._receive()
        if time.monotonic() >= self._release_at:
            self._release()
        code = super().poll()
        if code is None:
            return None
        self._release()
        if not all(rank.is_gone for rank in self._ranks):
            if time.monotonic() < self._kill_at:
                return None
            for process in self._list_local_ranks():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.close()
        # MPICH returns the plain number of the signal that killed a rank.
        has_lost = any(rank.code is None for rank in self._ranks)
        return 128 + code if has_lost and 0 < code < signal.NSIG else code

    def send(self, line: str) -> None:
        self._said.append(line)
        for rank in self._ranks:
            if rank.is_known:
                rank.send(line)

    def dump_stacks(self) -> None:
        super().dump_stacks()  # mpiexec forwards USR1
        for process in self._list_local_ranks():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._release()
        processes.signal_task(self._tasks[0], signal.SIGTERM)

    def _receive(self) -> None:
        """Accept connections, and note exited ranks."""
        with suppress(OSError):  # none waits, or the listener is closed
            while True:
                self._ranks.append(_Rank(self._listener.accept()[0]))
        for rank in self._ranks:
            had_ended = rank.is_gone or rank.code is not None
            for line in rank.receive_lines():
                self._obey(rank, line)
            if not had_ended and (rank.is_gone or rank.code is not None) and rank.is_known:
                is_clean = rank.code in (ExitCode.DONE, ExitCode.STOPPED)
                patience_s = processes.AFTER_CLEAN_S if is_clean else processes.AFTER_FAILURE_S
                self._release_at = min(self._release_at, time.monotonic() + patience_s)
        strangers = [rank for rank in self._ranks if rank.is_gone and not rank.is_known]
        for rank in strangers:
            self._ranks.remove(rank)
            rank.close()
        if sum(rank.is_gone or rank.code is not None for rank in self._ranks) >= self._num_ranks:
            self._release()

    def _obey(self, rank: _Rank, line: str) -> None:
        word, _, code = line.partition(" ")
        if rank.is_known and word == "exited" and code.isdigit():
            rank.code = int(code)
        elif not rank.is_known and hmac.compare_digest(line.encode(), self._token.encode()):
            rank.is_known = True
            for said in self._said:
                rank.send(said)
        else:
            form = "a connection to %s is closed, because its process is no rank or sent an unknown line"
            logger.warning(form, self.where)
            rank.is_gone = True

    def _release(self) -> None:
        """Let all ranks exit; kill the rest after some seconds."""
        if not self._is_released:
            self._is_released = True
            self._release_at = float("inf")
            self._kill_at = time.monotonic() + processes.KILL_STEP_S
            self._listener.close()
            for rank in self._ranks:
                rank.end()

    def _list_local_ranks(self) -> list[ProcessRecord]:
        """Return the running ranks of this host."""
        found = filter(None, map(ProcessRecord.read, self._processes.glob(self._records)))
        host = socket.gethostname()
        return [one for one in found if one.host == host and is_alive(one.pid, one.start_ticks)]


@dataclass
class MpiexecSteps:
    """Starts MPI units by mpiexec, with the launch line in the trial's steps.sh; other units by `others`."""

    others: ProcessSteps | SrunSteps
    address: str  # of this process, for the ranks
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))  # to start from

    def start(self, unit: Unit, argv: list[str], attempt: Attempt, incarnation: int) -> Handle:
        """Start an incarnation of a unit. Raises OSError."""
        if unit.mpi is None or not unit.mpi.mpiexec:
            return self.others.start(unit, argv, attempt, incarnation)
        script = attempt.trial.scripts / STEPS_SCRIPT
        if not script.is_file():
            raise FileNotFoundError(f"{script} does not exist")
        env = self.environ | make_common_env(unit, "mpiexec") | processes.make_search_path(self.environ, unit)
        if shutil.which(unit.mpi.mpiexec, path=env.get("PATH")) is None:
            raise FileNotFoundError(f"{unit.mpi.mpiexec} is not on the PATH (launcher.mpi.mpiexec)")
        nodes = ""
        if isinstance(self.others, SrunSteps):
            nodes = ",".join(self.others.hosts[index] for index in unit.nodes)
        else:
            threads = str(self.others.count_threads(unit))
            env["OMP_NUM_THREADS"] = unit.env.get("OMP_NUM_THREADS", threads)
            name = self.others.gpu_variable
            env[name] = unit.env.get(name, self.others.choose_gpus(unit))
        log = attempt.log(unit.role, unit.index, incarnation)
        token = attempt.trial.load_tokens()["control"]
        handle = MpiexecHandle(unit, log, attempt.processes, self.address, token)
        env["HPC_RL_SUPERVISOR"] = handle.where
        step = [unit.launch_line, f"{unit.role}-{unit.index}.{incarnation}", nodes, "", "", "1"]
        # The launch line has the interpreter; bash is replaced by mpiexec.
        handle.add(["bash", str(script), *step, *argv[1:]], env, log)
        return handle


def add_mpiexec(steps: ProcessSteps | SrunSteps, plan: Plan, interface: str) -> Steps:
    """Return `steps`, with mpiexec for MPI units. Raises ConfigError if no node can reach this one."""
    if not any(unit.by_mpiexec for unit in plan.units):
        return steps
    address = net.LOOPBACK
    if isinstance(steps, SrunSteps):
        interface = interface or os.environ.get("HPC_RL_INTERFACE", "")
        address = net.choose_address(plan.n_nodes, interface, list_peer_hosts(os.environ))
    return MpiexecSteps(steps, address)
