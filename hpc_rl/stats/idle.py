"""Counts steps without learning, and skipped updates, during training and afterwards."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MIN_IN_A_ROW = 10  # steps without learning before they are reported


class IdleReason(enum.StrEnum):
    """Why a step taught the model nothing."""

    NO_UPDATE = "no_update"
    ZERO_GRADIENT = "zero_gradient"
    ZERO_ADVANTAGE = "zero_advantage"
    ZERO_REWARD = "zero_reward"


MEANINGS = {
    IdleReason.NO_UPDATE: "the optimizer made no update",
    IdleReason.ZERO_GRADIENT: "the gradient is 0",
    IdleReason.ZERO_ADVANTAGE: "every completion has advantage 0",
    IdleReason.ZERO_REWARD: "every reward is 0",
}


def find_reasons(row: Mapping[str, Any]) -> list[IdleReason]:
    """Return why a step taught nothing, from its row of metrics; [] if it taught something."""
    has_teacher = "teacher_kl" in row  # a policy learns from it without a reward
    facts = {
        IdleReason.NO_UPDATE: row.get("update_successful") == 0,
        IdleReason.ZERO_GRADIENT: row.get("grad_norm") == 0,
        IdleReason.ZERO_ADVANTAGE: row.get("zero_advantage_groups") == 1,
        IdleReason.ZERO_REWARD: row.get("reward") == 0 and row.get("reward_std") == 0 and not has_teacher,
    }
    return [reason for reason, holds in facts.items() if holds]


@dataclass
class IdleSteps:
    """The steps of a trial that taught nothing."""

    num_steps: int = 0  # all counted steps
    total: int = 0  # steps without learning
    in_a_row: int = 0  # steps without learning up to the newest
    since_step: int | None = None  # the first of the steps in a row
    reasons: tuple[IdleReason, ...] = ()  # of the newest step

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Count a step with its row of metrics."""
        self.num_steps += 1
        self.reasons = tuple(find_reasons(row))
        if not self.reasons:
            self.in_a_row, self.since_step = 0, None
            return
        self.total += 1
        self.since_step = step if not self.in_a_row else self.since_step
        self.in_a_row += 1

    def is_notable(self, is_over: bool) -> bool:
        """Return whether to report it: many steps in a row, half of a training, or all of a finished one."""
        if is_over and self.in_a_row == self.num_steps:
            return self.num_steps > 0
        return self.in_a_row >= MIN_IN_A_ROW or (
            self.total >= MIN_IN_A_ROW and 2 * self.total >= self.num_steps
        )

    @property
    def text(self) -> str:
        """A sentence for users."""
        if not self.in_a_row:
            return f"{self.total} of {self.num_steps} steps taught the model nothing"
        why = " and ".join(MEANINGS[reason] for reason in self.reasons)
        if self.in_a_row == self.num_steps and self.since_step == 1:
            return f"none of the {self.num_steps} steps taught the model anything: {why}"
        return f"the last {self.in_a_row} steps, from step {self.since_step}, taught the model nothing: {why}"


def count_idle(rows: Iterable[Mapping[str, Any]]) -> IdleSteps:
    """Count the idle steps in the rows of metrics of a trial, oldest first."""
    counted = IdleSteps()
    for row in rows:
        counted.add(row["step"], row)
    return counted


SKIPPED = "updates_skipped"  # metric: updates of a step that were not made, because of values not finite


@dataclass(frozen=True)
class SkippedUpdates:
    """The optimizer updates that a trial skipped because the loss or its gradient was not finite."""

    num_updates: int = 0
    num_steps: int = 0  # with one or more of them
    last_step: int | None = None

    @property
    def text(self) -> str:
        """A sentence for users."""
        updates = "1 update was" if self.num_updates == 1 else f"{self.num_updates} updates were"
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        why = "the loss or its gradient was not finite"
        return f"{updates} skipped in {steps}, the last one step {self.last_step}: {why}"


def count_skipped(rows: Iterable[Mapping[str, Any]]) -> SkippedUpdates:
    """Count the skipped updates in the rows of metrics of a trial."""
    found = {row["step"]: int(count) for row in rows if (count := row.get(SKIPPED))}
    return SkippedUpdates(sum(found.values()), len(found), max(found, default=None))
