"""Start the processes of a unit, as children of this process or by one srun, with one handle for all.

Every process has a pipe from the supervisor as standard input. Only the supervisor holds the other end, so
its death, of any kind, ends them all; lines in the pipe ask them to stop. Signals would not do: srun sends
them to every process of the step, including children of the role.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hpc_rl.core.errors import ConfigError, ExitCode
from hpc_rl.core.files import load_last_lines
from hpc_rl.core.proc import TiedProcess
from hpc_rl.core.records import ProcessRecord
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import Attempt
from hpc_rl.plan.containers import make_command, make_common_env, make_container_env
from hpc_rl.plan.schema import GPU_VARIABLES, Plan, Unit

logger = logging.getLogger(__name__)
AFTER_CLEAN_S = 30.0  # time for the other tasks, after one exited with 0 or 75
AFTER_FAILURE_S = 5.0  # time for peers to record their own failure
KILL_STEP_S = 10.0  # time for srun to end its step, before the client itself is killed
START_EVERY_S = 0.05  # between two starts of srun: slurmctld limits an account's requests per second
STOP, STACKS = "stop", "stacks"  # lines of the pipe; see roles/control.py
STEPS_SCRIPT = "steps.sh"  # below scripts/ of the trial
_WAITING = re.compile(r"step creation (?:temporarily|still) disabled, retrying")  # srun's message


class Handle:
    """The processes of one incarnation of a unit, which are stopped and killed together."""

    def __init__(self, role: str) -> None:
        self.children: list[ProcessRecord] = []  # started by this process
        self.launcher_log: Path | None = None  # if the launcher's reason is not in the unit's log
        self._role = role
        self._tasks: list[subprocess.Popen[bytes]] = []
        self._pipes: list[int] = []
        self._codes: dict[int, int] = {}  # by rank, in the order of the exits
        self._kill_at = float("inf")  # of the monotonic clock

    def add(
        self,
        argv: list[str],
        env: dict[str, str],
        log: Path,
        *,
        stdout: int | None = None,
        is_tied: bool = False,
    ) -> None:
        """Start a child in a new session. It writes to `log`; with `stdout`, only its errors.

        A child that `is_tied` is killed when this process dies. Raises OSError.
        """
        read_end, write_end = os.pipe()  # children inherit neither, except as standard input
        try:
            with log.open("ab") as output:
                if is_tied:
                    task: subprocess.Popen[bytes] = TiedProcess(argv, env, output, read_end)
                else:
                    out = output if stdout is None else stdout
                    task = subprocess.Popen(
                        argv, env=env, stdin=read_end, stdout=out, stderr=output, start_new_session=True
                    )
        except OSError:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        os.set_blocking(write_end, False)
        self.children.append(ProcessRecord.of(self._role, task.pid, rank=len(self._tasks)))
        self._tasks.append(task)
        self._pipes.append(write_end)

    def poll(self) -> int | None:
        """Return the launcher's code, None while a process runs. Call it often: it kills stragglers."""
        for rank, task in enumerate(self._tasks):
            if rank not in self._codes and (code := _reap(task)) is not None:
                self._codes[rank] = code
                patience_s = AFTER_CLEAN_S if code in (ExitCode.DONE, ExitCode.STOPPED) else AFTER_FAILURE_S
                self._kill_at = min(self._kill_at, time.monotonic() + patience_s)
        if len(self._codes) == len(self._tasks):
            self.hang_up()
            return next((code for code in self._codes.values() if code), 0)
        if time.monotonic() >= self._kill_at:
            self._kill_groups()
        return None

    def hang_up(self) -> None:
        """Close the pipes: every process connected to its srun exits, even if Slurm does not answer."""
        while self._pipes:
            os.close(self._pipes.pop())

    def dump_stacks(self) -> None:
        """Let every process dump its stacks, even if it is stuck or stopped."""
        # Only the tasks: their children may not expect the signal. A stopped task must run to handle it.
        for task in self._tasks:
            signal_task(task, signal.SIGUSR1)
            signal_task(task, signal.SIGCONT)

    def kill(self) -> None:
        """Kill all processes; `poll` returns a code once they are gone."""
        self._kill_groups()

    def _kill_groups(self) -> None:
        for rank, task in enumerate(self._tasks):
            if rank not in self._codes:
                _kill_group(task.pid)

    def send(self, line: str) -> None:
        """Send a line to every process."""
        for pipe in self._pipes:
            # A process that does not read its pipe is noticed when it does not stop.
            with suppress(BrokenPipeError, BlockingIOError):
                os.write(pipe, f"{line}\n".encode())

    def explain_unplaced(self) -> str:
        """Return the scheduler's message while it does not start the processes; else ""."""
        return ""


