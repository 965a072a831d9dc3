"""Driver: the thin loop around the supervisor's state machine. It polls, reads wishes, renews the lease and writes events.

A kill at any instant leaves whole files from which the next supervisor goes on: what it knows beyond them (who runs, since
when) dies with the processes, whose pipes close.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_rl.checkpoint.lineage import attempts_of, failures_without_progress, submission_of
from hpc_rl.errors import ExitCode, SchedulerError, Stale
from hpc_rl.launch import takeover
from hpc_rl.launch.recover import drain_time, unit_end
from hpc_rl.launch.steps import Handle, ProcessSteps, SrunSteps, Steps, job_hosts
from hpc_rl.launch.supervisor import Action, AskToStop, End, Finish, Key, Kill, Record, Start, Supervisor
from hpc_rl.launch.tail import last_lines
from hpc_rl.name_resolve.base import Lease, NameResolve
from hpc_rl.plan.schema import Plan
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.stats.read import JsonLines
from hpc_rl.trial import Attempt, read_json, write_json

logger = logging.getLogger(__name__)
TICK_S = 0.1
LOOK_EVERY_S = 1.0
CLOCK_EVERY_S = 30.0
END_TIME_EVERY_S = 600.0  # limits can be changed, and the controller is shared
CANCELLED = "cancelled by a person"
LAST_WORDS = 200  # characters
SAME_TERM_S = 2.0  # the scheduler and the batch script both bring the same TERM


class Driver:
    """Args:
    attempt: The attempt to drive.
    plan: Its plan.
    steps: How processes are started.
    names: The trial's names.
    end_time: When the scheduler will end the job, Unix seconds, or None; asked rarely.
    """

    def __init__(
        self, attempt: Attempt, plan: Plan, steps: Steps, names: NameResolve, end_time: Callable[[], float | None]
    ) -> None:
        self.attempt, self.trial, self.plan, self.steps, self.names = attempt, attempt.trial, plan, steps, names
        self._end_time = end_time
        self._clock = time.monotonic
        self._handles: dict[Key, tuple[Handle, int]] = {}
        self._machine = Supervisor([], plan.recover_mode, plan.recover_retries)
        self._finish: Finish | None = None
        self._failed_starts: list[tuple[Key, int, End]] = []
        self._wishes: list[str] = []
        self._parent = int(os.environ.get("HPC_RL_SCRIPT_PID") or os.getppid())  # it may be dead already
        self._granted: set[str] = set()
        self._wrote_events = False
        self._generations: set[tuple[str, int]] = set()
        self._metrics: dict[Path, JsonLines] = {}
        self._longest = {"step_s": 0.0, "save_s": 0.0}
        self._ends_at: float | None = None
        self._drain_at = float("inf")
        self._started_at = time.time()
        self._look, self._renew, self._watch_clock, self._ask_end = map(
            _Every, (LOOK_EVERY_S, takeover.RENEW_EVERY_S, CLOCK_EVERY_S, END_TIME_EVERY_S)
        )

    def run(self) -> int:
        """Drive the attempt to its end; returns the exit code. Raises OSError when it can't even begin."""
        self._obey_signals()
        self.attempt.make_dirs()
        if self._is_done():
            return ExitCode.DONE
        lease = self._take_over()
        self._machine = self._restore()
        self._read_intents()
        self._look_for_the_script()
        self._grant_wishes()
        if self._finish is None:
            self._do(self._machine.start(self._clock()))
        while self._finish is None:
            self._round(lease)
            time.sleep(TICK_S)
        return self._leave(lease, self._finish)

    def _restore(self) -> Supervisor:
        """The state machine as the supervisors before this one left it."""
        self._generations = self._list_generations()
        events = [row for one in attempts_of(self.trial, self._job_id) for row in JsonLines(one.events).poll()]
        failures, incarnations = failures_without_progress(events), takeover.next_incarnations(self.attempt)
        return Supervisor(self.plan.units, self.plan.recover_mode, self.plan.recover_retries, failures, incarnations)

    @property
    def _job_id(self) -> str:
        return submission_of(self.attempt.id)

    def _is_done(self) -> bool:
        """A trial that this very job has finished is not started again; the mark of an earlier job is taken down."""
        done = read_json(self.trial.done)
        if isinstance(done, dict) and done.get("job_id") == self._job_id:
            return True
        self.trial.done.unlink(missing_ok=True)
        return False

    def _take_over(self) -> Lease:
        number = takeover.next_incarnations(self.attempt).get(("supervisor", 0), 0)
        takeover.leave_record(self.attempt, "supervisor", 0, number)
        self._event("supervisor_started", {"role": "supervisor", "number": number, "pid": os.getpid()})
        lease = takeover.take_ownership(self.names, self.attempt)
        for record in takeover.end_leftovers(self.trial):
            reason = "a process of an earlier start can't be ended"
            self._event("left_behind", {"role": record.role, "pid": record.pid, "reason": reason})
        return lease

    def _round(self, lease: Lease) -> None:
        now = self._clock()
        with _tolerant("looking around"):
            if self._look.due(now):
                self._read_intents()
                self._look_for_the_script()
                self._look_for_progress()
            if self._renew.due(now):
                self._renew_lease(lease, now)
            self._watch_wall_time(now)
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
        unit = self._machine.slots[key].unit
        with _tolerant("listing the exit records"):
            os.listdir(self.attempt.dir / "exits")  # drops what NFS remembers of names that were not there
        records = [read_json(self.attempt.exit_record(*key, incarnation, rank)) for rank in range(unit.num_tasks)]
        end = unit_end(records, raw_code)
        if not any(records) and not end.by_signal:
            end = replace(end, reason=end.reason + self._last_words(unit.num_tasks, *key, incarnation))
        with _tolerant("looking for generations"):
            self._look_for_progress()  # before the end counts as one without progress
        self._do(self._machine.exited(self._clock(), key, incarnation, end))

    def _last_words(self, num_ranks: int, role: str, index: int, incarnation: int) -> str:
        """How the log of an incarnation ends that left no record: what srun, or a full disk, had to say."""
        for rank in (None, *range(num_ranks)):
            said = last_lines(self.attempt.log(role, index, incarnation, rank), 1)
            if said and said[0].strip():
                return f"; its log ends: {said[0].strip()[:LAST_WORDS]}"
        return ""

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start():
                    self._start(action)
                case AskToStop(key) if key in self._handles:
                    self._handles[key][0].ask_to_stop()
                case Kill(key) if key in self._handles:
                    self._handles[key][0].kill()
                case Record(event, details):
                    self._event(event, details)
                case Finish():
                    self._finish = action

    def _start(self, action: Start) -> None:
        unit, incarnation = action.unit, action.incarnation
        flags = ["--trial_dir", str(self.trial.dir), "--attempt", self.attempt.id]
        flags += ["--index", str(unit.index), "--incarnation", str(incarnation)]
        key = (unit.role, unit.index)
        try:
            handle = self.steps.start(unit, [self.plan.python, "-m", unit.module, *flags], self.attempt, incarnation)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | PermissionError)
            end = End(ExitCode.BAD_CONFIG if missing else ExitCode.FAILED, f"can't be started: {error}")
            self._failed_starts.append((key, incarnation, end))
            return
        self._handles[key] = (handle, incarnation)
        with _tolerant("recording processes"):
            takeover.leave_client_records(self.attempt, unit, incarnation, handle.children)

    def _obey_signals(self) -> None:
        terms: list[float] = []

        def on_signal(number: int, _frame: object) -> None:
            if number == signal.SIGTERM:
                terms.append(time.monotonic())
                if terms[-1] - terms[0] > SAME_TERM_S:
                    os._exit(ExitCode.KILLED_BY_SYSTEM)  # the roles end by their pipes
            self._wishes.append(signal.Signals(number).name)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, on_signal)

    def _read_intents(self) -> None:
        name = self.trial.cancel_intent(self._job_id).name
        if self.trial.intent.is_dir() and name in os.listdir(self.trial.intent):
            self._wishes.append(CANCELLED)

    def _look_for_the_script(self) -> None:
        """Without the batch script nobody would record the end or start anything again, and no signal would come."""
        if os.getppid() != self._parent:
            self._wishes.append("the batch script that started the supervisor was killed")

    def _grant_wishes(self) -> None:
        if self._wishes:
            self._read_intents()  # a signal may tell of an intent, whose words say more than the signal's name
            self._wishes.sort(key=lambda why: why != CANCELLED)
        while self._wishes:
            why = self._wishes.pop(0)
            repeated = why in self._granted
            self._granted.add(why)
            if not repeated:
                self._do(self._machine.stop(self._clock(), why))

    def _renew_lease(self, lease: Lease, now: float) -> None:
        try:
            lease.renew()
        except Stale as error:
            self._do(self._machine.abandon(now, ExitCode.FAILED, f"another supervisor owns the trial now ({error})"))

    def _list_generations(self) -> set[tuple[str, int]]:
        with os.scandir(self.trial.recover) as entries:
            return {(entry.name, entry.inode()) for entry in entries if entry.name.startswith("gen-")}

    def _look_for_progress(self) -> None:
        found = self._list_generations()
        for name, _ in sorted(found - self._generations):
            step = name.removeprefix("gen-")
            if step.isdigit():
                self._do(self._machine.progressed(int(step)))
        self._generations |= found

    def _watch_wall_time(self, now: float) -> None:
        if self.plan.recover_mode == "disabled":
            return  # nothing would be saved
        if self._ask_end.due(now):
            ends_at = self._end_time()
            if ends_at != self._ends_at and ends_at is not None:
                self._event("end_time", {"ends_at": ends_at, "reason": "the scheduler ends the job then"})
            self._ends_at = ends_at
        if self._ends_at is None:
            return
        if self._watch_clock.due(now):
            self._read_metrics()
            self._drain_at = drain_time(self._started_at, self._ends_at, self._longest["step_s"], self._longest["save_s"])
        if time.time() >= self._drain_at:
            self._wishes.append("the job's time is nearly over")

    def _read_metrics(self) -> None:
        for path in self.attempt.dir.glob("metrics.*.jsonl"):
            file = self._metrics.setdefault(path, JsonLines(path))
            for row in file.poll():
                for name, longest in self._longest.items():
                    if isinstance(row.get(name), int | float):
                        self._longest[name] = max(longest, float(row[name]))
            file.rows.clear()

    def _leave(self, lease: Lease, finish: Finish) -> int:
        record = {"exit_code": finish.code, "reason": finish.reason, "time": time.time()}
        self._event("ended", {"role": "supervisor", "code": finish.code, "reason": finish.reason})
        with _tolerant("writing how it ended"):  # the exit code tells too, and the script has that
            write_json(self.attempt.ended, record)
            if finish.code == ExitCode.DONE:
                write_json(self.trial.done, {"attempt": self.attempt.id, "job_id": self._job_id, "time": time.time()})
            lease.release()
        return finish.code

    def _event(self, event: str, details: dict[str, Any]) -> None:
        """One line, opened and closed each time so that readers on other nodes see it. Never ends the supervisor."""
        line = json.dumps({"time": time.time(), "event": event, **details}) + "\n"
        logger.info("%s %s", event, details)
        with _tolerant("writing an event"), self.attempt.events.open("a+b") as file:
            if file.seek(0, os.SEEK_END) and not self._wrote_events:
                line = "\n" + line  # whatever a killed supervisor left of its last line
            self._wrote_events = True
            file.write(line.encode())


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


