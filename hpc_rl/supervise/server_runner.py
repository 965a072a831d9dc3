"""The supervisor of one task of a server array: keeps its replicas alive while the trial wants them, and not a minute longer.

It owns nothing of the trial: no lease, no lineage, no batch. It ends when the trial is over, was cancelled, belongs to another
submission, or has had no supervisor for `launcher.slurm.servers.idle_s`; a task whose time is nearly over ends with code 75
and is started again.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hpc_rl.config.sections.operations import RecoverConfig
from hpc_rl.errors import ExitCode
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.base import NameResolve
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.schedulers import record
from hpc_rl.supervise import ownership
from hpc_rl.supervise.ends import end_of, not_started
from hpc_rl.supervise.hangs import Liveness, serving
from hpc_rl.supervise.processes import Handle, Steps
from hpc_rl.supervise.state_machine import (
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
from hpc_rl.supervise.supervision import Events, avoid, obey_signals, start_unit, tell_script
from hpc_rl.trial import Attempt, read_json, submission_of, write_json

logger = logging.getLogger(__name__)
TICK_S = 0.2
LOOK_EVERY_S = 2.0
END_TIME_EVERY_S = 600.0
LEAD_S = 90.0  # a server has nothing to save; Slurm may end a job a minute early
UNLIMITED = sys.maxsize  # no generation would give retries back; ends in a row are what ends a task


class ServerJob:
    """Args:
    attempt: `<array>_<task>.<restart>`.
    plan: The trial's plan.
    units: The replicas of this task, with nodes of this job.
    steps: How processes are started.
    names: The trial's names.
    serves: The submission whose servers these are; empty where the script was handed in by hand.
    idle_s: Seconds without a supervisor of the trial after which the servers end.
    rules: Section `recover` of the configuration: when a replica counts as hanging.
    end_time: When Slurm ends this job, Unix seconds, or None; asked rarely.
    """

    def __init__(
        self,
        attempt: Attempt,
        plan: Plan,
        units: list[Unit],
        steps: Steps,
        names: NameResolve,
        serves: str,
        idle_s: float,
        rules: RecoverConfig,
        end_time: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.attempt, self.trial, self.plan, self.steps, self.names = (
            attempt,
            attempt.trial,
            plan,
            steps,
            names,
        )
        self.serves, self.idle_s, self._end_time = serves, idle_s, end_time
        incarnations = ownership.next_incarnations(attempt) if attempt.dir.is_dir() else {}
        self._machine = Supervisor(units, "auto", UNLIMITED, 0, incarnations)
        self._liveness = Liveness(rules.hang_factor, rules.hang_min_s, rules.hang_max_s)
        self._avoid_hours = rules.avoid_hours
        self._events = Events(attempt)
        self._handles: dict[Key, tuple[Handle, int]] = {}
        self._finish: Finish | None = None
        self._wishes: list[str] = []
        self._why = ""  # the stop that was asked for
        self._over = ""  # why the trial needs these servers no more
        self._owned_at = time.monotonic()
        self._look_at = self._ask_at = float("-inf")
        self._ends_at: float | None = None

    def run(self) -> int:
        """Until the trial is over (0), the time is (75), or no replica can be kept alive (70). Raises OSError."""
        obey_signals(self._wish)
        self.attempt.make_dirs()
        self._events.write(
            "supervisor_started", {"role": "supervisor", "pid": os.getpid(), "serves": self.serves}
        )
        tell_script(self.attempt)
        self._look()
        if self._over:
            self._finish = Finish(ExitCode.DONE, self._over)
        else:
            self._do(self._machine.start(time.monotonic()))
        while self._finish is None:
            self._round()
            time.sleep(TICK_S)
        code, reason = self._finish.code, self._finish.reason
        if code == ExitCode.STOPPED:
            code, reason = (
                (ExitCode.DONE, self._over) if self._over else (ExitCode.STOPPED, self._why or reason)
            )
        tell_script(self.attempt)
        self._events.ended(code, reason)
        with suppress(OSError):  # the exit code tells too
            write_json(self.attempt.ended, {"exit_code": int(code), "reason": reason, "time": time.time()})
        return code

    def _round(self) -> None:
        now = time.monotonic()
        self._liveness.round(now)
        if now - self._look_at >= LOOK_EVERY_S:
            self._look()
        why = self._over or (self._wishes[0] if self._wishes else "") or self._time_over(now)
        if why and not self._why:
            self._why = why
            self._do(self._machine.stop(now, why))
        for key, (handle, incarnation) in list(self._handles.items()):
            code = handle.poll()
            if code is not None:
                self._ended(key, incarnation, code)
        self._do(self._machine.tick(time.monotonic()))

    def _look(self) -> None:
        self._look_at = time.monotonic()
        try:
            self._over = self._over or self._trial_over()
            self._look_for_hangs(self._look_at)
        except OSError as error:  # a shared file system may fail for a moment
            logger.warning("looking at the trial: %s", error)

    def _look_for_hangs(self, now: float) -> None:
        leases = self.names.leases(keys.SERVERS)
        self._liveness.observe_leases(leases, self.attempt.id, now)
        for key, incarnation in serving(leases, self.attempt.id):
            self._machine.served(now, key, incarnation)
        if self._machine.phase is Phase.RUNNING:
            for key, why in self._liveness.hung(now, 0.0, list(self._handles)):
                self._do(self._machine.hung(now, key, why))

    def _trial_over(self) -> str:
        """Why the trial needs no servers of this task any more; "" while it does. Raises OSError."""
        done: Any = read_json(self.trial.done)
        if isinstance(done, dict) and self.serves in ("", done.get("job_id")):
            return "the trial has reached its end"
        array = submission_of(self.attempt.id).partition("_")[0]
        if any(self.trial.cancel_intent(job).exists() for job in (self.serves, array) if job):
            return "cancelled by a person"
        said = record.read(self.trial, self.serves)[-1:] if self.serves else []
        if said and said[0]["event"] == "ended":
            return f"job {self.serves} has ended: {said[0].get('reason') or 'without a reason'}"
        owner = self.names.leases(keys.OWNER).get(keys.OWNER)
        now = time.monotonic()
        if owner is None or not owner.alive:
            gone = f"the trial has had no supervisor for {self.idle_s:g} s (launcher.slurm.servers.idle_s)"
            return gone if now - self._owned_at >= self.idle_s else ""
        self._owned_at = now
        other = submission_of(str(owner.value.get("attempt") or ""))
        return (
            f"job {other} runs the trial now, with servers of its own"
            if self.serves not in ("", other)
            else ""
        )

    def _time_over(self, now: float) -> str:
        if now - self._ask_at >= END_TIME_EVERY_S:
            self._ask_at, self._ends_at = now, self._end_time()
        late = self._ends_at is not None and time.time() >= self._ends_at - LEAD_S
        return "the job's time is nearly over" if late and self._lived_s() > LEAD_S else ""

    def _lived_s(self) -> float:
        """How long the replicas have run: a limit that is too short must not make them start and stop for ever."""
        slots = self._machine.slots.values()
        return max((time.monotonic() - slot.started_at for slot in slots), default=0.0)

    def _ended(self, key: Key, incarnation: int, raw_code: int) -> None:
        del self._handles[key]
        self._liveness.ended(key)
        with suppress(OSError):
            os.listdir(self.attempt.dir / "exits")  # drops what NFS remembers of names that were not there
        end = end_of(self.attempt, self._machine.slots[key].unit, incarnation, raw_code)
        self._do(self._machine.exited(time.monotonic(), key, incarnation, end))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start():
                    self._start(action)
                case AskToStop(key) if key in self._handles:
                    self._handles[key][0].ask_to_stop()
                case Kill(key) if key in self._handles:
                    self._handles[key][0].kill()
                case DumpStacks(key, hangs) if hangs and key in self._handles:
                    with suppress(OSError):  # the kill follows all the same
                        self._handles[key][0].dump_stacks()
                case Avoid(nodes, reason):
                    avoid(self.attempt, self._events, nodes, reason, self._avoid_hours)
                case Record(event, details):
                    self._events.write(event, details)
                case Finish():
                    self._finish = action

    def _start(self, action: Start) -> None:
        key = (action.unit.role, action.unit.index)
        try:
            handle = start_unit(self.steps, self.plan, self.attempt, action.unit, action.incarnation)
        except OSError as error:
            self._do(self._machine.exited(time.monotonic(), key, action.incarnation, not_started(error)))
            return
        self._handles[key] = (handle, action.incarnation)
        self._liveness.started(key, time.monotonic())

    def _wish(self, signal_name: str) -> None:
        self._look_at = float("-inf")  # a signal may tell of a wish
        self._wishes.append(signal_name)