def make_search_path(environ: dict[str, str], unit: Unit) -> dict[str, str]:
    """Return the PYTHONPATH of a unit: the code of the submission, then its own."""
    paths = [path for path in (environ.get("PYTHONPATH"), unit.env.get("PYTHONPATH")) if path]
    return {"PYTHONPATH": ":".join(paths)} if paths else {}


@dataclass
class ProcessSteps:
    """Children of this process, each in a new session and process group."""

    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))  # to start from
    gpu_variable: str = GPU_VARIABLES["nvidia"]
    num_computing: int = 1  # processes that compute on this machine, of which each gets a share of the CPUs

    def count_threads(self, unit: Unit) -> int:
        """Return the OMP_NUM_THREADS of a unit's processes, so that no two of them share a CPU.

        Threads of OpenMP that wait for each other spin, so with more threads than CPUs small products take
        twice the time.
        """
        return max(1, min(unit.cpus_per_task, (os.cpu_count() or 1) // self.num_computing))

    def start(self, unit: Unit, argv: list[str], attempt: Attempt, incarnation: int) -> Handle:
        """Start an incarnation of a unit. Raises OSError."""
        own = {
            self.gpu_variable: self.choose_gpus(unit),
            "OMP_NUM_THREADS": str(self.count_threads(unit)),
        }
        env = (
            self.environ
            | make_common_env(unit, "process")
            | own
            | unit.env
            | make_search_path(self.environ, unit)
        )
        env = make_container_env(unit, env, "process", attempt.trial.dir, Path.cwd())
        interpreter, *arguments = argv
        program = make_command(unit, interpreter, attempt.trial.dir, Path.cwd()).program
        argv = [*(word for line in program for word in line), *arguments]
        handle = Handle(unit.role)
        for rank in range(unit.num_tasks):
            log = attempt.log(unit.role, unit.index, incarnation, rank if unit.num_tasks > 1 else None)
            try:
                handle.add(argv, {**env, "HPC_RL_RANK": str(rank)}, log)
            except OSError:
                handle.kill()
                handle.poll()
                raise
        return handle

    def choose_gpus(self, unit: Unit) -> str:
        """Return the GPUs of a unit, as names in the variable. Raises ConfigError if there are too few."""
        count = unit.gpus_per_task * unit.tasks_per_node
        visible = [gpu for gpu in self.environ.get(self.gpu_variable, "").split(",") if gpu]
        if visible and unit.gpu_offset + count > len(visible):
            wanted = f"GPUs {unit.gpu_offset} to {unit.gpu_offset + count - 1} of this machine"
            why = f": {unit.role} {unit.index} needs the {wanted}, but the number in {self.gpu_variable} is "
            why += str(len(visible))
            use = "lower it, or make more GPUs visible"
            option = "cluster.n_gpus_per_node"
            raise ConfigError(Refusal(option=option, kind=Kind.MACHINE, why=why, use=use))
        ids = visible or [str(number) for number in range(unit.gpu_offset + count)]
        return ",".join(ids[unit.gpu_offset : unit.gpu_offset + count])


def _reap(task: subprocess.Popen[bytes]) -> int | None:
    """Return the code of an exited child, and kill the rest of its group; None if it runs."""
    # While the zombie exists, no other group can get its number.
    if task.returncode is not None:
        return task.returncode
    if os.waitid(os.P_PID, task.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
    _kill_group(task.pid)
    return task.wait()


def signal_task(task: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a child that was not reaped."""
    # Not by Popen.send_signal: that may reap the child, and then its group is not killed.
    if task.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(task.pid, number)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@dataclass
class SrunSteps:
    """One srun per unit, by the launch line of its role in the trial's steps.sh."""

    hosts: list[str]  # node names of the job, in Slurm's order
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))  # to start from
    components: list[int] | None = None  # for a heterogeneous job: the component of each host
    _next_start_at: float = 0.0  # of the monotonic clock

    def start(self, unit: Unit, argv: list[str], attempt: Attempt, incarnation: int) -> Handle:
        """Start an incarnation of a unit. Raises OSError."""
        log = attempt.log(unit.role, unit.index, incarnation)
        handle = SrunHandle(unit.role, log, attempt.processes)
        self.launch(handle, unit, argv, attempt, log)
        return handle

    def launch(
        self,
        handle: Handle,
        unit: Unit,
        argv: list[str],
        attempt: Attempt,
        log: Path,
        *,
        num_replicas: int = 1,
        stdout: int | None = None,
    ) -> None:
        """Start the srun of a unit, or of the agent for several units on its node. Raises OSError."""
        env = self.environ | make_common_env(unit, "srun") | make_search_path(self.environ, unit)
        env = make_container_env(unit, env, "srun", attempt.trial.dir, Path.cwd())
        script = attempt.trial.scripts / STEPS_SCRIPT
        if not script.is_file():
            raise FileNotFoundError(f"{script} does not exist")
        if shutil.which("srun", path=env.get("PATH")) is None:
            raise FileNotFoundError("srun is not on the PATH")
        component = "" if self.components is None else str(self.components[unit.nodes[0]])
        step = [
            unit.launch_line,
            log.stem,
            ",".join(self.hosts[index] for index in unit.nodes),
            str(log.parent).replace("%", "%%") + f"/{log.stem}-rank%t.log",
            component,
            str(num_replicas),
        ]
        # The launch line has the interpreter; srun replaces bash, so that the handle's process is srun.
        command = ["bash", str(script), *step, *argv[1:]]
        time.sleep(max(0.0, self._next_start_at - time.monotonic()))
        logger.info("%s is started: %s", log.stem, " ".join(command))
        handle.add(command, env, log, stdout=stdout)
        self._next_start_at = time.monotonic() + START_EVERY_S


class SrunHandle(Handle):
    """One srun client; Slurm runs the tasks."""

    def __init__(self, role: str, log: Path, processes: Path) -> None:
        super().__init__(role)
        self.log, self._processes, self._records = log, processes, f"{log.stem}-rank*.json"

    def explain_unplaced(self) -> str:
        # A job that lost a node may wait for ever: Slurm 22.05 does not free resources of its earlier steps.
        last = "".join(load_last_lines(self.log, 1)).strip()
        return last if _WAITING.search(last) and not any(self._processes.glob(self._records)) else ""

    def dump_stacks(self) -> None:
        # srun forwards USR1 to its tasks, but not the CONT that stopped tasks need.
        signal_task(self._tasks[0], signal.SIGUSR1)
        if step := next(filter(None, map(self._find_step, self._processes.glob(self._records))), ""):
            self._scancel = subprocess.Popen(["scancel", "--signal=CONT", step], stdin=subprocess.DEVNULL)

    def _find_step(self, record: Path) -> str:
        """Return `<job>.<step>` from the record of a task; Slurm tells only the tasks."""
        process, job_id = ProcessRecord.read(record), os.environ.get("SLURM_JOB_ID")
        return f"{job_id}.{process.step}" if process and process.step.isdigit() and job_id else ""

    def kill(self) -> None:
        """Let srun kill its step; if it fails, the client is killed later, which closes the pipe."""
        if self._kill_at == float("inf"):
            self._kill_at = time.monotonic() + KILL_STEP_S
            signal_task(self._tasks[0], signal.SIGTERM)


class Steps(Protocol):
    """A way to start units."""

    def start(self, unit: Unit, argv: list[str], attempt: Attempt, incarnation: int) -> Handle:
        """Start an incarnation of a unit. Raises OSError."""
        ...


def describe_unplaced(unit: Unit, plan: Plan, said: str) -> str:
    """Explain why a step may not fit on its nodes: each step gets whole cores of its job."""
    num_cpus = sum(one.tasks_per_node * one.cpus_per_task for one in plan.list_step_units(unit))
    return (
        f"Slurm starts no step of {unit.role} {unit.index} on its nodes ({said}): the step needs "
        f"{num_cpus} CPUs per node in whole cores; the plan requests {plan.cpus_per_node} CPUs per node and "
        f"assumes {plan.threads_per_core} threads per core (compare ThreadsPerCore of scontrol show node)"
    )
