"""What a trainer's start does: fresh, load a generation, or nothing. Pure; what lies on disk is gathered by situation.py.

The table (rows: mode; the first start of `hpc-rl recover` counts as `resume`):

| mode     | first start                   | after a failure                                    | continuation        |
|----------|-------------------------------|----------------------------------------------------|---------------------|
| disabled | fresh; refuses existing state | ends                                               | ends                |
| auto     | newest valid, else fresh      | newest valid, else fresh                           | as after a failure  |
| fault    | fresh; refuses existing state | newest valid of this submission's line, else fresh | as after a failure  |
| resume   | newest valid, else exit 3     | ends                                               | newest valid, else 3 |

A continuation is a start after an end on purpose, a preemption, the time limit or the loss of a node. `hpc-rl recover --from`
names the generation of a first start: that one, or exit 3. A step whose later batches were trimmed from the batch log is no
step to start from, 0 included. Mode fault refuses to start fresh where it can't be told whether a generation is of this
submission's line.

The loop guard comes before the table: starts in a row that led to no new generation. Those that failed, or used up their whole
time, may be `recover.retries`; those that were ended from outside, or found the disk full, are nobody's fault, and may be ten
times as many.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from hpc_rl.errors import ExitCode

OUTSIDE_FACTOR = 10
SHOWN = 3  # past starts named in a reason


class Cause(enum.StrEnum):
    """Why a start ended."""

    STOPPED = "stopped on purpose"
    PREEMPTED = "was told to end by the scheduler"
    WALLTIME = "ran into its time limit"
    NODE = "was ended from outside, without a word: node failure, preemption or requeue"
    SUPERVISOR = "was left by its supervisor"
    DISK_FULL = "found the disk full"
    FAILED = "failed"


CONTINUATIONS = frozenset({Cause.STOPPED, Cause.PREEMPTED, Cause.WALLTIME, Cause.NODE})
OWN_FAULT = frozenset({Cause.FAILED, Cause.WALLTIME})


@dataclass(frozen=True)
class GenerationInfo:
    """A generation on disk. `problem` says why it is not valid; one whose content was not `read` only looks valid."""

    step: int
    lineage: int
    submission: str
    valid: bool
    problem: str = ""
    read: bool = True


@dataclass(frozen=True)
class PastStart:
    """A start of the trainer that led to no new generation, and how it ended. `attempt` is `<job id>.<restart>`."""

    attempt: str
    incarnation: int
    cause: Cause
    reason: str = ""

    def __str__(self) -> str:
        return f"trainer {self.incarnation} of attempt {self.attempt} {self.cause}" + (
            f" ({self.reason})" if self.reason else ""
        )


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
        history: Starts of this submission without a new generation, since the last that made one, oldest first.
        retries: `recover.retries`.
        wanted: Step of `hpc-rl recover --from`, for a first start; None otherwise.
        trimmed: Batches up to this step are gone from the batch log; 0 where all are there.
        lost: Lineages that this submission goes on from and of which nothing can be read.
    """

    mode: str
    start_mode: str
    first_start: bool
    generations: tuple[GenerationInfo, ...] = ()
    ancestry: frozenset[str] = frozenset()
    has_state: bool = False
    cause: Cause | None = None
    history: tuple[PastStart, ...] = ()
    retries: int = 3
    wanted: int | None = None
    trimmed: int = 0
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What to do, and why. `step` and `lineage` are of the generation to load; `exit_code` is of `refuse` and `end`.

    `set_aside`: steps of generations that a start from an older one moves out of the way.
    """

    action: Literal["fresh", "load", "refuse", "end"]
    reason: str
    step: int | None = None
    lineage: int | None = None
    exit_code: int = 0
    set_aside: tuple[int, ...] = ()


def decide(situation: Situation) -> Decision:
    """The cell of the table that applies, with its reason in words."""
    if words := guard(situation.history, situation.retries):
        return Decision("end", words, exit_code=ExitCode.FAILED)
    if situation.first_start:
        return _first_start(situation)
    if situation.cause in CONTINUATIONS:
        return _continuation(situation)
    return _after_failure(situation)


def guard(history: tuple[PastStart, ...], retries: int) -> str:
    """Why no further start may follow on these, or ''."""
    at_fault = [past for past in history if past.cause in OWN_FAULT]
    if len(at_fault) > retries:
        return f"{_in_a_row(len(at_fault))}; recover.retries allows {retries}: {_named(at_fault)}"
    most = OUTSIDE_FACTOR * (retries + 1)
    if len(history) > most:
        return f"{_in_a_row(len(history))}, most of them ended from outside; {most} are allowed: {_named(list(history))}"
    return ""


def _in_a_row(count: int) -> str:
    return f"{count} start{'' if count == 1 else 's'} in a row without a new generation"


def _named(history: list[PastStart]) -> str:
    earlier = f"{len(history) - SHOWN} earlier; " if len(history) > SHOWN else ""
    return earlier + "; ".join(map(str, history[-SHOWN:]))


def _first_start(situation: Situation) -> Decision:
    mode = situation.start_mode
    if situation.wanted is not None:
        return _from(situation, situation.wanted)
    if mode in ("disabled", "fault"):
        if situation.has_state or situation.generations:
            words = (
                f"recover.mode {mode} starts fresh, and the trial directory already has state; "
                "use another trial_name, or hpc-rl recover"
            )
            return Decision("refuse", words, exit_code=ExitCode.BAD_CONFIG)
        return Decision("fresh", f"first start, recover.mode {mode}")
    return _newest(
        situation,
        eligible=situation.generations,
        when=f"first start, mode {mode}",
        must_load=mode == "resume",
    )


def _from(situation: Situation, step: int) -> Decision:
    """Exactly the generation that a person named."""
    when = f"first start, from generation {step} as asked"
    found = max(
        (one for one in situation.generations if one.step == step),
        key=lambda one: (one.valid, one.lineage),
        default=None,
    )
    if found is None:
        there = ", ".join(str(one) for one in sorted({one.step for one in situation.generations})) or "none"
        return Decision(
            "refuse",
            f"{when}: it does not lie there; there are {there}",
            exit_code=ExitCode.NOTHING_TO_RESUME,
        )
    if not found.valid:
        words = f"{when}: generation {step} {found.problem or 'is not valid'}"
        return Decision("refuse", words, exit_code=ExitCode.NOTHING_TO_RESUME)
    if trimmed := _trimmed(situation, step):
        return Decision("refuse", f"{when}: {trimmed}", exit_code=ExitCode.NOTHING_TO_RESUME)
    later = tuple(sorted({one.step for one in situation.generations if one.step > step}))
    notes = f" (later ones are set aside: {', '.join(map(str, later))})" if later else ""
    return Decision("load", f"{when}: loading it{notes}", step, found.lineage, set_aside=later)


def _after_failure(situation: Situation) -> Decision:
    ended = f"the start before this one {situation.cause or Cause.FAILED}"
    if situation.mode == "disabled":
        return Decision(
            "end", f"{ended}; recover.mode disabled does not start again", exit_code=ExitCode.FAILED
        )
    if situation.mode == "resume":
        return Decision(
            "end", f"{ended}; recover.mode resume does not resume a failure twice", exit_code=ExitCode.FAILED
        )
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


def _trimmed(situation: Situation, step: int) -> str:
    """Why a start from this step could not be given its batches, or ''."""
    if step >= situation.trimmed:
        return ""
    return f"batches {step + 1} to {situation.trimmed} were trimmed from the batch log, so step {step} can't be gone on from"


def _newest(
    situation: Situation, eligible: tuple[GenerationInfo, ...], when: str, must_load: bool
) -> Decision:
    usable = [one for one in eligible if one.valid and not _trimmed(situation, one.step)]
    newest = max(usable, key=lambda one: (one.step, one.lineage), default=None)
    passed_over = [
        f"generation {one.step} {one.problem or ('is not valid' if not one.valid else 'is older than the batch log')}"
        for one in sorted(eligible, key=lambda one: -one.step)
        if one not in usable and (newest is None or one.step > newest.step)
    ]
    if len(eligible) < len(situation.generations):
        passed_over.append(
            f"{len(situation.generations) - len(eligible)} of other submissions do not count in mode fault"
        )
    notes = f" ({'; '.join(passed_over)})" if passed_over else ""
    if newest is not None:
        words = f"{when}: loading generation {newest.step}, the newest valid one{notes}"
        return Decision("load", words, newest.step, newest.lineage)
    if must_load:
        return Decision(
            "refuse",
            f"{when}: no valid generation to resume from{notes}",
            exit_code=ExitCode.NOTHING_TO_RESUME,
        )
    if situation.lost and len(eligible) < len(situation.generations):
        records = ", ".join(f"lineages/{number:04d}.json" for number in situation.lost)
        words = f"{when}: no valid generation{notes}, but which of them are its own can't be told: {records} can't be read"
        return Decision(
            "refuse",
            f"{words}; hpc-rl recover takes the newest valid one",
            exit_code=ExitCode.NOTHING_TO_RESUME,
        )
    if trimmed := _trimmed(situation, 0):
        words = f"{when}: no valid generation{notes}, and {trimmed}; use another trial_name"
        return Decision("refuse", words, exit_code=ExitCode.NOTHING_TO_RESUME)
    return Decision("fresh", f"{when}: there is no valid generation, so from step 0{notes}")
