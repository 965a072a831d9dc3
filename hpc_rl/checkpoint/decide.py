"""What a trainer's start does: fresh, load a generation, or nothing. Pure; what lies on disk is gathered by lineage.py.

The table (rows: mode; the first start of `hpc-rl recover` counts as `resume`):

| mode     | first start                   | after a failure                                    | continuation        |
|----------|-------------------------------|----------------------------------------------------|---------------------|
| disabled | fresh; refuses existing state | ends                                               | ends                |
| auto     | newest valid, else fresh      | newest valid, else fresh                           | as after a failure  |
| fault    | fresh; refuses existing state | newest valid of this submission's line, else fresh | as after a failure  |
| resume   | newest valid, else exit 3     | ends                                               | newest valid, else 3 |

A continuation is a start after an end on purpose, a preemption, the time limit or the loss of a node. Failures in a row
without a new generation use up the retry budget, whatever the mode.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from hpc_rl.errors import ExitCode


class Cause(enum.StrEnum):
    """Why the start before this one ended."""

    STOPPED = "stopped on purpose"
    PREEMPTED = "preempted"
    WALLTIME = "ran into its time limit"
    NODE = "was ended from outside, without a word: node failure, preemption or requeue"
    SUPERVISOR = "was left by its supervisor"
    FAILED = "failed"


CONTINUATIONS = frozenset({Cause.STOPPED, Cause.PREEMPTED, Cause.WALLTIME, Cause.NODE})


@dataclass(frozen=True)
class GenerationInfo:
    """A generation on disk. `problem` says why it is not valid."""

    step: int
    lineage: int
    submission: str
    valid: bool
    problem: str = ""


@dataclass(frozen=True)
class Situation:
    """Everything that the decision depends on.

    Args:
        mode: `recover.mode`.
        start_mode: Mode of the submission's first start; `resume` for `hpc-rl recover`.
        first_start: No trainer of this submission came as far as a lineage.
        generations: What lies in `recover/`.
        ancestry: This submission and those whose state it goes on from.
        has_state: Something of another submission lies in the trial directory.
        cause: Why the start before this one ended; None where there was none.
        failures: Failed ends of the trainer in a row without a new generation.
        retries: `recover.retries`.
    """

    mode: str
    start_mode: str
    first_start: bool
    generations: tuple[GenerationInfo, ...] = ()
    ancestry: frozenset[str] = frozenset()
    has_state: bool = False
    cause: Cause | None = None
    failures: int = 0
    retries: int = 3


@dataclass(frozen=True)
class Decision:
    """What to do, and why. `step` and `lineage` are of the generation to load; `exit_code` is of `refuse` and `end`."""

    action: Literal["fresh", "load", "refuse", "end"]
    reason: str
    step: int | None = None
    lineage: int | None = None
    exit_code: int = 0


def decide(situation: Situation) -> Decision:
    """The cell of the table that applies, with its reason in words."""
    if situation.failures > situation.retries:
        words = f"{situation.failures} failures in a row without a new generation; recover.retries allows {situation.retries}"
        return Decision("end", words, exit_code=ExitCode.FAILED)
    if situation.first_start:
        return _first_start(situation)
    if situation.cause in CONTINUATIONS:
        return _continuation(situation)
    return _after_failure(situation)


def _first_start(situation: Situation) -> Decision:
    mode = situation.start_mode
    if mode in ("disabled", "fault"):
        if situation.has_state or situation.generations:
            words = (
                f"recover.mode {mode} starts fresh, and the trial directory already has state; "
                "use another trial_name, or hpc-rl recover"
            )
            return Decision("refuse", words, exit_code=ExitCode.BAD_CONFIG)
        return Decision("fresh", f"first start, recover.mode {mode}")
    return _newest(situation, eligible=situation.generations, when=f"first start, mode {mode}", must_load=mode == "resume")


def _after_failure(situation: Situation) -> Decision:
    ended = f"the start before this one {situation.cause or Cause.FAILED}"
    if situation.mode == "disabled":
        return Decision("end", f"{ended}; recover.mode disabled does not start again", exit_code=ExitCode.FAILED)
    if situation.mode == "resume":
        return Decision("end", f"{ended}; recover.mode resume does not resume a failure twice", exit_code=ExitCode.FAILED)
    return _newest(situation, _eligible(situation), when=ended, must_load=False)


def _continuation(situation: Situation) -> Decision:
    ended = f"the start before this one {situation.cause}"
    if situation.mode == "disabled":
        return Decision("end", f"{ended}; recover.mode disabled does not go on", exit_code=ExitCode.FAILED)
    return _newest(situation, _eligible(situation), when=ended, must_load=situation.mode == "resume")


def _eligible(situation: Situation) -> tuple[GenerationInfo, ...]:
    if situation.mode != "fault":
        return situation.generations
    return tuple(one for one in situation.generations if one.submission in situation.ancestry)


def _newest(situation: Situation, eligible: tuple[GenerationInfo, ...], when: str, must_load: bool) -> Decision:
    valid = [one for one in eligible if one.valid]
    newest = max(valid, key=lambda one: (one.step, one.lineage), default=None)
    passed_over = [
        f"generation {one.step} {one.problem or 'is not valid'}"
        for one in sorted(eligible, key=lambda one: -one.step)
        if not one.valid and (newest is None or one.step > newest.step)
    ]
    if len(eligible) < len(situation.generations):
        passed_over.append(f"{len(situation.generations) - len(eligible)} of other submissions do not count in mode fault")
    notes = f" ({'; '.join(passed_over)})" if passed_over else ""
    if newest is not None:
        words = f"{when}: loading generation {newest.step}, the newest valid one{notes}"
        return Decision("load", words, newest.step, newest.lineage)
    if must_load:
        return Decision("refuse", f"{when}: no valid generation to resume from{notes}", exit_code=ExitCode.NOTHING_TO_RESUME)
    return Decision("fresh", f"{when}: there is no valid generation, so from step 0{notes}")
