"""The loop that runs the units of an attempt, common to the supervisors of a trial and of a server job.

A kill at any instant leaves whole files from which the next supervisor continues: what it knows beyond them
(which processes run, since when) ends with the processes, whose pipes close.
"""

import json
import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.core.allocation import DEFAULT_POOL
from hpc_rl.core.errors import ExitCode, StopCause
from hpc_rl.core.log import redact
from hpc_rl.core.records import EndedRecord, EventKind
from hpc_rl.core.trial import Attempt, write_json
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.name_resolve.shared_fs import READS_PER_S, LeaseView
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.supervise import bad_nodes, failure_policy, state_machine
from hpc_rl.supervise.deadline import MARGIN_S, JobDeadline, StepTimes
from hpc_rl.supervise.failure_policy import UnitExit
from hpc_rl.supervise.hangs import HangDetector
from hpc_rl.supervise.processes import STACKS, STOP, Handle, Steps
from hpc_rl.supervise.state_machine import Action, AttemptMachine, Finish, Key, Phase

logger = logging.getLogger(__name__)
TICK_S = 0.1
SECRETS_S = 2.0  # between two looks at the files with secrets
SAME_TERM_S = 2.0  # the scheduler and the job script both bring the same TERM
SIGNALS = {
    signal.SIGTERM: StopCause.PREEMPTION,
    signal.SIGINT: StopCause.INTERRUPTED,
    signal.SIGUSR1: StopCause.USER_SIGNAL,
}


@contextmanager
def tolerant(doing: str) -> Iterator[None]:
    """Log an OSError and continue: a shared file system that fails for a moment must not end a trial."""
    try:
        yield
    except OSError as error:
        logger.error("%s: %s", doing, error)


def obey_signals(request: Callable[[StopCause], None]) -> None:
    """Make TERM, INT and USR1 requests; a second TERM ends the process, and its roles by their pipes."""
    terms: list[float] = []

    def on_signal(number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            terms.append(time.monotonic())
            if terms[-1] - terms[0] > SAME_TERM_S:
                os._exit(ExitCode.KILLED_BY_SYSTEM)
        request(SIGNALS[signal.Signals(number)])

    for number in SIGNALS:
        signal.signal(number, on_signal)
    # The job script starts this process with USR1 blocked: one that came early counts now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class StopRequests:
    """Requests to stop, each taken once. `add` may be called by a signal handler."""

    def __init__(self) -> None:
        self._waiting: list[StopCause] = []
        self._taken: set[StopCause] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, cause: StopCause) -> None:
        self._waiting.append(cause)

    def take(self) -> list[StopCause]:
        """Return the requests that were not taken before; a cancel comes first."""
        waiting = [self._waiting.pop(0) for _ in self._waiting[:]]
        new = [cause for cause in dict.fromkeys(waiting) if cause not in self._taken]
        self._taken.update(new)
        return sorted(new, key=lambda cause: cause is not StopCause.CANCELLED)


