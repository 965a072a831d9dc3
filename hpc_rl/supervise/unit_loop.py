"""The loop over the units of an attempt, common to the supervisors of a trial and of a server job.

A kill at any time leaves complete files, from which the next supervisor continues. The rest of its state
(running processes and their start times) becomes void, because the processes end when their pipes close.
"""

import json
import logging
import math
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
from hpc_rl.name_resolve.roster import POLL_S, RosterReader, compute_poll_s
from hpc_rl.name_resolve.shared_fs import LeaseView
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.supervise import bad_nodes, failure_policy, state_machine
from hpc_rl.supervise.deadline import MARGIN_S, JobDeadline, StepTimes
from hpc_rl.supervise.failure_policy import UnitExit
from hpc_rl.supervise.hangs import HangDetector
from hpc_rl.supervise.processes import STACKS, STOP, Handle, Steps
from hpc_rl.supervise.state_machine import Action, AttemptMachine, Finish, Key, Phase

logger = logging.getLogger(__name__)
TICK_S = 0.1
POLL_ALL_S = 1.0  # within which each unit is polled
POLLS_PER_ROUND = 100  # at least, so that small trials poll all units in each round
SECRETS_S = 2.0  # between two checks of the secret files
SAME_TERM_S = 2.0  # the same TERM comes from the scheduler and from the job script
SIGNALS = {
    signal.SIGTERM: StopCause.PREEMPTION,
    signal.SIGINT: StopCause.INTERRUPTED,
    signal.SIGUSR1: StopCause.USER_SIGNAL,
}


@contextmanager
def tolerate_errors(doing: str) -> Iterator[None]:
    """Log an OSError and continue: a short failure of a shared file system must not end a trial."""
    try:
        yield
    except OSError as error:
        logger.error("%s failed, and the supervisor continues: %s", doing, error)


def obey_signals(request: Callable[[StopCause], None]) -> None:
    """Turn TERM, INT and USR1 into requests; a second TERM ends the process, and its roles by their pipes."""
    terms: list[float] = []

    def on_signal(number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            terms.append(time.monotonic())
            if terms[-1] - terms[0] > SAME_TERM_S:
                os._exit(ExitCode.KILLED_BY_SYSTEM)
        request(SIGNALS[signal.Signals(number)])

    for number in SIGNALS:
        signal.signal(number, on_signal)
    # The job script starts this process with USR1 blocked: an early signal counts now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class StopRequests:
    """Requests to stop, each taken once. Signal handlers may call `add`."""

    def __init__(self) -> None:
        self._waiting: list[StopCause] = []
        self._taken: set[StopCause] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, cause: StopCause) -> None:
        self._waiting.append(cause)

    def take(self) -> list[StopCause]:
        """Return the new requests; a cancel comes first."""
        waiting = [self._waiting.pop(0) for _ in self._waiting[:]]
        new = [cause for cause in dict.fromkeys(waiting) if cause not in self._taken]
        self._taken.update(new)
        return sorted(new, key=lambda cause: cause is not StopCause.CANCELLED)


