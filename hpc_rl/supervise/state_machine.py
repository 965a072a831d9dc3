"""Supervisor: the pure state machine of one attempt. Events in, actions out; it owns no processes, files or clocks.

Phases: RUNNING until somebody asks for an end or the trainer comes to one; DRAINING while the trainer saves and the others
still serve it; ENDING while all are told to end; OVER. `now` is any clock that only grows, in seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.errors import ExitCode, FailureClass
from hpc_rl.plan.schema import Unit
from hpc_rl.supervise import exit_policy
from hpc_rl.supervise.exit_policy import Verdict
from hpc_rl.supervise.failures import End, is_failure

DRAIN_GRACE_S = 120.0
END_GRACE_S = 15.0
LAST_GRACE_S = 10.0  # after the kill, for what can't be killed
STACKS_S = 3.0  # for the processes of a unit that hangs to write down where they are

Key = tuple[str, int]


@dataclass(frozen=True)
class Start:
    """Start the next incarnation of a unit."""

    unit: Unit
    incarnation: int


@dataclass(frozen=True)
class AskToStop:
    """Ask a unit to save and end; may be repeated without harm."""

    key: Key


@dataclass(frozen=True)
class Kill:
    """End a unit by force."""

    key: Key


@dataclass(frozen=True)
class DumpStacks:
    """Every process of a unit writes down where it is; one that hangs by a signal, for it may not listen."""

    key: Key
    hangs: bool


@dataclass(frozen=True)
class Avoid:
    """Nodes that the next attempt is not to get."""

    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Record:
    """A line for events.jsonl."""

    event: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finish:
    """The attempt is over: the supervisor leaves with this code."""

    code: int
    reason: str


Action = Start | AskToStop | Kill | DumpStacks | Avoid | Record | Finish


class Phase(enum.Enum):
    RUNNING = "running"
    DRAINING = "draining"
    ENDING = "ending"
    OVER = "over"


class Standing(enum.Enum):
    IDLE = "idle"  # never started, or ended and not to be started again
    RUNNING = "running"
    PAUSED = "paused"  # to be started again at `restart_at`
    GAVE_UP = "gave up"  # its peers do without it; tried once more at `restart_at`


@dataclass
class Slot:
    """One unit and where it stands."""

    unit: Unit
    incarnation: int  # of the next start
    standing: Standing = Standing.IDLE
    started_at: float = 0.0
    served_at: float | None = None  # when this incarnation of a server first served
    restart_at: float = 0.0
    ends_in_a_row: int = 0
    killed_as: End | None = None  # what counts once it is gone
    kill_at: float = 0.0
    lost_node: bool = False

    @property
    def key(self) -> Key:
        return self.unit.role, self.unit.index

    def was_healthy(self, now: float) -> bool:
        """Whether an incarnation that ends now was part of no crash loop."""
        since = self.served_at if self.unit.role == "server" else self.started_at
        return since is not None and now - since >= exit_policy.HEALTHY_LIFE_S


class Supervisor:
    """Args:
    units: The plan's units.
    mode: `recover.mode`.
    retries: `recover.retries`.
    failures: Failed ends of the trainer without a new generation, of supervisors before this one.
    incarnations: First incarnation number of each unit; 0 where it is missing.
    """

    def __init__(
        self,
        units: list[Unit],
        mode: str,
        retries: int,
        failures: int = 0,
        incarnations: dict[Key, int] | None = None,
    ) -> None:
        known = incarnations or {}
        self.slots: dict[Key, Slot] = {
            (unit.role, unit.index): Slot(unit, known.get((unit.role, unit.index), 0)) for unit in units
        }
        self.mode = mode
        self.retries = retries
        self.failures = failures
        self.phase = Phase.RUNNING
        self.drain_grace_s = DRAIN_GRACE_S
        self._asked = ""  # why a stop was asked for
        self._last_call = ""  # why a trainer may stop by itself
        self._verdict: Verdict | None = None  # fixed before the trainer has ended
        self._deadline = 0.0
        self._killed = False

    @property
    def trainer(self) -> Slot | None:
        return next((slot for slot in self.slots.values() if slot.unit.role == "trainer"), None)

    def start(self, now: float) -> list[Action]:
        """Start everything."""
        return [action for slot in self.slots.values() for action in self._start(slot, now)]

    def progressed(self, step: int) -> list[Action]:
        """A new generation was committed: a helper without a peer has done its part, so its ends before were no crash loop."""
        self.failures = 0
        roles = [slot.unit.role for slot in self.slots.values()]
        for slot in self.slots.values():
            if roles.count(slot.unit.role) == 1:
                slot.ends_in_a_row = 0
        return [Record("progress", {"step": step})]

    def stop(self, now: float, why: str, failure: FailureClass = FailureClass.USER) -> list[Action]:
        """Somebody wants the attempt to end with its state saved. The class says what it comes of."""
        if self.phase is not Phase.RUNNING:
            return [Record("stop_repeated", {"reason": why})]
        self._asked = why
        return [Record("stopping", {"reason": why, "class": failure.value}), *self._drain(now)]

    def served(self, now: float, key: Key, incarnation: int) -> None:
        """A server serves: only from then on it lives. It may load for long before it fails at the first request."""
        slot = self.slots.get(key)
        if slot is not None and slot.incarnation == incarnation and slot.served_at is None:
            slot.served_at = now

    def last_call(self, why: str) -> None:
        """From now on a trainer without work stops by itself: that is no rollout role that went dry, but for this reason."""
        self._last_call = why

    def hung(self, now: float, key: Key, why: str) -> list[Action]:
        """Nothing moves in a unit: everybody writes down where they are, then it is killed and its policy decides."""
        slot = self.slots[key]
        if not self._may_be_killed(slot):
            return []
        slot.killed_as, slot.kill_at = exit_policy.hung(why), now + STACKS_S
        told = Record("hung", _about(slot) | {"reason": why})
        return [told, *(DumpStacks(one.key, one is slot) for one in self._running())]

    def unplaced(self, key: Key, why: str) -> list[Action]:
        """The scheduler starts no process of a unit on its nodes."""
        slot = self.slots[key]
        if not self._may_be_killed(slot):
            return []
        slot.killed_as = exit_policy.unplaced(slot.unit.role, why, is_first_start=slot.incarnation == 0)
        slot.kill_at = float("inf")
        return [Record("unplaced", _about(slot) | {"reason": why}), Kill(key)]

    def _may_be_killed(self, slot: Slot) -> bool:
        return self.phase is Phase.RUNNING and slot.standing is Standing.RUNNING and slot.killed_as is None

    def abandon(self, now: float, code: int, why: str) -> list[Action]:
        """End everything without saving: somebody else owns the trial."""
        if self.phase is Phase.OVER:
            return []
        return [
            Record("abandoning", {"reason": why}),
            *self._end_all(now, Verdict(False, code, why), by_force=True),
        ]

    def exited(self, now: float, key: Key, incarnation: int, end: End) -> list[Action]:
        """An incarnation of a unit is gone, all its processes."""
        slot = self.slots[key]
        if slot.standing is not Standing.RUNNING or slot.incarnation != incarnation:
            return []
        slot.standing = Standing.IDLE
        if slot.killed_as:
            end, slot.killed_as = slot.killed_as, None
        lived_s = now - slot.started_at
        slot.ends_in_a_row = 1 if slot.was_healthy(now) else slot.ends_in_a_row + 1
        is_trainer = slot.unit.role == "trainer"
        failure = self._is_failure(slot, end)
        self.failures += failure
        actions: list[Action] = [_exited(slot, end, lived_s, failure)]
        slot.incarnation += 1
        if self.phase is Phase.ENDING:
            return actions + self._finish_if_empty()
        if is_trainer:
            return actions + self._trainer_ended(slot, end, now)
        return actions + self._helper_ended(slot, end, now)

    def _is_failure(self, slot: Slot, end: End) -> bool:
        """Whether an end uses up the retries: of the trainer, or of whoever had to be killed because nothing moved."""
        if slot.unit.role != "trainer":
            return end.failure is FailureClass.INFRASTRUCTURE and end.by_signal
        return (
            is_failure(end.code) and end.policy.counts and (self.phase is Phase.RUNNING or not end.by_signal)
        )

    def tick(self, now: float) -> list[Action]:
        """Whatever is due."""
        hanging: list[Action] = [
            Kill(slot.key) for slot in self._running() if slot.killed_as and now >= slot.kill_at
        ]
        return hanging + self._tick(now)

    def _tick(self, now: float) -> list[Action]:
        if self.phase is Phase.RUNNING:
            waiting = (Standing.PAUSED, Standing.GAVE_UP)
            due = [
                slot for slot in self.slots.values() if slot.standing in waiting and now >= slot.restart_at
            ]
            return [action for slot in due for action in self._start(slot, now)]
        if self.phase is Phase.OVER or now < self._deadline:
            return []
        if self.phase is Phase.DRAINING and not self._killed:
            self._killed = True
            self._deadline = now + LAST_GRACE_S
            trainer = self.trainer
            late: list[Action] = [
                Record("killing", {"reason": f"the trainer did not stop within {self.drain_grace_s:g} s"})
            ]
            return [*late, *([Kill(trainer.key)] if trainer else [])]
        if self.phase is Phase.DRAINING:
            end = End(128 + 9, "it could not be killed")
            return self._end_all(now, self._after_drain(end))
        if not self._killed:
            self._killed = True
            self._deadline = now + LAST_GRACE_S
            return [Kill(slot.key) for slot in self._running()]
        return self._over(
            "; left behind: " + ", ".join(f"{slot.unit.role} {slot.unit.index}" for slot in self._running())
        )

    def _start(self, slot: Slot, now: float) -> list[Action]:
        slot.standing = Standing.RUNNING
        slot.started_at, slot.served_at = now, None
        return [_started(slot), Start(slot.unit, slot.incarnation)]

    def _trainer_ended(self, slot: Slot, end: End, now: float) -> list[Action]:
        if self.phase is Phase.DRAINING:
            return self._end_all(now, self._after_drain(end))
        if end.code == ExitCode.STOPPED and self._last_call:
            end = End(end.code, self._last_call)
        verdict = exit_policy.after_trainer(end, self.mode, self.failures, self.retries)
        avoid = self._avoid(end)
        if verdict.restart:
            return avoid + self._pause(
                slot, now, end.policy.pause_s or exit_policy.pause_s(self.failures), verdict.reason
            )
        return avoid + self._end_all(now, verdict)

    def _avoid(self, end: End) -> list[Action]:
        return [Avoid(end.nodes, end.reason)] if end.nodes and end.policy.exclude_nodes else []

    def _helper_ended(self, slot: Slot, end: End, now: float) -> list[Action]:
        name = f"{slot.unit.role} {slot.unit.index}"
        if end.code == ExitCode.BAD_CONFIG and self._verdict is None:
            return self._fail(now, ExitCode.BAD_CONFIG, f"{name}: {end.reason or 'bad configuration'}")
        if self.phase is Phase.DRAINING:
            return []
        avoid = self._avoid(end)
        slot.lost_node = end.failure is FailureClass.NODE
        if end.policy.then == "end" and is_failure(end.code):
            return avoid + self._give_up(
                slot, now, f"{name}: {end.reason} ({end.failure}: {end.policy.advice})", even_alone=True
            )
        if end.failure is FailureClass.INFRASTRUCTURE and self.failures > self.retries:
            spent = exit_policy.after_failure(name, end, self.mode, self.failures, self.retries).reason
            return avoid + self._give_up(slot, now, spent, even_alone=True)
        if slot.lost_node:
            return avoid + self._give_up(slot, now, f"{name}: {end.reason}")
        if end.policy.pause_s:
            slot.ends_in_a_row = 0  # that is no crash loop
            return avoid + self._pause(slot, now, end.policy.pause_s, end.reason)
        if slot.ends_in_a_row < exit_policy.ENDS_IN_A_ROW:
            return avoid + self._pause(slot, now, exit_policy.pause_s(slot.ends_in_a_row), end.reason)
        why = f"{name} ended {slot.ends_in_a_row} times in a row, last: {end.reason or f'code {end.code}'}"
        return avoid + self._give_up(slot, now, why)

    def _give_up(self, slot: Slot, now: float, why: str, even_alone: bool = False) -> list[Action]:
        """Not to be started again for long, and the attempt fails with the last of its kind; other nodes may help then."""
        slot.standing = Standing.GAVE_UP
        slot.restart_at = float("inf") if slot.lost_node else now + exit_policy.GIVEN_UP_S
        details: dict[str, Any] = {"role": slot.unit.role, "index": slot.unit.index, "reason": why}
        details |= {} if slot.lost_node else {"pause_s": exit_policy.GIVEN_UP_S}
        gave_up: list[Action] = [Record("gave_up", details)]
        peers = [other for other in self.slots.values() if other.unit.role == slot.unit.role]
        if not even_alone and any(other.standing is not Standing.GAVE_UP for other in peers):
            return gave_up
        elsewhere = (
            any(other.lost_node for other in peers)
            and self.mode in exit_policy.RESTARTING_MODES
            and not even_alone
        )
        code = ExitCode.STOPPED if elsewhere else ExitCode.FAILED
        return gave_up + self._fail(now, code, f"{why}; other nodes are needed" if elsewhere else why)

    def _pause(self, slot: Slot, now: float, pause_s: float, why: str) -> list[Action]:
        slot.standing = Standing.PAUSED
        slot.restart_at = now + pause_s
        details = {"role": slot.unit.role, "index": slot.unit.index, "pause_s": pause_s, "reason": why}
        return [Record("restarting", details)]

    def _fail(self, now: float, code: int, why: str) -> list[Action]:
        """The attempt can't go on; the trainer may still save."""
        self._verdict = Verdict(False, code, why)
        if self.phase is not Phase.RUNNING:
            return []
        return [Record("failing", {"reason": why}), *self._drain(now)]

    def _drain(self, now: float) -> list[Action]:
        trainer = self.trainer
        self.phase = Phase.DRAINING
        self._deadline = now + self.drain_grace_s
        if trainer is not None and trainer.standing is Standing.RUNNING:
            return [AskToStop(trainer.key)]
        return self._end_all(now, self._after_drain(None))

    def _after_drain(self, end: End | None) -> Verdict:
        verdict = exit_policy.after_drain(end, self.mode, self.failures, self.retries, self._asked)
        if self._verdict is not None and verdict.exit_code != ExitCode.DONE:
            return self._verdict
        return verdict

    def _end_all(self, now: float, verdict: Verdict, by_force: bool = False) -> list[Action]:
        self.phase = Phase.ENDING
        self._verdict = verdict
        self._deadline = now + (LAST_GRACE_S if by_force else END_GRACE_S)
        self._killed = by_force
        told: list[Action] = [Kill(slot.key) if by_force else AskToStop(slot.key) for slot in self._running()]
        return told + self._finish_if_empty()

    def _finish_if_empty(self) -> list[Action]:
        return [] if self._running() else self._over("")

    def _over(self, note: str) -> list[Action]:
        self.phase = Phase.OVER
        assert self._verdict is not None
        return [Finish(int(self._verdict.exit_code), self._verdict.reason + note)]

    def _running(self) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.standing is Standing.RUNNING]


def _about(slot: Slot) -> dict[str, Any]:
    """Which incarnation of which unit, as events name it."""
    return {"role": slot.unit.role, "index": slot.unit.index, "incarnation": slot.incarnation}


def _started(slot: Slot) -> Record:
    return Record("started", _about(slot))


def _exited(slot: Slot, end: End, lived_s: float, failure: bool) -> Record:
    details = _about(slot) | {"code": int(end.code), "reason": end.reason, "lived_s": round(lived_s, 3)}
    if is_failure(end.code):
        details["class"] = end.failure.value
    return Record("exited", details | ({"failure": True} if failure else {}))
