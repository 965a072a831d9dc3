"""The pure state machine of one attempt: events in, actions out. It owns no processes, files or clocks.

The leader is the trainer, or the rollout role of a trial without one. Phases: RUNNING until a stop is
requested or the leader exits for good; DRAINING while the leader saves and the other units still serve it;
ENDING while all units stop; OVER. `now` is any monotonic clock, in seconds.
"""

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.core.errors import ExitCode, FailureClass, StopCause
from hpc_rl.core.records import EventKind
from hpc_rl.plan.schema import Unit
from hpc_rl.supervise import failure_policy
from hpc_rl.supervise.bad_nodes import NodeTrouble
from hpc_rl.supervise.failure_policy import STOPS, Consequence, UnitExit

DRAIN_GRACE_S = 120.0
END_GRACE_S = 15.0
KILL_GRACE_S = 25.0  # after the kill, then processes are left behind; an agent's srun is killed after 20 s
STACKS_S = 3.0  # time for the processes of a hanging unit to dump their stacks

Key = tuple[str, int]


@dataclass(frozen=True)
class Start:
    """Start the next incarnation of a unit."""

    unit: Unit
    incarnation: int


@dataclass(frozen=True)
class AskToStop:
    """Ask a unit to save and stop. Idempotent."""

    key: Key


@dataclass(frozen=True)
class Kill:
    key: Key


@dataclass(frozen=True)
class DumpStacks:
    """Let every process of a unit dump its stacks; by a signal if it hangs."""

    key: Key
    hangs: bool


@dataclass(frozen=True)
class Avoid:
    """Keep the next attempt off these nodes."""

    nodes: tuple[str, ...]
    reason: str
    trouble: NodeTrouble = NodeTrouble.FAILED


@dataclass(frozen=True)
class Replace:
    """Get other nodes for a server: the job has lost a node of it for good."""

    unit: Unit


@dataclass(frozen=True)
class LogEvent:
    """Write a line of events.jsonl."""

    kind: EventKind
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finish:
    """Exit with this code: the attempt is over."""

    code: int
    reason: str


Action = Start | AskToStop | Kill | DumpStacks | Avoid | Replace | LogEvent | Finish


class Phase(enum.Enum):
    RUNNING = "running"
    DRAINING = "draining"
    ENDING = "ending"
    OVER = "over"


class SlotState(enum.Enum):
    IDLE = "idle"  # not started, or exited for good
    RUNNING = "running"
    PAUSED = "paused"  # restarts at `restart_at`
    GAVE_UP = "gave up"  # its peers work without it; tries again at `restart_at`


@dataclass
class Slot:
    unit: Unit
    incarnation: int = 0  # of the next start
    state: SlotState = SlotState.IDLE
    started_at: float = 0.0
    served_at: float | None = None  # first time that this incarnation of a server served
    restart_at: float = 0.0
    exits_in_a_row: int = 0
    killed_as: UnitExit | None = None  # replaces its exit code
    kill_at: float = 0.0
    lost_node: bool = False

    @property
    def key(self) -> Key:
        return self.unit.role, self.unit.index

    @property
    def about(self) -> dict[str, Any]:
        """Fields that identify the unit in events."""
        return {"role": self.unit.role, "index": self.unit.index}

    @property
    def about_incarnation(self) -> dict[str, Any]:
        return self.about | {"incarnation": self.incarnation}

    @property
    def name(self) -> str:
        return f"{self.unit.role} {self.unit.index}"

    def was_healthy(self, now: float) -> bool:
        """Return whether an incarnation that exits now is not part of a crash loop."""
        since = self.served_at if self.unit.role == "server" else self.started_at
        return since is not None and now - since >= failure_policy.HEALTHY_LIFE_S


