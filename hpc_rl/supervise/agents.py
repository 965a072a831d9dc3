"""Agents of the nodes: one srun per node and role starts, and restarts, all replicas of that role there.

A replica is a unit like any other, with a separate handle. The agent (roles/node_agent.py) gets requests on
the standard input of its srun and answers on standard output. An agent lives as long as one of its replicas;
if it dies, its replicas die too, and the next start of a replica starts a new agent.
"""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from hpc_rl.core.trial import Attempt
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.schedulers.hostlist import expand
from hpc_rl.supervise.processes import KILL_STEP_S, STOP, Handle, ProcessSteps, SrunHandle, SrunSteps

logger = logging.getLogger(__name__)


def make_agent_name(role: str) -> str:
    """Return the name of the agent of a role in logs and records."""
    return f"{role}agent"


class AgentHandle(SrunHandle):
    """The srun of an agent, and the agent's answers."""

    def __init__(self, role: str, log: Path, processes: Path) -> None:
        super().__init__(role, log, processes)
        self.codes: dict[str, int] = {}  # of exited replicas, by index and incarnation
        self.running: set[str] = set()  # replicas without a reported exit
        self.is_leaving = False
        self._unread = b""
        self._said: int | None = None  # read end of its standard output

    def listen_to(self, read_end: int) -> None:
        os.set_blocking(read_end, False)
        self._said = read_end

    def poll(self) -> int | None:
        """Note exited replicas; return srun's exit code once it has ended."""
        code = super().poll()
        while self._said is not None:
            try:
                data = os.read(self._said, 65536)
            except BlockingIOError:
                data = b""
            if not data:
                break
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._note(line.decode(errors="replace"))
        if code is not None and self._said is not None:
            os.close(self._said)
            self._said = None
        return code

    def _note(self, line: str) -> None:
        match line.split():
            case ["exited", index, incarnation, code] if (
                f"{index} {incarnation}" in self.running and re.fullmatch(r"-?\d{1,3}", code)
            ):
                self.codes[f"{index} {incarnation}"] = int(code)
            case _:  # output of a container's runtime, or of the site's wrapper
                with suppress(OSError), self.log.open("a") as file:
                    file.write(f"{line}\n")

    def leave(self) -> None:
        """Let an agent without replicas exit."""
        self.is_leaving = True
        self.send(STOP)


class ReplicaHandle(Handle):
    """One incarnation of a replica, through its agent."""

    def __init__(self, unit: Unit, agent: AgentHandle, incarnation: int) -> None:
        super().__init__(unit.role)
        self._agent, self._name = agent, f"{unit.index} {incarnation}"
        self._code: int | None = None
        self._has_exited = False
        agent.running.add(self._name)
        self._ask("start")

    def poll(self) -> int | None:
        """Return the code of the replica; for the last replica, only once the agent has exited too."""
        if self._has_exited:
            return self._code
        ended = self._agent.poll()
        if self._code is None:
            self._code = self._agent.codes.pop(self._name, None)
            if self._code is not None and len(self._agent.running) == 1:
                self._agent.leave()
                self._kill_at = time.monotonic() + KILL_STEP_S
        if ended is not None and self._code is None:
            self._code, self.launcher_log = ended, self._agent.log
        if self._code is not None and (ended is not None or not self._agent.is_leaving):
            self._agent.running.discard(self._name)
            self._has_exited = True
            return self._code
        if time.monotonic() >= self._kill_at:
            self._agent.kill()
        return None

    def send(self, line: str) -> None:
        self._ask("send", line)

    def hang_up(self) -> None:
        self._agent.hang_up()

    def dump_stacks(self) -> None:
        self._ask("stacks")

    def kill(self) -> None:
        """Ask the agent to kill the replica; if it does not, kill the agent and all its replicas."""
        if self._kill_at == float("inf"):
            self._kill_at = time.monotonic() + KILL_STEP_S
            self._ask("kill")

    def explain_unplaced(self) -> str:
        return self._agent.explain_unplaced()

    def _ask(self, *words: str) -> None:
        self._agent.send(" ".join(["unit", self._name, *words]))


@dataclass
class AgentSteps(SrunSteps):
    """One srun per unit; the replicas of a node share one."""

    plan: Plan = field(kw_only=True)
    _agents: dict[tuple[str, int], AgentHandle] = field(default_factory=dict)

    def start(self, unit: Unit, argv: list[str], attempt: Attempt, incarnation: int) -> Handle:
        """Start an incarnation of a unit. Raises OSError."""
        if not unit.by_agent:
            return super().start(unit, argv, attempt, incarnation)
        agent = self._agents.get(unit.step)
        children = []
        if agent is None or agent.is_leaving or agent.poll() is not None:
            agent = self._agents[unit.step] = self._start_agent(unit, argv, attempt)
            children = agent.children
        handle = ReplicaHandle(unit, agent, incarnation)
        handle.children = children
        return handle

    def _start_agent(self, unit: Unit, argv: list[str], attempt: Attempt) -> AgentHandle:
        step = self.plan.list_step_units(unit)
        name, index = make_agent_name(unit.role), step[0].index
        logs = ((number, attempt.log(name, index, number)) for number in count())
        number, log = next((number, log) for number, log in logs if not log.exists())
        flags = ["--trial_dir", str(attempt.trial.dir), "--attempt", attempt.id]
        flags += ["--index", str(index), "--incarnation", str(number)]
        command = [argv[0], "-m", "hpc_rl.roles.node_agent", unit.role, *flags]
        agent = AgentHandle(name, log, attempt.processes)
        read_end, write_end = os.pipe()
        try:
            self.launch(agent, unit, command, attempt, log, num_replicas=len(step), stdout=write_end)
        except OSError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        agent.listen_to(read_end)
        return agent


def open_steps(kind: str, plan: Plan) -> ProcessSteps | SrunSteps:
    """Return the way to start processes: `srun` within a Slurm job, `process` on this machine."""
    if kind == "process":
        num_computing = sum(unit.num_tasks for unit in plan.units if unit.role in ("server", "trainer"))
        return ProcessSteps(gpu_variable=plan.gpu_variable, num_computing=max(1, num_computing))
    if plan.layout != "hetjob":
        return AgentSteps(expand(os.environ["SLURM_JOB_NODELIST"]), plan=plan)
    parts = [
        expand(os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{number}"]) for number in range(len(plan.groups))
    ]
    components = [number for number, hosts in enumerate(parts) for _ in hosts]
    hosts = [host for hosts in parts for host in hosts]
    return AgentSteps(hosts, components=components, plan=plan)
