"""The life of a trial on a virtual clock: jobs, attempts, units, failures, and the starts after them.

Decisions are made by the supervisor's state machine, its deadline, the failure policy, the policy of the job
script, and the choice of a checkpoint, as in a real trial.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from hpc_rl.checkpoint.decide import Cause, GenerationInfo, PastStart, Situation, decide
from hpc_rl.checkpoint.start_facts import CAUSES
from hpc_rl.core.errors import ExitCode, FailureClass, StopCause
from hpc_rl.core.records import Event as LoggedEvent
from hpc_rl.core.records import EventKind
from hpc_rl.simulate.batches import Batches
from hpc_rl.simulate.clock import Activity, Clock, Event, Steps
from hpc_rl.simulate.cluster import Cluster
from hpc_rl.simulate.costs import Costs
from hpc_rl.simulate.server_jobs import ServerJobs
from hpc_rl.simulate.setup import Faults, Kill, Setup
from hpc_rl.simulate.timeline import Timeline
from hpc_rl.simulate.trainer import Saved, StepRow, Trainer
from hpc_rl.stats.tracker import compute_p95
from hpc_rl.status.goodput import Bucket
from hpc_rl.supervise import failure_policy, job_policy, state_machine
from hpc_rl.supervise.deadline import MAX_TIMES, JobDeadline
from hpc_rl.supervise.failure_policy import KILLED, UnitExit
from hpc_rl.supervise.state_machine import DRAIN_GRACE_S, Action, AttemptMachine, Finish, Key, Phase

AVOID_S = 24 * 3600.0
EXIT_S = 0.5  # from a request to stop to the exit of a server or the rollout role
TICK_S = 1.0
LEFT_STEPS = 20  # the end of the job matters to the rollout role this many steps before it


@dataclass
class StepTimes:
    """The durations that the deadline needs (supervise/deadline.py reads them from metrics)."""

    rows: list[StepRow] = field(default_factory=list)

    def poll(self) -> None:
        """Nothing to read: the trainer adds its rows."""

    @property
    def step_s(self) -> float:
        return compute_p95(row.step_s for row in self.rows[-MAX_TIMES:])

    @property
    def save_s(self) -> float:
        return compute_p95(row.save_s for row in self.rows[-MAX_TIMES:] if row.save_s > 0)


class Life:
    """A simulated trial, from its submission to its end."""

    def __init__(self, setup: Setup, costs: Costs, faults: Faults, seed: int = 0) -> None:
        self.setup, self.costs, self.faults = setup, costs.cap_lengths(setup.max_new_tokens), faults
        self.clock, self.drawn = Clock(), random.Random(seed)
        self.cluster = Cluster(self.clock, setup.num_job_nodes, faults, self.drawn)
        self.batches = Batches(self.clock, setup, self.costs, self.drawn)
        self.server_jobs = ServerJobs(self.clock, setup, self.costs, faults, self.drawn, self.count_servers)
        self.timeline = Timeline(setup, self.clock)
        self.rows: list[StepRow] = []
        self.saved: list[Saved] = []
        self.exit_code: int | None = None
        self.reason = ""
        self.num_attempts = 0
        self.num_node_failures = 0
        self.trained_tokens: dict[int, float] = {}  # by step
        self.first_start_s = 0.0
        self.lineage = -1
        self.past: list[PastStart] = []  # starts of the trainer without a new checkpoint
        self.cause: Cause | None = None  # why its previous start ended
        self.histories: list[list[LoggedEvent]] = []  # of the attempts
        self.attempt: Attempt | None = None
        self.clock.begin(self._live())

    def run(self, limit_s: float) -> bool:
        """Run to the end, or until the limit; return whether the trial has ended."""
        ended = self.clock.run(lambda: self.exit_code is not None, limit_s)
        self.timeline.close(self.batches.fleet)
        return ended

    @property
    def num_failed_nodes(self) -> int:
        """Failures of nodes, of all jobs."""
        return self.num_node_failures + self.server_jobs.num_failures

    def count_servers(self) -> None:
        """Tell the fleet how many servers serve, in all jobs."""
        own = len(self.attempt.serving) if self.attempt else 0
        self.batches.fleet.resize(own + self.server_jobs.num_serving)

    @property
    def has_servers(self) -> bool:
        return bool(self.server_jobs.num_serving or (self.attempt and self.attempt.serving))

    def _live(self) -> Steps:
        is_requeued, code, reason = False, 0, ""
        while True:
            wait_s = self.cluster.draw_wait(is_requeued)
            begun = self.clock.now
            yield wait_s
            while not isinstance(nodes := self.cluster.allocate(), list):
                if math.isinf(nodes):
                    return self._end(int(ExitCode.SCHEDULER), "the partition never has enough nodes")
                yield nodes - self.clock.now
            self.timeline.queued_s += self.clock.now - begun
            if not self.num_attempts:
                self.first_start_s = self.clock.now
            self.num_attempts += 1
            if self._is_hopeless():
                return self._end(
                    int(ExitCode.FAILED), "too many attempts in a row ended without a new checkpoint"
                )
            attempt = self.attempt = Attempt(self, nodes, self.num_attempts - 1)
            self.histories.append(attempt.events)
            self.timeline.begin_attempt()
            yield from attempt.live()
            self.timeline.end_attempt(self.batches.fleet)
            self.attempt = None
            code, reason = attempt.code, attempt.reason
            if attempt.is_lost:  # Slurm requeues a job that lost its first node, or was preempted
                is_requeued = True
                continue
            facts = job_policy.Facts(code, self.setup.recover_mode)
            decision = job_policy.decide_requeue(facts)
            if not decision.starts_again:
                return self._end(code, reason or decision.reason)
            is_requeued = True

    def _is_hopeless(self) -> bool:
        limit = max(failure_policy.MAX_FRUITLESS_ATTEMPTS, self.setup.recover_retries + 1)
        return failure_policy.count_fruitless_attempts(self.histories) >= limit

    def _end(self, code: int, reason: str) -> None:
        self.exit_code, self.reason = code, reason


class Attempt:
    """One start of the job: the supervisor with its units."""

    def __init__(self, life: Life, nodes: list[str], restart: int) -> None:
        self.life, self.nodes, self.restart = life, nodes, restart
        self.clock, self.setup, self.costs, self.faults = life.clock, life.setup, life.costs, life.faults
        units = self.setup.list_job_units()
        self.machine = AttemptMachine(
            [unit for unit, _ in units], self.setup.recover_mode, self.setup.recover_retries
        )
        self.events: list[LoggedEvent] = []
        self.code, self.reason, self.is_lost, self.is_over = 0, "", False, False
        self._over = Event()
        self._trainer: Trainer | None = None
        self._activity: Activity | None = None
        self.serving: set[Key] = set()
        self._times = StepTimes()
        self._by_node: dict[int, list[Key]] = defaultdict(list)
        for unit, places in units:
            for place in places:
                self._by_node[place].append((unit.role, unit.index))
        self._deadline: JobDeadline | None = None
        self._watches_at = 0.0  # the next look at the deadline between steps

    def live(self) -> Steps:
        yield self.costs.start_job_s
        end = None if self.setup.time_limit_s is None else self.clock.now + self.setup.time_limit_s
        now = lambda: self.clock.now  # noqa: E731
        if end is not None:
            self._deadline = JobDeadline(lambda: end, self._times, clock=now, wall_clock=now)  # type: ignore[arg-type]
            self._deadline.update()
            self._watch_deadline()
            self.clock.after(end - self.clock.now, lambda: self._vanish("the time limit"))
        self.life.batches.stops_at = None
        self._schedule_faults()
        self._execute(self.machine.start(self.clock.now))
        while not self.is_over:
            yield self._over

    # -- actions of the state machine

    def _execute(self, actions: Iterable[Action]) -> None:
        starts: list[state_machine.Start] = []
        for action in actions:
            match action:
                case state_machine.Start():
                    starts.append(action)
                case state_machine.AskToStop(key):
                    self._ask_to_stop(key)
                case state_machine.Kill(key):
                    self._kill(key, UnitExit(KILLED, "killed"))
                case state_machine.Avoid(nodes, _, _):
                    self.life.cluster.avoid(nodes, AVOID_S)
                case state_machine.LogEvent(kind, details):
                    self._log(kind, details)
                case Finish(code, reason):
                    self._finish(code, reason)
        self._start(starts)

    def _log(self, kind: EventKind, details: dict[str, object]) -> None:
        failure = FailureClass(str(details.get("class", FailureClass.UNKNOWN)))
        if kind in (EventKind.PROGRESS, EventKind.STOPPING):
            self.events.append(LoggedEvent(kind=kind, failure=failure))

    def _start(self, starts: list[state_machine.Start]) -> None:
        """Start units; units of one role that start together are ready together."""
        costs = self.costs
        steps = len({start.unit.nodes[0] for start in starts})
        launch_s = steps * costs.start_step_s + len(starts) * costs.start_unit_ops / costs.file_ops_per_s
        by_role: dict[str, list[tuple[Key, int]]] = defaultdict(list)
        for start in starts:
            by_role[start.unit.role].append(((start.unit.role, start.unit.index), start.incarnation))
        ready = {
            "server": costs.start_server_s,
            "rollout": costs.start_rollout_s,
            "trainer": costs.start_trainer_s,
        }
        for role, units in by_role.items():
            self.clock.after(launch_s + ready.get(role, 0.0), partial(self._serve, units))

    def _serve(self, units: list[tuple[Key, int]]) -> None:
        if self.is_over:
            return
        for key, incarnation in units:
            slot = self.machine.slots[key]
            if slot.incarnation != incarnation or slot.state is not state_machine.SlotState.RUNNING:
                continue
            if key[0] == "server":
                self.serving.add(key)
                self.machine.note_serving(self.clock.now, key, incarnation)
            elif key[0] == "rollout":
                self.life.batches.come_up()
                self.life.batches.changed.fire()
            elif key[0] == "trainer":
                self._start_trainer(incarnation)
        self.life.count_servers()

    def _ask_to_stop(self, key: Key) -> None:
        if key[0] == "trainer":
            if self._trainer is None:
                self.clock.after(EXIT_S, lambda: self._kill(key, UnitExit(ExitCode.STOPPED, "")))
            else:
                self._trainer.stopping = True
                self.life.batches.changed.fire()
        else:
            self.clock.after(EXIT_S, lambda: self._kill(key, UnitExit(ExitCode.STOPPED, "")))

    def _kill(self, key: Key, found: UnitExit) -> None:
        """End a unit, and tell the state machine."""
        slot = self.machine.slots.get(key)
        if self.is_over or slot is None or slot.state is not state_machine.SlotState.RUNNING:
            return
        if key[0] == "trainer" and self._trainer is not None:
            self._stop_trainer(Cause.FAILED if found.is_failure else Cause.STOPPED)
        elif key[0] == "rollout":
            self.life.batches.go_down()
        elif key[0] == "server" and key in self.serving:
            self.serving.discard(key)
            self.life.count_servers()
        self._report(key, found)

    def _report(self, key: Key, found: UnitExit) -> None:
        slot = self.machine.slots[key]
        self._execute(self.machine.handle_exit(self.clock.now, key, slot.incarnation, found))
        if self.machine.phase is not Phase.RUNNING:
            return
        due = [
            one.restart_at
            for one in self.machine.slots.values()
            if one.state in (state_machine.SlotState.PAUSED, state_machine.SlotState.GAVE_UP)
        ]
        if due and min(due) < math.inf:
            self._tick_after(min(due) - self.clock.now)

    def _tick_after(self, delay_s: float) -> None:
        self.clock.after(
            delay_s, lambda: None if self.is_over else self._execute(self.machine.tick(self.clock.now))
        )

    def _finish(self, code: int, reason: str) -> None:
        if not self.is_over:
            self.is_over, self.code, self.reason = True, code, reason
            self._leave(self._find_cause())

    def _find_cause(self) -> Cause:
        """Return why a trainer that was asked to stop has stopped."""
        cause = self.machine.stop_cause
        return Cause.STOPPED if cause is None else CAUSES.get(cause, Cause.STOPPED)

    def _leave(self, cause: Cause) -> None:
        if self._trainer is not None:
            self._stop_trainer(cause)
        self.serving.clear()
        self.life.batches.go_down()
        self.life.count_servers()
        self._over.fire()

    # -- the trainer

    def _start_trainer(self, incarnation: int) -> None:
        life = self.life
        newest = {one.step: one for one in life.saved}
        infos = tuple(GenerationInfo(one.step, one.lineage, "job", True) for one in newest.values())
        situation = Situation(
            mode=self.setup.recover_mode,
            start_mode=self.setup.recover_mode,
            first_start=life.lineage < 0,
            generations=infos,
            ancestry=frozenset({"job"}),
            cause=life.cause,
            history=tuple(life.past),
            retries=self.setup.recover_retries,
            trimmed=life.batches.sequencer.log.trimmed,
        )
        decision = decide(situation)
        key = ("trainer", 0)
        if decision.action not in ("load", "fresh"):
            self._report(key, UnitExit(decision.exit_code, decision.reason, final=True))
            return
        life.lineage += 1
        life.past.append(PastStart(f"job.{self.restart}", incarnation, Cause.FAILED))
        saved = newest[decision.step] if decision.step is not None else None
        step = saved.step if saved else 0
        life.timeline.lose_after(step)
        trainer = self._trainer = Trainer(
            clock=self.clock, setup=self.setup, costs=self.costs, batches=life.batches,
            lineage=life.lineage, step=step,
            does=life.timeline.does, on_step=self._note_step, on_save=self._note_save,
        )  # fmt: skip
        if saved:
            trainer.restore(saved)
        self._activity = self.clock.begin(self._train(trainer, saved is not None))

    def _train(self, trainer: Trainer, loads: bool) -> Steps:
        self.life.timeline.does(Bucket.START, trainer.step)
        yield self.costs.load_s if loads else 0.0
        while not self.life.has_servers:  # a publication waits for the first server
            yield 1.0
        yield from trainer.train()
        self._activity = None  # this one, which ends by itself
        self._stop_trainer(self._find_cause())
        self._report(("trainer", 0), UnitExit(trainer.exit_code or 0, ""))

    def _stop_trainer(self, cause: Cause) -> None:
        life = self.life
        if self._trainer is not None:
            self._trainer.kill()
            self._trainer = None
        if self._activity is not None:
            self._activity.stop()
            self._activity = None
        life.cause = cause
        if life.past:
            last = life.past[-1]
            life.past[-1] = PastStart(last.attempt, last.incarnation, cause)
        life.timeline.does(Bucket.START, None)

    def _note_step(self, row: StepRow) -> None:
        self.life.rows.append(row)
        tokens = self.life.batches.tokens.get(row.step, 0) * self.life.batches.weight
        self.life.trained_tokens[row.step] = tokens  # a repeated step counts once
        self._times.rows.append(row)
        batches = self.life.batches
        if self._deadline is not None:
            self._deadline.update()
            self._watch_deadline()
            left_s = self._deadline.until_drain_s
            near = left_s < LEFT_STEPS * max(self._times.step_s, batches.issue_clock.usual_s)
            batches.stops_at = self.clock.now + left_s if near else None

    def _note_save(self, saved: Saved) -> None:
        life = self.life
        life.saved = [*(one for one in life.saved if one.step < saved.step), saved][-self.setup.keep :]
        life.past.clear()
        life.batches.trim(life.saved[0].step)
        self._execute(self.machine.note_progress(saved.step))

    # -- the scheduler and the nodes

    def _watch_deadline(self) -> None:
        deadline = self._deadline
        if self.is_over or deadline is None or self.machine.phase is not Phase.RUNNING:
            return
        if self.setup.recover_mode == "disabled":
            return
        if deadline.is_reached():
            self._stop(StopCause.TIME_LIMIT)
        elif self.clock.now >= self._watches_at:
            self._watches_at = self.clock.now + max(TICK_S, deadline.until_drain_s)
            self.clock.after(self._watches_at - self.clock.now, self._watch_deadline)

    def _stop(self, cause: StopCause) -> None:
        grace_s = self._deadline.compute_grace_s(DRAIN_GRACE_S) if self._deadline else DRAIN_GRACE_S
        self.machine.drain_grace_s = grace_s
        self._execute(self.machine.stop(self.clock.now, cause))
        self._tick_after(grace_s + 0.1)

    def _schedule_faults(self) -> None:
        faults, drawn, life = self.faults, self.life.drawn, self.life
        if faults.mtbf_s < math.inf:
            self._repeat(faults.mtbf_s / len(self.nodes), self._fail_node)
        if faults.preempt_every_s < math.inf and self.setup.layout != "jobs":  # else its server jobs
            self.clock.after(drawn.expovariate(1 / faults.preempt_every_s), self._preempt)
        if faults.purge_every_s < math.inf:
            self._repeat(faults.purge_every_s, lambda: life.saved[-1:] and life.saved.pop())
        passed = self.clock.now - life.first_start_s
        for kill in faults.kills:
            if kill.at_s >= passed:
                self.clock.after(kill.at_s - passed, partial(self._inject, kill))

    def _repeat(self, mean_s: float, call: Callable[[], object]) -> None:
        def happen() -> None:
            if not self.is_over:
                call()
                self.clock.after(self.life.drawn.expovariate(1 / mean_s), happen)

        self.clock.after(self.life.drawn.expovariate(1 / mean_s), happen)

    def _inject(self, kill: Kill) -> None:
        if kill.role == "job":
            self._vanish("killed")
        else:
            self._kill((kill.role, 0), UnitExit(KILLED, "killed"))

    def _fail_node(self) -> None:
        index = self.life.drawn.randrange(len(self.nodes))
        name = self.nodes[index]
        if self.life.cluster.up_at[name] > self.clock.now:
            return  # it is down already
        self.life.num_node_failures += 1
        self.life.cluster.fail(name)
        # what runs there does nothing from now on; Slurm notices later
        for key in self._by_node[index]:
            if key[0] == "trainer" and self._trainer is not None:
                self._freeze_trainer()
            elif key[0] == "server" and key in self.serving:
                self.serving.discard(key)
                self.life.count_servers()
        self.clock.after(self.faults.notice_s, lambda: self._notice(index, name))

    def _freeze_trainer(self) -> None:
        self.life.timeline.does(Bucket.LOST, None)
        if self._trainer is not None:
            self._trainer.kill()
        if self._activity is not None:
            self._activity.stop()

    def _notice(self, index: int, name: str) -> None:
        if self.is_over:
            return
        if index == 0:
            return self._vanish(f"lost its first node {name}")
        found = UnitExit(KILLED, f"lost its node {name}", FailureClass.NODE, (name,), out_of_contact=True)
        for key in self._by_node[index]:
            self._kill(key, found)

    def _preempt(self) -> None:
        if self.is_over:
            return
        self._stop(StopCause.PREEMPTION)
        self.is_lost = True
        self.clock.after(self.faults.preempt_grace_s, lambda: self._vanish("preempted"))

    def _vanish(self, reason: str) -> None:
        """End the job at once, as Slurm does; it starts again."""
        if not self.is_over:
            self.is_over, self.is_lost, self.reason = True, True, reason
            self._leave(Cause.NODE)
