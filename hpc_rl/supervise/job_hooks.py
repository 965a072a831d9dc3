"""Hooks: scripts of the site and of the trial, each with a time limit.

pre_job and post_job run on the first node, pre_node and post_node on every node, on_preempt on the first node
when the job gets TERM. A pre_ hook that fails ends the job; other failures are only reported. The output is
in attempts/<attempt>/hooks/.
"""

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpc_rl.supervise.job_loop import KILL_AFTER_S, Child, JobLoop, Timer

TIMED_OUT = 124  # exit code of the program `timeout`
STEP_MARGIN_S = 60.0  # time for a step to start on all nodes

# Other nodes may have no Python before these hooks run. A TERM goes to all processes of the step.
ON_NODE = """
event=$1 limit_s=$2 logs=$3
shift 3
for script; do
  code=0
  HPC_RL_HOOK=$event HPC_RL_NODE=${SLURMD_NODENAME:-$HOSTNAME} timeout --kill-after=10 "$limit_s" \\
    "$script" </dev/null >>"$logs/$event.${SLURMD_NODENAME:-$HOSTNAME}.log" 2>&1 || code=$?
  printf '%s %d %s\\n' "${SLURMD_NODENAME:-$HOSTNAME}" "$code" "${script##*/}"
  if ((code)) && [[ $event == pre_* ]]; then exit 0; fi
done
"""


class HookAnswer(NamedTuple):
    """Exit of one script on one node."""

    node: str
    code: int
    script: str

    def explain_failure(self, limit_s: float) -> str:
        """Describe the failure; "" for success."""
        if self.code == TIMED_OUT:
            return f"{self.script} took longer than {limit_s:g} s on node {self.node}"
        return f"{self.script} ended with code {self.code} on node {self.node}" if self.code else ""


def describe_failures(answers: Sequence[HookAnswer], limit_s: float) -> str:
    """Describe failures of hooks; "" if there were none."""
    return "; ".join(text for one in answers if (text := one.explain_failure(limit_s)))


class EventHooks(ABC):
    """The hooks of one event: the running process, its time limits, and the answers."""

    def __init__(
        self, loop: JobLoop, event: str, paths: Sequence[str], limit_s: float, logs: str, env: dict[str, str]
    ) -> None:
        self._loop, self.event, self.limit_s, self._logs, self._env = loop, event, limit_s, logs, env
        self._paths = list(paths)
        self._child: Child | None = None
        self._timers: list[Timer] = []
        self.answers: list[HookAnswer] = []
        self.is_over = False

    @abstractmethod
    def start(self) -> None:
        """Start the next process."""

    @abstractmethod
    def _handle_exit(self) -> None:
        """Take the answers of the process that ended."""

    def end(self) -> None:
        """End the running process."""
        if self._child is not None:
            self._child.kill(signal.SIGTERM)

    def explain_missing(self) -> str:
        """Describe missing answers; "" if all nodes answered."""
        return ""

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill(signal.SIGKILL)

    def _limit(self, limit_s: float, stop: Callable[[], None]) -> None:
        """Call `stop` after the time limit, and kill the process if it is still there a little later."""
        self._timers = [
            self._loop.call_after(limit_s, stop),
            self._loop.call_after(limit_s + KILL_AFTER_S, self._kill),
        ]

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            self._loop.cancel(timer)


class HookRun(EventHooks):
    """The hooks of one event, one after the other."""

    _is_late = False
    _has_term = False

    @property
    def _node(self) -> str:
        return os.environ.get("SLURMD_NODENAME") or os.uname().nodename

    def start(self) -> None:
        """Start the next script."""
        if not self._paths:
            self.is_over = True
            return
        self._is_late = False
        env = self._env | {"HPC_RL_HOOK": self.event, "HPC_RL_NODE": self._node}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        log = os.open(f"{self._logs}/{self.event}.{self._node}.log", flags, 0o666)
        try:
            self._child = self._loop.spawn(
                [self._paths[0]], env=env, output=log, errors=log, is_group=True, on_exit=self._handle_exit
            )
        finally:
            os.close(log)
        self._limit(self.limit_s, self._stop_late)

    def end(self) -> None:
        """End the running script; skip waiting scripts of a pre_ event."""
        self._has_term = True
        super().end()
        if self._child is not None:
            self._timers.append(self._loop.call_after(KILL_AFTER_S, self._kill))

    def _stop_late(self) -> None:
        self._is_late = True
        super().end()

    def _handle_exit(self) -> None:
        self._cancel_timers()
        code = self._child.code if self._child is not None else None
        self._child = None
        code = TIMED_OUT if self._is_late else code or 0
        answer = HookAnswer(self._node, code, os.path.basename(self._paths.pop(0)))
        self.answers.append(answer)
        if self.event.startswith("pre_") and (answer.code or self._has_term):
            self._paths.clear()
        self.start()


class HookStep(EventHooks):
    """The hooks of one event on every node, as a step of the job."""

    def __init__(
        self, loop: JobLoop, event: str, paths: Sequence[str], limit_s: float, logs: str, env: dict[str, str]
    ) -> None:
        super().__init__(loop, event, paths, limit_s, logs, env)
        self.num_nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
        self._output = os.memfd_create("answers")

    def start(self) -> None:
        """Start the step."""
        flags = ["--overlap", "--mem=0", f"--nodes={self.num_nodes}", f"--ntasks={self.num_nodes}"]
        flags += ["--ntasks-per-node=1", "--cpus-per-task=1", "--kill-on-bad-exit=0", "--export=ALL"]
        flags += ["--mpi=none", f"--job-name={self.event}"]
        words = [self.event, f"{self.limit_s:g}", self._logs, *self._paths]
        argv = ["srun", *flags, "bash", "-c", ON_NODE, "hooks", *words]
        self._child = self._loop.spawn(argv, env=self._env, output=self._output, on_exit=self._handle_exit)
        self._limit(self.limit_s * len(self._paths) + STEP_MARGIN_S, self.end)

    def _handle_exit(self) -> None:
        self._cancel_timers()
        text = os.pread(self._output, os.fstat(self._output).st_size, 0).decode(errors="replace")
        os.close(self._output)
        for line in text.splitlines():
            node, _, rest = line.partition(" ")
            code, _, script = rest.partition(" ")
            # Other lines may come from a TaskProlog of the site.
            if code.isdecimal() and script in map(os.path.basename, self._paths):
                self.answers.append(HookAnswer(node, int(code), script))
        self._child, self.is_over = None, True

    def explain_missing(self) -> str:
        """Describe missing answers; "" if all nodes answered."""
        seen = sorted({one.node for one in self.answers})
        if len(seen) >= self.num_nodes:
            return ""
        return f"{self.event}: answers came from {len(seen)} of {self.num_nodes} nodes ({' '.join(seen)})"