class RateLimit:
    """Limits work to once per period; the first call is due at once."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self._next = float("-inf")

    def is_due(self, now: float) -> bool:
        if now < self._next:
            return False
        self._next = now + self.period_s
        return True


class UnitLoop(ABC):
    """Starts, watches and stops the units of an attempt, as decided by its state machine."""

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
        self._unpolled: list[Key] = []  # in this turn
        self.finish: Finish | None = None
        self.clock = time.monotonic
        self._rosters = {pool.name: RosterReader(self.names, keys.servers(pool.name)) for pool in plan.pools}
        self._reading_leases = RateLimit(POLL_S)
        self._leases: dict[str, dict[str, LeaseView]] = {}  # last read, by pool
        self._secret_files = self.trial.load_secret_files()
        self._looking_for_secrets = RateLimit(SECRETS_S)
        self._failed_starts: list[tuple[Key, int, UnitExit]] = []

    def run(self) -> int:
        """Run the attempt to its end and return the exit code. Raises OSError if it can't begin."""
        obey_signals(self.requests.add)
        self.attempt.make_dirs()
        if not self.begin():
            return ExitCode.DONE
        self.update_exclude_file()
        if self.finish is None:
            self.execute(self.machine.start(self.clock()))
        while self.finish is None:
            self.do_round()
            time.sleep(TICK_S)
        return self.leave(self.finish)

    @abstractmethod
    def begin(self) -> bool:
        """Prepare the attempt; return False if there is nothing to do. May set `finish`."""

    @abstractmethod
    def observe(self, now: float) -> None:
        """Check files, leases and clocks. Raises OSError."""

    @abstractmethod
    def grant_requests(self) -> None:
        """Stop if a request to stop waits."""

    @abstractmethod
    def leave(self, finish: Finish) -> int:
        """Record the end and return the exit code."""

    def do_round(self) -> None:
        """Observe, grant requests, and report all exits to the state machine."""
        now = self.clock()
        self.hangs.note_round(now)
        with tolerate_errors("observing the trial"):
            self.observe(now)
        if self._looking_for_secrets.is_due(now):
            self._restore_secrets()
        self.grant_requests()
        while self._failed_starts:
            key, incarnation, found = self._failed_starts.pop(0)
            self.execute(self.machine.handle_exit(self.clock(), key, incarnation, found))
        for key in self._choose_polled():
            handle, incarnation = self.handles[key]
            code = handle.poll()
            if code is not None:
                self.handle_unit_exit(key, incarnation, code)
        self.execute(self.machine.tick(self.clock()))

    def _choose_polled(self) -> Iterator[Key]:
        """Yield the units to poll in this round: of thousands the leading one, and a part in turn."""
        num_left = max(POLLS_PER_ROUND, math.ceil(len(self.handles) * TICK_S / POLL_ALL_S))
        if num_left >= len(self.handles):
            yield from list(self.handles)
            return
        if self.machine.leader is not None and self.machine.leader.key in self.handles:
            yield self.machine.leader.key
        while num_left and self.handles:
            if not self._unpolled:
                self._unpolled = list(self.handles)
            key = self._unpolled.pop()
            if key in self.handles:  # or it has ended since
                num_left -= 1
                yield key

    def execute(self, actions: list[Action]) -> None:
        """Execute the actions of the state machine."""
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
                    with tolerate_errors("requesting stack traces"):
                        handle.dump_stacks() if hangs else handle.send(STACKS)
                case state_machine.Avoid(nodes, reason, trouble):
                    self._avoid(nodes, reason, trouble)
                case state_machine.Replace(unit):
                    self.replace_unit(unit)
                case state_machine.LogEvent(kind, details):
                    self.write_event(kind, details)
                case Finish():
                    self.finish = action

    @abstractmethod
    def replace_unit(self, unit: Unit) -> None:
        """Get other nodes for a server."""

    def observe_servers(self, now: float) -> dict[str, dict[str, LeaseView]]:
        """Note the live and the serving servers of this attempt; return the leases of each pool.

        They are at most POLL_S old, with thousands of servers `compute_poll_s`. Raises OSError.
        """
        if not self._reading_leases.is_due(now):
            return self._leases
        pools = self._leases = self.list_leases()
        self._reading_leases.period_s = compute_poll_s(sum(map(len, pools.values())))
        for leases in pools.values():
            for key, incarnation in self.hangs.observe_leases(leases, self.attempt.id, now):
                self.machine.note_serving(now, key, incarnation)
        return pools

    def list_leases(self) -> dict[str, dict[str, LeaseView]]:
        """Return the leases of the servers of each pool. Raises OSError."""
        return {pool: roster.list_leases() for pool, roster in self._rosters.items()}

    def kill_hung(self, now: float) -> None:
        if self.machine.phase is Phase.RUNNING:
            for key, why in self.hangs.find_hung(now, self.deadline.times.step_s, list(self.handles)):
                self.execute(self.machine.kill_hung(now, key, why))

    def update_exclude_file(self) -> None:
        """Tell the job script which nodes to avoid: when an attempt begins or ends, and after changes."""
        with tolerate_errors("writing the nodes to avoid"):
            bad_nodes.write_exclude_file(self.trial, self.attempt.job_id, time.time())

    def write_event(self, kind: EventKind, details: dict[str, Any]) -> None:
        """Append a line to the events, for users and for the next supervisor."""
        if reason := details.get("reason"):
            details = {**details, "reason": redact(str(reason))}
        line = json.dumps({"time": time.time(), "event": kind.value, **details}).encode() + b"\n"
        logger.info("event %s: %s", kind, details)
        # Open and close the file each time so that readers on other nodes see the line.
        with tolerate_errors("writing an event"), self.attempt.events.open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                is_torn = file.read(1) != b"\n"  # by a killed supervisor
                line = b"\n" + line if is_torn else line
            file.write(line)

    def write_ended(self, code: int, reason: str) -> None:
        """Record the end of the attempt. The exit code tells it too, so an OSError is only logged."""
        self.write_event(EventKind.ENDED, {"role": "supervisor", "code": int(code), "reason": reason})
        self.update_exclude_file()
        cause = self.machine.stop_cause
        record = EndedRecord(exit_code=int(code), reason=reason, cause=cause, time=time.time())
        with tolerate_errors("writing how the attempt ended"):
            write_json(self.attempt.ended, record.to_json())

    def start_unit(self, unit: Unit, incarnation: int) -> None:
        """Start an incarnation of a unit; a failed start counts as an exit."""
        self._restore_secrets()  # no role can start without them
        key = (unit.role, unit.index)
        flags = ["--trial_dir", str(self.trial.dir), "--attempt", self.attempt.id]
        flags += ["--index", str(unit.index), "--incarnation", str(incarnation)]
        argv = [self.plan.python, "-m", unit.module, *flags]
        try:
            handle = self.steps.start(unit, argv, self.attempt, incarnation)
        except OSError as error:
            self._failed_starts.append((key, incarnation, failure_policy.start_failure(error)))
            return
        with tolerate_errors("recording the started processes"):
            for record in handle.children:  # roles write theirs only after loading
                path = self.attempt.process_record(*key, incarnation, record.rank, by_client=True)
                write_json(path, record.to_json())
        self.handles[key] = (handle, incarnation)
        self.hangs.watch(key, self.clock())

    def _restore_secrets(self) -> None:
        """Write removed secret files again: running roles still use them."""
        with tolerate_errors("restoring the trial's secrets"):
            for path in self.trial.restore_secret_files(self._secret_files):
                logger.warning("%s was removed while the trial runs, so it is written again", path)

    def handle_unit_exit(self, key: Key, incarnation: int, launcher_code: int) -> None:
        """Classify the exit of all processes of an incarnation, and act on it."""
        handle, _ = self.handles.pop(key)
        self.hangs.forget(key)
        with tolerate_errors("ending the heartbeat of an exited process"):
            self._end_lease(self.machine.slots[key].unit, incarnation)
        with tolerate_errors("listing the exit records"):
            os.listdir(self.attempt.dir / "exits")  # drops NFS's cache of absent names
        unit = self.machine.slots[key].unit
        found = failure_policy.classify_exit(
            self.attempt, unit, incarnation, launcher_code, handle.launcher_log
        )
        self.execute(self.machine.handle_exit(self.clock(), key, incarnation, found))

    def _end_lease(self, unit: Unit, incarnation: int) -> None:
        """End the lease of an exited process at once, however it ended. Raises OSError."""
        holder = {"attempt": self.attempt.id, "incarnation": incarnation}
        if unit.role == "server":
            pool = unit.pool or DEFAULT_POOL
            key = keys.server(pool, unit.index)
            self.names.end(key, holder, self._leases.get(pool, {}).get(key))
        elif unit.role == "rollout":
            self.names.end(keys.ROLLOUT, holder)

    def _avoid(self, nodes: Sequence[str], reason: str, trouble: bad_nodes.NodeTrouble) -> None:
        # If this fails, the next start may get these nodes, and will report them again.
        details = {"nodes": list(nodes), "trouble": trouble, "reason": reason}
        self.write_event(EventKind.BAD_NODES, details)
        with tolerate_errors("recording nodes to avoid"):
            hours = self.rules.avoid_hours
            bad_nodes.add(self.trial, self.attempt, nodes, reason, time.time(), hours, trouble)
        self.update_exclude_file()