class RateLimit:
    """Is due at most once per period, and at first at once."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._next = float("-inf")

    def due(self, now: float) -> bool:
        if now < self._next:
            return False
        self._next = now + self._period_s
        return True


class UnitLoop(ABC):
    """Starts, watches and stops the units of an attempt as its state machine decides."""

    def __init__(
        self,
        attempt: Attempt,
        plan: Plan,
        config: Config,
        steps: Steps,
        machine: AttemptMachine,
        end_time: Callable[[], float | None],
        margin_s: float = MARGIN_S,
    ) -> None:
        self.attempt, self.trial = attempt, attempt.trial
        self.plan, self.steps, self.rules = plan, steps, config.recover
        self.machine = machine
        self.deadline = JobDeadline(end_time, StepTimes(attempt), margin_s)
        self.names = open_names(self.trial, config)
        away_s = config.rollout.setup_timeout if isinstance(config, GRPOConfig) else 0.0
        limits = (self.rules.hang_factor, self.rules.hang_min_s, self.rules.hang_max_s)
        self.hangs = HangDetector(*limits, away_s)
        self.requests = StopRequests()
        self.handles: dict[Key, tuple[Handle, int]] = {}
        self.finish: Finish | None = None
        self.clock = time.monotonic
        servers = sum(unit.role == "server" for unit in plan.units)
        self._reading_leases = RateLimit(servers / READS_PER_S)
        self._leases: dict[str, dict[str, LeaseView]] = {}  # as they were read last, by pool
        self._secret_files = self.trial.read_secret_files()
        self._looking_for_secrets = RateLimit(SECRETS_S)
        self._failed_starts: list[tuple[Key, int, UnitExit]] = []

    def run(self) -> int:
        """Run the attempt to its end and return the exit code. Raises OSError where it can't even begin."""
        obey_signals(self.requests.add)
        self.attempt.make_dirs()
        if not self.begin():
            return ExitCode.DONE
        self.update_exclude_file()
        if self.finish is None:
            self.do(self.machine.start(self.clock()))
        while self.finish is None:
            self.round()
            time.sleep(TICK_S)
        return self.leave(self.finish)

    @abstractmethod
    def begin(self) -> bool:
        """Prepare the attempt; False where there is nothing to do. May set `finish`."""

    @abstractmethod
    def observe(self, now: float) -> None:
        """Look at files, leases and clocks. Raises OSError."""

    @abstractmethod
    def grant_requests(self) -> None:
        """Stop where a request to stop waits."""

    @abstractmethod
    def leave(self, finish: Finish) -> int:
        """Record the end and return the exit code."""

    def round(self) -> None:
        """Observe, grant requests, and tell the state machine of all exits."""
        now = self.clock()
        self.hangs.round(now)
        with tolerant("observing the trial"):
            self.observe(now)
        if self._looking_for_secrets.due(now):
            self._restore_secrets()
        self.grant_requests()
        while self._failed_starts:
            key, incarnation, found = self._failed_starts.pop(0)
            self.do(self.machine.exited(self.clock(), key, incarnation, found))
        for key, (handle, incarnation) in list(self.handles.items()):
            code = handle.poll()
            if code is not None:
                self.unit_exited(key, incarnation, code)
        self.do(self.machine.tick(self.clock()))

    def do(self, actions: list[Action]) -> None:
        """Carry out what the state machine decided."""
        for action in actions:
            match action:
                case state_machine.Start(unit, incarnation):
                    self.start_unit(unit, incarnation)
                case state_machine.AskToStop(key) if key in self.handles:
                    self.handles[key][0].send(STOP)
                case state_machine.Kill(key) if key in self.handles:
                    self.handles[key][0].kill()
                case state_machine.DumpStacks(key, hangs) if key in self.handles:
                    handle, _ = self.handles[key]
                    with tolerant("asking for stacks"):
                        handle.dump_stacks() if hangs else handle.send(STACKS)
                case state_machine.Avoid(nodes, reason, trouble):
                    self._avoid(nodes, reason, trouble)
                case state_machine.LogEvent(kind, details):
                    self.write_event(kind, details)
                case Finish():
                    self.finish = action

    def observe_servers(self, now: float) -> dict[str, dict[str, LeaseView]]:
        """Note which servers of this attempt live, and which serve; return the leases of each pool.

        Leases of many servers are read more rarely. Raises OSError.
        """
        if not self._reading_leases.due(now):
            return self._leases
        pools = self._leases = {
            pool.name: self.names.leases(keys.servers(pool.name)) for pool in self.plan.pools
        }
        for leases in pools.values():
            for key, incarnation in self.hangs.observe_leases(leases, self.attempt.id, now):
                self.machine.served(now, key, incarnation)
        return pools

    def kill_hung(self, now: float) -> None:
        if self.machine.phase is Phase.RUNNING:
            for key, why in self.hangs.hung(now, self.deadline.times.step_s, list(self.handles)):
                self.do(self.machine.hung(now, key, why))

    def update_exclude_file(self) -> None:
        """Tell the job script which nodes to avoid: when an attempt begins, ends, or that changes."""
        with tolerant("writing the nodes to avoid"):
            bad_nodes.write_exclude_file(self.trial, self.attempt.job_id, time.time())

    def write_event(self, kind: EventKind, details: dict[str, Any]) -> None:
        """Append a line to the events, for people and for the next supervisor."""
        if reason := details.get("reason"):
            details = {**details, "reason": redact(str(reason))}
        line = json.dumps({"time": time.time(), "event": kind.value, **details}).encode() + b"\n"
        logger.info("%s %s", kind, details)
        # Opened and closed each time so that readers on other nodes see it.
        with tolerant("writing an event"), self.attempt.events.open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                is_torn = file.read(1) != b"\n"  # by a supervisor that was killed
                line = b"\n" + line if is_torn else line
            file.write(line)

    def write_ended(self, code: int, reason: str) -> None:
        """Record how the attempt ended. The exit code tells too, so an OSError is only logged."""
        self.write_event(EventKind.ENDED, {"role": "supervisor", "code": int(code), "reason": reason})
        self.update_exclude_file()
        cause = self.machine.stop_cause
        record = EndedRecord(exit_code=int(code), reason=reason, cause=cause, time=time.time())
        with tolerant("writing how the attempt ended"):
            write_json(self.attempt.ended, record.to_json())

    def start_unit(self, unit: Unit, incarnation: int) -> None:
        """Start an incarnation of a unit; where that fails, it counts as an exit."""
        self._restore_secrets()  # without them no role can begin
        key = (unit.role, unit.index)
        flags = ["--trial_dir", str(self.trial.dir), "--attempt", self.attempt.id]
        flags += ["--index", str(unit.index), "--incarnation", str(incarnation)]
        argv = [self.plan.python, "-m", unit.module, *flags]
        try:
            handle = self.steps.start(unit, argv, self.attempt, incarnation)
        except OSError as error:
            self._failed_starts.append((key, incarnation, failure_policy.start_failure(error)))
            return
        with tolerant("recording processes"):
            for record in handle.children:  # the roles do so only once they have loaded
                path = self.attempt.process_record(*key, incarnation, record.rank, by_client=True)
                write_json(path, record.to_json())
        self.handles[key] = (handle, incarnation)
        self.hangs.started(key, self.clock())

    def _restore_secrets(self) -> None:
        """Write the files with secrets again if they were removed: the roles that run still use them."""
        with tolerant("restoring the trial's secrets"):
            for path in self.trial.restore_secret_files(self._secret_files):
                logger.warning("%s was removed while the trial runs: it is written again", path)

    def unit_exited(self, key: Key, incarnation: int, launcher_code: int) -> None:
        """Find out why all processes of an incarnation have exited, and what follows."""
        handle, _ = self.handles.pop(key)
        self.hangs.exited(key)
        with tolerant("ending its lease"):
            self._end_lease(self.machine.slots[key].unit, incarnation)
        with tolerant("listing the exit records"):
            os.listdir(self.attempt.dir / "exits")  # NFS forgets names that it did not find before
        unit = self.machine.slots[key].unit
        found = failure_policy.unit_exit(self.attempt, unit, incarnation, launcher_code, handle.launcher_log)
        self.do(self.machine.exited(self.clock(), key, incarnation, found))

    def _end_lease(self, unit: Unit, incarnation: int) -> None:
        """Let readers know at once that a process with a lease is gone, however it ended. Raises OSError."""
        holder = {"attempt": self.attempt.id, "incarnation": incarnation}
        if unit.role == "server":
            self.names.end(keys.server(unit.pool or DEFAULT_POOL, unit.index), holder)
        elif unit.role == "rollout":
            self.names.end(keys.ROLLOUT, holder)

    def _avoid(self, nodes: Sequence[str], reason: str, trouble: bad_nodes.NodeTrouble) -> None:
        # Where that can't be written the next start may get these nodes, and will report them again.
        details = {"nodes": list(nodes), "trouble": trouble, "reason": reason}
        self.write_event(EventKind.BAD_NODES, details)
        with tolerant("recording bad nodes"):
            hours = self.rules.avoid_hours
            bad_nodes.add(self.trial, self.attempt, nodes, reason, time.time(), hours, trouble)
        self.update_exclude_file()