@contextmanager
def _tolerant(doing: str) -> Iterator[None]:
    """A shared file system that fails for a moment must not end a trial: said loudly, tried again in the next round."""
    try:
        yield
    except OSError as error:
        logger.error("%s: %s", doing, error)


def open_steps(kind: str, plan: Plan) -> Steps:
    """`srun` within a Slurm job, `process` on this machine. Raises SchedulerError."""
    if kind == "process":
        return ProcessSteps()
    with_gpus = plan.slurm_knows_gpus and any(unit.gpus_per_task for unit in plan.units)
    if plan.layout != "hetjob":
        return SrunSteps(job_hosts(os.environ["SLURM_JOB_NODELIST"]), with_gpus)
    parts = [job_hosts(os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{number}"]) for number in range(len(plan.groups))]
    components = [number for number, hosts in enumerate(parts) for _ in hosts]
    return SrunSteps([host for hosts in parts for host in hosts], with_gpus, components=components)


def job_end_time() -> float | None:
    """When Slurm will end this job; None outside of one, or when Slurm can't say now."""
    given = os.environ.get("SLURM_JOB_END_TIME", "")
    job_id = os.environ.get("SLURM_JOB_ID")
    if given.isdigit() or job_id is None:
        return float(given) if given.isdigit() else None
    try:
        return SlurmScheduler().end_time(job_id)
    except SchedulerError as error:
        logger.warning("no end time from the scheduler: %s", error)
        return None