class AttemptMachine:
    """The units of one attempt, under `recover.mode` and `recover.retries`."""

    def __init__(self, units: list[Unit], mode: str, retries: int) -> None:
        self.slots: dict[Key, Slot] = {(unit.role, unit.index): Slot(unit) for unit in units}
        # its exit ends the attempt; an attempt of a server job has none
        self.leader = self.slots.get(("trainer", 0)) or self.slots.get(("rollout", 0))
        self.mode, self.retries = mode, retries
        self.failures = 0  # failures that use up retries, in a row without a new generation
        self.phase = Phase.RUNNING
        self.drain_grace_s = DRAIN_GRACE_S
        self.stop_cause: StopCause | None = None
        self._stop_reason = ""
        self._may_stop_for: StopCause | None = None  # why a trainer may stop by itself
        self._result: Consequence | None = None  # fixed before the trainer has exited
        self._deadline = 0.0
        self._killed = False
        self._num_running = 0  # counted, because 10,000 servers exit one by one
        # of 10,000 slots, so that `tick` looks at few
        self._waiting: dict[Key, Slot] = {}  # paused, or gave up
        self._doomed: dict[Key, Slot] = {}  # with `killed_as`

    def restore(self, failures: int, incarnations: dict[Key, int]) -> None:
        """Continue from earlier supervisors: their failures, and each unit's next incarnation."""
        self.failures = failures
        for key in self.slots.keys() & incarnations.keys():
            self.slots[key].incarnation = incarnations[key]

    def start(self, now: float) -> list[Action]:
        return [action for slot in self.slots.values() for action in self._start(slot, now)]

    def note_progress(self, step: int) -> list[Action]:
        """Note a new generation: earlier exits of a helper without a peer were not a crash loop."""
        self.failures = 0
        peers = Counter(slot.unit.role for slot in self.slots.values())
        for slot in self.slots.values():
            if peers[slot.unit.role] == 1:
                slot.exits_in_a_row = 0
        return [LogEvent(EventKind.PROGRESS, {"step": step})]

    def stop(self, now: float, cause: StopCause, reason: str = "") -> list[Action]:
        """Save the state and end the attempt."""
        usual_reason, failure = STOPS[cause]
        reason = reason or usual_reason
        details = {"cause": cause.value, "reason": reason}
        if self.phase is not Phase.RUNNING:
            return [LogEvent(EventKind.STOP_REPEATED, details)]
        self.stop_cause, self._stop_reason = cause, reason
        return [LogEvent(EventKind.STOPPING, details | {"class": failure.value}), *self._drain(now)]

    def note_serving(self, now: float, key: Key, incarnation: int) -> None:
        """Note that a server serves. It may load for a long time and then fail at the first request."""
        slot = self.slots.get(key)
        if slot is not None and slot.incarnation == incarnation and slot.served_at is None:
            slot.served_at = now

    def announce_end(self, cause: StopCause) -> None:
        """From now on, expect a trainer without batches to stop by itself."""
        self._may_stop_for = cause

    def kill_hung(self, now: float, key: Key, why: str) -> list[Action]:
        """Let all units dump their stacks, then kill the unit that hangs."""
        slot = self.slots[key]
        if not self._can_be_killed(slot):
            return []
        slot.killed_as = UnitExit(failure_policy.KILLED, why, FailureClass.INFRASTRUCTURE)
        self._doomed[slot.key] = slot
        slot.kill_at = now + STACKS_S
        event = LogEvent(EventKind.HUNG, slot.about_incarnation | {"reason": why})
        return [event, *(DumpStacks(one.key, one is slot) for one in self._list_running())]

    def kill_unplaced(self, key: Key, why: str) -> list[Action]:
        """Kill a unit whose processes the scheduler failed to start."""
        slot = self.slots[key]
        if not self._can_be_killed(slot):
            return []
        self._doomed[slot.key] = slot
        slot.killed_as = failure_policy.make_unplaced_exit(
            slot.unit.role, why, is_first_start=slot.incarnation == 0
        )
        slot.kill_at = float("inf")
        return [LogEvent(EventKind.UNPLACED, slot.about_incarnation | {"reason": why}), Kill(key)]

    def _can_be_killed(self, slot: Slot) -> bool:
        return self.phase is Phase.RUNNING and slot.state is SlotState.RUNNING and slot.killed_as is None

    def abandon(self, now: float, code: int, why: str) -> list[Action]:
        """Kill all units without saving."""
        if self.phase is Phase.OVER or (self.phase is Phase.ENDING and self._killed):
            return []
        return [
            LogEvent(EventKind.ABANDONING, {"reason": why}),
            *self._end_all(now, Consequence(False, code, why), by_force=True),
        ]

    def handle_exit(self, now: float, key: Key, incarnation: int, found: UnitExit) -> list[Action]:
        """Handle the exit of all processes of an incarnation."""
        slot = self.slots[key]
        if slot.state is not SlotState.RUNNING or slot.incarnation != incarnation:
            return []
        slot.state = SlotState.IDLE
        self._num_running -= 1
        if slot.killed_as:
            found, slot.killed_as = slot.killed_as, None
            del self._doomed[slot.key]
        slot.exits_in_a_row = 1 if slot.was_healthy(now) else slot.exits_in_a_row + 1
        lived_s = round(now - slot.started_at, 3)
        details = slot.about_incarnation | {
            "code": int(found.code),
            "reason": found.reason,
            "lived_s": lived_s,
        }
        if found.is_failure:
            details["class"] = found.failure.value
        if self._uses_retry(slot, found):
            self.failures += 1
            details["failure"] = True
        actions: list[Action] = [LogEvent(EventKind.EXITED, details)]
        slot.incarnation += 1
        if self.phase is Phase.ENDING:
            return actions + self._finish_if_empty()
        if slot is self.leader:
            return actions + self._handle_leader_exit(slot, found, now)
        return actions + self._handle_helper_exit(slot, found, now)

    def _uses_retry(self, slot: Slot, found: UnitExit) -> bool:
        """Return whether an exit uses up a retry: an exit of the leader, or of any hanging unit."""
        if slot is not self.leader:
            return found.failure is FailureClass.INFRASTRUCTURE and found.by_signal
        if self.phase is not Phase.RUNNING and found.by_signal:
            return False
        return found.is_failure and found.policy.uses_retry

    def tick(self, now: float) -> list[Action]:
        """Return the due actions."""
        hanging: list[Action] = [Kill(key) for key, slot in self._doomed.items() if now >= slot.kill_at]
        return hanging + self._tick(now)

    def _tick(self, now: float) -> list[Action]:
        if self.phase is Phase.RUNNING:
            due = [slot for slot in self._waiting.values() if now >= slot.restart_at]
            return [action for slot in due for action in self._start(slot, now)]
        if self.phase is Phase.OVER or now < self._deadline:
            return []
        if not self._killed:
            self._killed = True
            self._deadline = now + KILL_GRACE_S
            if self.phase is Phase.ENDING:
                return [Kill(slot.key) for slot in self._list_running()]
            reason = f"the {self._leading_role} did not stop within {self.drain_grace_s:g} s"
            late: list[Action] = [LogEvent(EventKind.KILLING, {"reason": reason})]
            return [*late, *([Kill(self.leader.key)] if self.leader else [])]
        if self.phase is Phase.DRAINING:
            found = UnitExit(failure_policy.KILLED, "it could not be killed")
            return self._end_all(now, self._finish_drain(found))
        return self._over(
            "; these processes could not be ended: " + ", ".join(slot.name for slot in self._list_running())
        )

    def _start(self, slot: Slot, now: float) -> list[Action]:
        slot.state = SlotState.RUNNING
        self._waiting.pop(slot.key, None)
        self._num_running += 1
        slot.started_at, slot.served_at = now, None
        event = LogEvent(EventKind.STARTED, slot.about_incarnation)
        return [event, Start(slot.unit, slot.incarnation)]

    @property
    def _leading_role(self) -> str:
        return self.leader.unit.role if self.leader else "trainer"

    def _handle_leader_exit(self, slot: Slot, found: UnitExit, now: float) -> list[Action]:
        if self.phase is Phase.DRAINING:
            return self._end_all(now, self._finish_drain(found))
        if found.code == ExitCode.STOPPED and self._may_stop_for is not None:
            self.stop_cause = self._may_stop_for
            usual_reason, _ = STOPS[self._may_stop_for]
            found = UnitExit(found.code, f"{usual_reason}: no rollout would finish in time")
        follows = failure_policy.decide_after_leader(
            self._leading_role, found, self.mode, self.failures, self.retries
        )
        avoid = self._avoid(found)
        if follows.restart:
            pause_s = found.policy.pause_s or failure_policy.compute_pause_s(self.failures)
            return avoid + self._pause(slot, now, pause_s, follows.reason)
        return avoid + self._end_all(now, follows)

    def _avoid(self, found: UnitExit) -> list[Action]:
        if not found.nodes or not found.policy.exclude_nodes:
            return []
        trouble = NodeTrouble.OUT_OF_CONTACT if found.out_of_contact else NodeTrouble.FAILED
        return [Avoid(found.nodes, found.reason, trouble)]

    def _handle_helper_exit(self, slot: Slot, found: UnitExit, now: float) -> list[Action]:
        if found.code == ExitCode.BAD_CONFIG and self._result is None:
            reason = found.reason or "invalid configuration"
            return self._fail(now, ExitCode.BAD_CONFIG, f"{slot.name}: {reason}")
        # after one environment has finished, the others feed the trial
        is_finished = slot.unit.role == "environment" and found.code == ExitCode.DONE
        if self.phase is Phase.DRAINING or is_finished:
            return []
        slot.lost_node = found.failure is FailureClass.NODE
        return self._avoid(found) + self._restart_helper(slot, found, now)

    def _restart_helper(self, slot: Slot, found: UnitExit, now: float) -> list[Action]:
        policy = found.policy
        if policy.action == "end" and found.is_failure:
            why = f"{slot.name}: {found.reason} ({found.failure}: {policy.advice})"
            return self._give_up(slot, now, why, even_alone=True)
        if found.failure is FailureClass.INFRASTRUCTURE and self.failures > self.retries:
            spent = failure_policy.decide_after_failure(
                slot.name, found, self.mode, self.failures, self.retries
            )
            return self._give_up(slot, now, spent.reason, even_alone=True)
        if slot.lost_node:
            return self._give_up(slot, now, f"{slot.name}: {found.reason}")
        if policy.pause_s:
            slot.exits_in_a_row = 0  # not a crash loop
            return self._pause(slot, now, policy.pause_s, found.reason)
        if slot.exits_in_a_row < failure_policy.MAX_EXITS_IN_A_ROW:
            return self._pause(slot, now, failure_policy.compute_pause_s(slot.exits_in_a_row), found.reason)
        last = found.reason or f"code {found.code}"
        return self._give_up(
            slot, now, f"{slot.name} exited {slot.exits_in_a_row} times in a row, last: {last}"
        )

    def _give_up(self, slot: Slot, now: float, why: str, even_alone: bool = False) -> list[Action]:
        """Leave a unit down for long; the attempt fails with the last unit of a role, or if `even_alone`."""
        slot.state = SlotState.GAVE_UP
        self._waiting[slot.key] = slot
        slot.restart_at = float("inf") if slot.lost_node else now + failure_policy.GIVE_UP_PAUSE_S
        pause = {} if slot.lost_node else {"pause_s": failure_policy.GIVE_UP_PAUSE_S}
        gave_up: list[Action] = [LogEvent(EventKind.GAVE_UP, slot.about | {"reason": why} | pause)]
        if even_alone:
            return gave_up + self._fail(now, ExitCode.FAILED, why)
        peers = [other for other in self.slots.values() if other.unit.role == slot.unit.role]
        if any(other.state is not SlotState.GAVE_UP for other in peers):
            is_lost = slot.lost_node and slot.unit.role == "server"
            return [*gave_up, Replace(slot.unit)] if is_lost else gave_up
        if any(other.lost_node for other in peers) and self.mode in failure_policy.RESTARTING_MODES:
            return gave_up + self._fail(now, ExitCode.STOPPED, f"{why}; other nodes are needed")
        return gave_up + self._fail(now, ExitCode.FAILED, why)

    def _pause(self, slot: Slot, now: float, pause_s: float, why: str) -> list[Action]:
        slot.state = SlotState.PAUSED
        self._waiting[slot.key] = slot
        slot.restart_at = now + pause_s
        return [LogEvent(EventKind.RESTARTING, slot.about | {"pause_s": pause_s, "reason": why})]

    def _fail(self, now: float, code: int, why: str) -> list[Action]:
        """End the attempt with this code; the trainer may still save."""
        self._result = Consequence(False, code, why)
        if self.phase is not Phase.RUNNING:
            return []
        return [LogEvent(EventKind.FAILING, {"reason": why}), *self._drain(now)]

    def _drain(self, now: float) -> list[Action]:
        self.phase = Phase.DRAINING
        self._deadline = now + self.drain_grace_s
        if self.leader is not None and self.leader.state is SlotState.RUNNING:
            return [AskToStop(self.leader.key)]
        return self._end_all(now, self._finish_drain(None))

    def _finish_drain(self, found: UnitExit | None) -> Consequence:
        follows = failure_policy.decide_after_drain(
            self._leading_role, found, self.mode, self.failures, self.retries, self._stop_reason
        )
        if self._result is not None and follows.exit_code != ExitCode.DONE:
            return self._result
        return follows

    def _end_all(self, now: float, result: Consequence, by_force: bool = False) -> list[Action]:
        self.phase = Phase.ENDING
        self._result = result
        self._deadline = now + (KILL_GRACE_S if by_force else END_GRACE_S)
        self._killed = by_force
        asked: list[Action] = [
            Kill(slot.key) if by_force else AskToStop(slot.key) for slot in self._list_running()
        ]
        return asked + self._finish_if_empty()

    def _finish_if_empty(self) -> list[Action]:
        return [] if self._num_running else self._over("")

    def _over(self, note: str) -> list[Action]:
        self.phase = Phase.OVER
        assert self._result is not None
        return [Finish(int(self._result.exit_code), self._result.reason + note)]

    def _list_running(self) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.state is SlotState.RUNNING]
