"""Driver: the thin loop around the supervisor's state machine. It polls, reads wishes, renews the lease and writes events.

A kill at any instant leaves whole files from which the next supervisor goes on: what it knows beyond them (who runs, since
when) dies with the processes, whose pipes close.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable

from hpc_rl.checkpoint.starts import TIME_IS_OVER, attempts_of, failures_without_progress
from hpc_rl.config.sections.operations import RecoverConfig
from hpc_rl.errors import ExitCode, FailureClass, Stale
from hpc_rl.files import JsonLines
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.base import Lease, NameResolve
from hpc_rl.plan.schema import Plan
from hpc_rl.supervise import exit_policy, ownership
from hpc_rl.supervise.deadline import WallTime
from hpc_rl.supervise.ends import end_of, not_started
from hpc_rl.supervise.failures import GO_ON, End
from hpc_rl.supervise.hangs import Liveness, serving
from hpc_rl.supervise.measured import Measured
from hpc_rl.supervise.processes import STACKS, Handle, Steps, unplaced_reason
from hpc_rl.supervise.state_machine import (
    DRAIN_GRACE_S,
    Action,
    AskToStop,
    Avoid,
    DumpStacks,
    Finish,
    Key,
    Kill,
    Phase,
    Record,
    Start,
    Supervisor,
)
from hpc_rl.supervise.supervision import Events, avoid, obey_signals, start_unit, tell_script, tolerant
from hpc_rl.trial import Attempt, read_json, submission_of, write_json

logger = logging.getLogger(__name__)
TICK_S = 0.1
LOOK_EVERY_S = 1.0
CLOCK_EVERY_S = 10.0
LIVE_EVERY_S = 2.0
CANCELLED = "cancelled by a person"
WARNING_S = 450.0  # before the end of a job: where its batch script asks for a signal, at the earliest
LAST_CALL_S = 3600.0  # before the stop: a trainer that ends by itself earlier does it for another reason
NO_TIME = f"{TIME_IS_OVER}: no rollout would be finished"
WORDS = {  # of signals, and what such a stop comes of
    "SIGTERM": (
        "SIGTERM of the scheduler: a cancel, a preemption or the time limit",
        FailureClass.PREEMPTION,
    ),
    "SIGUSR1": ("SIGUSR1: asked to save and stop", FailureClass.USER),
    "SIGINT": ("SIGINT: interrupted by a person", FailureClass.USER),
    TIME_IS_OVER: (TIME_IS_OVER, FailureClass.WALL_TIME),
}


class Driver:
    """Args:
    attempt: The attempt to drive.
    plan: Its plan.
    steps: How processes are started.
    names: The trial's names.
    end_time: When the scheduler will end the job, Unix seconds, or None; asked rarely.
    rules: Section `recover` of the configuration.
    servers_away_s: So long a trial whose servers are all away is no trial that hangs; 0 where it has none.
    """

    def __init__(
        self,
        attempt: Attempt,
        plan: Plan,
        steps: Steps,
        names: NameResolve,
        end_time: Callable[[], float | None],
        rules: RecoverConfig,
        servers_away_s: float = 0.0,
    ) -> None:
        self.attempt, self.trial, self.plan, self.steps, self.names = (
            attempt,
            attempt.trial,
            plan,
            steps,
            names,
        )
        self.rules = rules
        self._clock = time.monotonic
        self._wall = WallTime(end_time)
        self._measured = Measured(attempt)
        self._events = Events(attempt)
        self._liveness = Liveness(rules.hang_factor, rules.hang_min_s, rules.hang_max_s, servers_away_s)
        self._handles: dict[Key, tuple[Handle, int]] = {}
        self._machine = Supervisor([], plan.recover_mode, plan.recover_retries)
        self._finish: Finish | None = None
        self._failed_starts: list[tuple[Key, int, End]] = []
        self._wishes: list[str] = []
        self._parent = int(os.environ.get("HPC_RL_SCRIPT_PID") or os.getppid())  # it may be dead already
        self._granted: set[str] = set()
        self._generations: set[tuple[str, int]] = set()
        self._look, self._renew, self._watch_clock, self._watch_life = map(
            _Every, (LOOK_EVERY_S, ownership.RENEW_EVERY_S, CLOCK_EVERY_S, LIVE_EVERY_S)
        )

    def run(self) -> int:
        """Drive the attempt to its end; returns the exit code. Raises OSError when it can't even begin."""
        obey_signals(self._wishes.append)
        self.attempt.make_dirs()
        if self._is_done():
            return ExitCode.DONE
        lease = self._take_over()
        self._machine = self._restore()
        self._read_intents()
        self._look_for_the_script()
        self._grant_wishes()
        self._look_for_barren_attempts()
        tell_script(self.attempt)
        if self._finish is None:
            self._do(self._machine.start(self._clock()))
        while self._finish is None:
            self._round(lease)
            time.sleep(TICK_S)
        return self._leave(lease, self._finish)

    def _restore(self) -> Supervisor:
        """The state machine as the supervisors before this one left it."""
        self._generations = self._list_generations()
        events = [
            row for one in attempts_of(self.trial, self._job_id) for row in JsonLines(one.events).poll()
        ]
        failures, incarnations = failures_without_progress(events), ownership.next_incarnations(self.attempt)
        return Supervisor(
            self.plan.units, self.plan.recover_mode, self.plan.recover_retries, failures, incarnations
        )

    def _look_for_barren_attempts(self) -> None:
        """Attempts of this job that bring nothing new, whatever ends them, don't go on for ever."""
        before = [one for one in attempts_of(self.trial, self._job_id) if one.id != self.attempt.id]
        count = exit_policy.barren([JsonLines(one.events).poll() for one in before])
        if self._finish is None and count >= max(exit_policy.BARREN_ATTEMPTS, self.rules.retries + 1):
            why = f"{count} attempts in a row ended without a new generation; look why, {GO_ON}"
            self._do(self._machine.abandon(self._clock(), ExitCode.FAILED, why))

    @property
    def _job_id(self) -> str:
        return submission_of(self.attempt.id)

    def _is_done(self) -> bool:
        """A trial that this job or a later one has finished is not started again; the mark of an earlier one is taken down."""
        done = read_json(self.trial.done)
        if isinstance(done, dict) and (by := str(done.get("job_id"))):
            own, other = self._submitted_at(self._job_id), self._submitted_at(by)
            if by == self._job_id or (own is not None and other is not None and other > own):
                return True
        self.trial.done.unlink(missing_ok=True)
        return False

    def _submitted_at(self, job_id: str) -> float | None:
        job = read_json(self.trial.job(job_id))
        when = job.get("time") if isinstance(job, dict) else None
        return when if isinstance(when, int | float) else None

    def _take_over(self) -> Lease:
        number = ownership.next_incarnations(self.attempt).get(("supervisor", 0), 0)
        ownership.leave_record(self.attempt, "supervisor", 0, number)
        self._events.write("supervisor_started", {"role": "supervisor", "number": number, "pid": os.getpid()})
        lease = ownership.take_ownership(self.names, self.attempt)
        for record in ownership.end_leftovers(self.trial):
            reason = "a process of an earlier start can't be ended"
            self._events.write("left_behind", {"role": record.role, "pid": record.pid, "reason": reason})
        return lease

    def _round(self, lease: Lease) -> None:
        now = self._clock()
        self._liveness.round(now)
        with tolerant("looking around"):
            if self._look.due(now):
                self._read_intents()
                self._look_for_the_script()
                self._look_for_progress()
            if self._renew.due(now):
                self._renew_lease(lease, now)
            self._watch_wall_time(now)
            if self._watch_life.due(now):
                self._watch_liveness(now)
        self._grant_wishes()
        while self._failed_starts:
            key, incarnation, end = self._failed_starts.pop(0)
            self._do(self._machine.exited(self._clock(), key, incarnation, end))
        for key, (handle, incarnation) in list(self._handles.items()):
            code = handle.poll()
            if code is not None:
                self._ended(key, incarnation, code)
        self._do(self._machine.tick(self._clock()))

    def _ended(self, key: Key, incarnation: int, raw_code: int) -> None:
        del self._handles[key]
        self._liveness.ended(key)
        unit = self._machine.slots[key].unit
        with tolerant("listing the exit records"):
            os.listdir(self.attempt.dir / "exits")  # drops what NFS remembers of names that were not there
        end = end_of(self.attempt, unit, incarnation, raw_code)
        with tolerant("looking for generations"):
            self._look_for_progress()  # before the end counts as one without progress
        self._do(self._machine.exited(self._clock(), key, incarnation, end))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start():
                    self._start(action)
                case AskToStop(key) if key in self._handles:
                    self._handles[key][0].ask_to_stop()
                case Kill(key) if key in self._handles:
                    self._handles[key][0].kill()
                case DumpStacks(key, hangs) if key in self._handles:
                    self._dump_stacks(self._handles[key][0], hangs)
                case Avoid(nodes, reason):
                    avoid(self.attempt, self._events, nodes, reason, self.rules.avoid_hours)
                case Record(event, details):
                    self._events.write(event, details)
                case Finish():
                    self._finish = action

    def _start(self, action: Start) -> None:
        key = (action.unit.role, action.unit.index)
        try:
            handle = start_unit(self.steps, self.plan, self.attempt, action.unit, action.incarnation)
        except OSError as error:
            self._failed_starts.append((key, action.incarnation, not_started(error)))
            return
        self._handles[key] = (handle, action.incarnation)
        self._liveness.started(key, self._clock())
        self._tell_rollout()

    def _dump_stacks(self, handle: Handle, hangs: bool) -> None:
        with tolerant("asking for stacks"):
            if hangs:
                handle.dump_stacks()
            else:
                handle.tell(STACKS)

    def _read_intents(self) -> None:
        there = set(os.listdir(self.trial.intent)) if self.trial.intent.is_dir() else set()
        if self.trial.cancel_intent(self._job_id).name in there:
            self._wishes.append(CANCELLED)
        drain = self.trial.drain_intent(self.attempt.id)
        if (
            drain.name in there
        ):  # of the batch script, or of a supervisor before this one, which was killed meanwhile
            self._wishes.append(str((read_json(drain) or {}).get("reason") or "SIGUSR1"))

    def _look_for_the_script(self) -> None:
        """Without the batch script nobody would record the end or start anything again, and no signal would come."""
        if os.getppid() != self._parent:
            self._wishes.append("the batch script that started the supervisor was killed")

    def _grant_wishes(self) -> None:
        if self._wishes:
            with tolerant("reading intents"):
                self._read_intents()  # a signal may tell of an intent, whose words say more than the signal's name
            self._wishes.sort(key=lambda why: why != CANCELLED)
        while self._wishes:
            why = self._wishes.pop(0)
            if why in self._granted:
                continue
            self._granted.add(why)
            if self._is_reminder(why):
                self._events.write(
                    "reminded", {"left_s": self._wall.left_s, "until_stop_s": self._wall.until_drain_s}
                )
            else:
                self._stop(why)

    def _is_reminder(self, why: str) -> bool:
        """Slurm's `--signal` is a backstop, minutes early: a clock that knows the job's end and what it takes does better."""
        near = self._wall.left_s < WARNING_S and self._wall.until_drain_s > 0
        return why == "SIGUSR1" and near and self.plan.recover_mode != "disabled"

    def _stop(self, why: str) -> None:
        """The wish is made durable first: a supervisor that is killed from here on does not start everything again."""
        words, failure = WORDS.get(why, (why, FailureClass.USER))
        if self._machine.phase is Phase.RUNNING and why != CANCELLED:
            with tolerant("writing the wish to stop"):
                write_json(self.trial.drain_intent(self.attempt.id), {"reason": why, "time": time.time()})
        grace_s = exit_policy.drain_grace_s(DRAIN_GRACE_S, self._measured.step_s, self._measured.save_s)
        self._machine.drain_grace_s = (
            max(1.0, min(grace_s, self._wall.left_s)) if self._wall.left_s > 0 else grace_s
        )
        self._do(self._machine.stop(self._clock(), words, failure))

    def _renew_lease(self, lease: Lease, now: float) -> None:
        try:
            lease.renew()
        except Stale as error:
            self._do(
                self._machine.abandon(
                    now, ExitCode.FAILED, f"another supervisor owns the trial now ({error})"
                )
            )

    def _list_generations(self) -> set[tuple[str, int]]:
        with os.scandir(self.trial.recover) as entries:
            return {(entry.name, entry.inode()) for entry in entries if entry.name.startswith("gen-")}

    def _look_for_progress(self) -> None:
        found = self._list_generations()
        for name, _ in sorted(found - self._generations):
            step = name.removeprefix("gen-")
            if step.isdecimal():
                self._do(self._machine.progressed(int(step)))
        self._generations |= found

    def _watch_wall_time(self, now: float) -> None:
        if self.plan.recover_mode == "disabled":
            return  # nothing would be saved
        if self._watch_clock.due(now):
            self._measured.poll()
            if self._wall.look(self._measured.step_s, self._measured.save_s):
                self._events.write(
                    "end_time", {"ends_at": self._wall.ends_at, "reason": "the scheduler ends the job then"}
                )
            self._tell_rollout()
        if self._machine.phase is Phase.RUNNING and self._wall.is_up(
            self._measured.step_s, self._measured.save_s
        ):
            self._wishes.append(TIME_IS_OVER)

    def _tell_rollout(self) -> None:
        """It issues nothing that can't be finished before the trainer stops, and takes it back when the time is extended."""
        if self._wall.ends_at is None:
            return
        if self._wall.until_drain_s < LAST_CALL_S:
            self._machine.last_call(NO_TIME)
        for (role, _), (handle, _) in self._handles.items():
            if role == "rollout":
                handle.tell(f"ends_in {max(0.0, self._wall.until_drain_s):.1f}")

    def _watch_liveness(self, now: float) -> None:
        for (role, index), (_, incarnation) in self._handles.items():
            if role == "trainer":
                doing = read_json(self.attempt.activity(role, index, incarnation))
                words = str(doing.get("doing", "")) if isinstance(doing, dict) else ""
                self._liveness.observe((role, index), doing and json.dumps(doing), now, words)
        servers = self.names.leases(keys.SERVERS)
        for leases in (servers, self.names.leases(keys.ROLLOUT)):
            self._liveness.observe_leases(leases, self.attempt.id, now)
        self._liveness.observe_servers(servers, now)
        for key, incarnation in serving(servers, self.attempt.id):
            self._machine.served(now, key, incarnation)
        for key in self._liveness.unseen(now):
            if key in self._handles and (said := self._handles[key][0].unplaced()):
                unit = self._machine.slots[key].unit
                self._do(self._machine.unplaced(key, unplaced_reason(unit, self.plan, said)))
        if self._machine.phase is Phase.RUNNING:
            for key, why in self._liveness.hung(now, self._measured.step_s, list(self._handles)):
                self._do(self._machine.hung(now, key, why))

    def _leave(self, lease: Lease, finish: Finish) -> int:
        record = {"exit_code": finish.code, "reason": finish.reason, "time": time.time()}
        self._events.ended(finish.code, finish.reason)
        tell_script(self.attempt)
        with tolerant("writing how it ended"):  # the exit code tells too, and the script has that
            write_json(self.attempt.ended, record)
            if finish.code == ExitCode.DONE:
                write_json(
                    self.trial.done, {"attempt": self.attempt.id, "job_id": self._job_id, "time": time.time()}
                )
            lease.release()
        return finish.code


class _Every:
    """Says when so many seconds have passed since it last said so; at first at once."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._next = float("-inf")

    def due(self, now: float) -> bool:
        if now < self._next:
            return False
        self._next = now + self._period_s
        return True
