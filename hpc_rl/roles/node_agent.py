"""The agent of a node: start, watch and end the replicas of one role there, all in one Slurm step.

The supervisor decides. It sends lines `unit <index> <incarnation> <word>` by standard input: `start`, `kill`,
`stacks` (by a signal), and `send <line>` for the replica's input. The agent answers by standard output:
`exited <index> <incarnation> <code>`. Each replica has its own log and a part of the step's GPUs and CPUs.
All replicas end with the agent.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_rl.core.errors import ConfigError, ExitCode, FailureClass
from hpc_rl.core.proc import count_oom_kills
from hpc_rl.core.records import ExitRecord
from hpc_rl.core.trial import write_json
from hpc_rl.plan.schema import GPU_VARIABLES, Unit
from hpc_rl.roles import (
    control,
    role,
)
from hpc_rl.supervise.agents import make_agent_name
from hpc_rl.supervise.failure_policy import KILLED
from hpc_rl.supervise.processes import STOP, Handle

logger = logging.getLogger(__name__)
POLL_S = 0.1
# Slurm sets some of these, to all GPUs of the step.
OF_STEP = (*GPU_VARIABLES.values(), "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
TOPOLOGY = Path("/sys/devices/system/cpu")


def select_gpus(
    step: Sequence[Unit], unit: Unit, environ: Mapping[str, str], variable: str
) -> dict[str, str]:
    """Return the environment of a replica: `variable` lists its part of the step's GPUs.

    Other GPU variables are removed: each of AMD's selects among the GPUs that another leaves visible.
    Raises ConfigError if the step has too few GPUs for its replicas.
    """
    others = {name: value for name, value in environ.items() if name not in OF_STEP}
    if variable in unit.env:
        return {**others, variable: unit.env[variable]}
    if not unit.gpus_per_task:
        return dict(environ)
    before, total = step.index(unit), sum(one.gpus_per_task for one in step)
    first = sum(one.gpus_per_task for one in step[:before])
    name = next((name for name in (variable, *OF_STEP) if environ.get(name)), "")
    gpus = environ[name].split(",") if name else [str(number) for number in range(total)]
    if len(gpus) < total:
        raise ConfigError(
            f"the servers of node {socket.gethostname()} need {total} GPUs, but {name} is {','.join(gpus)}"
        )
    return {**others, variable: ",".join(gpus[first : first + unit.gpus_per_task])}


def select_cpus(step: Sequence[Unit], unit: Unit, cpus: Sequence[int]) -> set[int]:
    """Return a replica's part of the CPUs of its step, which are in order of cores; empty if unbound.

    A step counts as unbound if it may use more CPUs than Slurm gave it, or fewer than its replicas need.
    """
    total = sum(one.cpus_per_task for one in step)
    of_step = os.environ.get("SLURM_CPUS_ON_NODE", "")
    if not of_step.isdecimal() or not total <= len(cpus) <= int(of_step):
        return set()
    first = sum(one.cpus_per_task for one in step[: step.index(unit)])
    return set(cpus[first : first + unit.cpus_per_task])


def sort_by_core(cpus: set[int], topology: Path = TOPOLOGY) -> list[int]:
    """Sort CPUs by socket and core, so that the threads of a core are adjacent."""

    def place(cpu: int) -> tuple[int, int, int]:
        folder = topology / f"cpu{cpu}" / "topology"
        try:
            socket = int((folder / "physical_package_id").read_text())
            # the first CPU of its core identifies it: core numbers repeat on other dies
            first = int(re.split("[,-]", (folder / "thread_siblings_list").read_text())[0])
        except (OSError, ValueError):
            return 0, cpu, cpu
        return socket, first, cpu

    return sorted(cpus, key=place)


class Replicas:
    """The replicas of one role on this node."""

    def __init__(self, context: role.Context, name: str) -> None:
        self._attempt = context.attempt
        own = next(one for one in context.plan.units if (one.role, one.index) == (name, context.index))
        self._step = context.plan.list_step_units(own)
        self._gpu_variable = context.plan.gpu_variable
        self._all_cpus = os.sched_getaffinity(0)
        self._cores = sort_by_core(self._all_cpus)
        self._running: dict[tuple[int, int], Handle] = {}  # by index and incarnation
        self._oom_kills = count_oom_kills()

    def __bool__(self) -> bool:
        return bool(self._running)

    def obey(self, words: list[str]) -> None:
        """Execute a request of the supervisor: index, incarnation, a word and its value."""
        index, incarnation, word, *rest = words
        key = int(index), int(incarnation)
        if word == "start":
            self._start(*key)
        elif handle := self._running.get(key):  # else it has exited meanwhile
            match word:
                case "kill":
                    handle.kill()
                case "stacks":
                    handle.dump_stacks()
                case "send":
                    handle.send(" ".join(rest))

    def stop(self) -> None:
        for handle in self._running.values():
            handle.send(STOP)

    def poll(self) -> None:
        """Report exited replicas."""
        for key, handle in list(self._running.items()):
            if (code := handle.poll()) is not None:
                del self._running[key]
                self._note_oom_kill(key, code)
                self._report(*key, code)

    def _start(self, index: int, incarnation: int) -> None:
        unit = next(one for one in self._step if one.index == index)
        argv = [sys.executable, "-m", unit.module, "--trial_dir", str(self._attempt.trial.dir)]
        argv += ["--attempt", self._attempt.id, "--index", str(index), "--incarnation", str(incarnation)]
        handle = Handle(unit.role)
        try:
            env = select_gpus(self._step, unit, os.environ, self._gpu_variable)
            # A child inherits the CPU binding of the starting thread.
            cpus = select_cpus(self._step, unit, self._cores)
            os.sched_setaffinity(0, cpus or self._all_cpus)
            handle.add(argv, env, self._attempt.log(unit.role, index, incarnation), is_tied=True)
        except (ConfigError, OSError) as error:
            self._report_not_started(unit, incarnation, error)
            return
        finally:
            os.sched_setaffinity(0, self._all_cpus)
        [record] = handle.children
        logger.info("%s %d (start %d) runs as process %d", unit.role, index, incarnation, record.pid)
        self._running[index, incarnation] = handle

    def _report_not_started(self, unit: Unit, incarnation: int, error: ConfigError | OSError) -> None:
        reason = f"can't be started: {error}"
        if isinstance(error, ConfigError):
            record = ExitRecord(code=ExitCode.BAD_CONFIG, reason=reason, failure=FailureClass.USER)
        elif error.errno in role.CANNOT_WRITE:
            record = ExitRecord(code=ExitCode.CANNOT_WRITE, reason=reason, failure=FailureClass.DISK_FULL)
        else:
            record = ExitRecord(code=ExitCode.FAILED, reason=reason)
        logger.error("%s %d (start %d) %s", unit.role, unit.index, incarnation, reason)
        with contextlib.suppress(OSError):  # full disk
            path = self._attempt.exit_record(unit.role, unit.index, incarnation, 0)
            write_json(path, record.to_json())
        self._report(unit.index, incarnation, record.code)

    def _note_oom_kill(self, key: tuple[int, int], code: int) -> None:
        """Log that a replica was killed for memory: Slurm reports it only at the end of a step."""
        known, self._oom_kills = self._oom_kills, count_oom_kills()
        if code in (-9, KILLED) and self._oom_kills > known:
            path = self._attempt.log(self._step[0].role, *key)
            try:
                with path.open("a") as file:
                    file.write(
                        f"oom_kill: the kernel killed {self._oom_kills - known} processes for memory\n"
                    )
            except OSError as error:
                form = "the kernel killed a process for lack of memory, but the log %s can't record that: %s"
                logger.warning(form, path, error)

    def _report(self, index: int, incarnation: int, code: int) -> None:
        logger.info("%s %d (start %d) ended with exit code %d", self._step[0].role, index, incarnation, code)
        try:
            os.write(1, f"exited {index} {incarnation} {code}\n".encode())
        except OSError as error:
            if error.errno != errno.EPIPE:  # srun is gone, and standard input ends
                raise


def serve_node(context: role.Context) -> int:
    """Serve the supervisor until it asks to stop, and then until no replica is left."""
    replicas = Replicas(context, ROLE)
    was_told = False
    while True:
        try:
            replicas.obey(control.about_units.get(timeout=POLL_S))
        except queue.Empty:
            replicas.poll()
        if context.stopping.is_set() and not was_told:
            was_told = True
            replicas.stop()
        if was_told and not replicas:
            return ExitCode.STOPPED


if __name__ == "__main__":
    ROLE = sys.argv.pop(1)
    # Keep the node's directory: a crashed server finds its caches and copies again.
    role.run(make_agent_name(ROLE), serve_node, uses_node=False)
