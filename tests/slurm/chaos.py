"""What can happen to a trial's job on Slurm, done to one on purpose: killed processes and nodes, preemption,
requeue.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster import Cluster
from kill_anything import PATIENCE_S, VICTIMS, Killed

from hpc_rl.core.files import JsonLines
from hpc_rl.schedulers.base import JobState
from hpc_rl.schedulers.slurm import SlurmScheduler

SCHEDULER_EVENTS = ("requeue", "preempt", "server node", "first node")
EVENTS = (*VICTIMS, *SCHEDULER_EVENTS)
LOOK_EVERY_S = 0.5


@dataclass
class Chaos(Killed):
    """A trial as a job of four nodes that things happen to; a requeued job does not wait for Slurm's two
    minutes.

    Args:
        cluster: Where it runs.
    """

    cluster: Cluster = field(kw_only=True)
    scheduler: str = "slurm"
    events: list[str] = field(default_factory=list)
    _seen: JobState | None = None
    _looked_at: float = 0.0
    _down: list[str] = field(default_factory=list)

    def strike(self, what: str, luck: random.Random) -> None:
        """Let one of EVENTS happen as soon as it can; nothing once the trial is over."""
        print(f"{self.name}: {what} at step {self.step}, {len(self.trial_attempts())} attempts", flush=True)
        if what in VICTIMS:
            self.until(lambda: self.over or self._kill(what, luck))
        elif what == "requeue":
            self._when_running(lambda: self.cluster.run("scontrol", "requeue", self.job_id))
        elif what == "preempt":
            self._when_running(self._preempt)
        else:
            self._when_running(lambda: self._kill_node(first=what == "first node", luck=luck))
        self.events.append(what)

    def between(self, luck: random.Random, most_steps: int) -> None:
        """Let the trial train a little, and dead nodes return."""
        enough = self.num_rows() + luck.randint(1, most_steps)
        self.until(lambda: self.num_rows() >= enough or self.over)
        time.sleep(luck.uniform(0.0, 0.3))

    def trial_attempts(self) -> list[str]:
        return (
            sorted(path.name for path in self.trial.attempts.iterdir())
            if self.trial.attempts.is_dir()
            else []
        )

    @property
    def over(self) -> bool:
        """The script's last word counts once Slurm agrees: after a requeue there is a word of an end, and no
        end.
        """
        said = JsonLines(self.trial.job_state(self.job_id)).poll()
        if not said or said[-1]["event"] != "ended":
            return False
        state = self._state()
        return not state.state.alive

    def until(self, what: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
        def looked() -> object:
            self._hurry()
            return what()

        super().until(looked, timeout_s)

    def finish(self) -> Chaos:
        super().finish()
        self.cluster.up()
        return self

    def _state(self) -> JobState:
        if self._seen is None or time.monotonic() - self._looked_at > LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._seen = SlurmScheduler().query_states([self.job_id])[self.job_id]
        return self._seen

    def _hurry(self) -> None:
        """Start a requeued job at once, and bring a dead node back once the job has lost it."""
        seen = self._state()
        if self._down and (seen.native == "PENDING" or not set(self._down) & set(self._hosts())):
            self._down.clear()
            self.cluster.up()
        if seen.native == "PENDING" and seen.reason == "BeginTime":
            self.cluster.hurry(self.job_id)
            self._seen = None

    def _when_running(self, act: Callable[[], object]) -> None:
        """Requeues and preemptions happen to a job that has come to something, not to one that is about to
        start. An act that gives False is tried again.
        """

        def try_it() -> bool:
            if self.over:
                return True
            if self._state().native != "RUNNING" or not self.find("supervisor"):
                return False
            with contextlib.suppress(
                subprocess.CalledProcessError
            ):  # it has ended meanwhile, or Slurm is between two states
                return act() is not False
            return False

        self.until(try_it)
        self._seen = None

    def _preempt(self) -> None:
        flags = [
            "--partition=high",
            "--nodes=4",
            "--exclusive",
            "--job-name=urgent",
            "--output=/dev/null",
            "--time=1",
        ]
        job_id = self.cluster.run("sbatch", "--parsable", *flags, "--wrap=sleep 1").strip()
        self.until(lambda: self._is_over_or_gone(job_id))

    def _is_over_or_gone(self, job_id: str) -> bool:
        return (
            self.over
            or not self.cluster.run("squeue", "-h", "-j", job_id, "-t", "PENDING,RUNNING", "-o", "%i").strip()
        )

    def _kill_node(self, first: bool, luck: random.Random) -> bool:
        """Kill a node of the job; False while another one is dead, or the job has given its nodes back."""
        hosts = self._hosts()
        candidates = hosts[:1] if first else hosts[2:]
        if self._down or not candidates:
            return False
        node = luck.choice(candidates)
        self.cluster.kill_node(
            node
        )  # Slurm takes some seconds to notice; the job goes on without it, or comes back
        self._down.append(node)
        return True

    def lose_first_node(self, luck: random.Random) -> None:
        """Kill the processes of the first node one by one."""
        self.until(lambda: not self._down)
        first = self._hosts()[0]
        self.cluster.kill_processes(first, luck, luck.choice((0.0, 0.005, 0.05)))
        self._down.append(first)
        self._seen = None

    def _hosts(self) -> list[str]:
        nodes = self._state().nodes
        return self.cluster.run("scontrol", "show", "hostnames", nodes).split() if nodes else []
