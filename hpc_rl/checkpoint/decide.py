"""Decides whether a start of the trainer begins fresh, loads a generation, or ends. Pure.

The table by mode (the first start of `hpc-rl recover` counts as `resume`):

| mode     | first start                   | after a failure                   | continuation         |
|----------|-------------------------------|-----------------------------------|----------------------|
| disabled | fresh; refuses existing state | ends                              | ends                 |
| auto     | newest valid, else fresh      | newest valid, else fresh          | as after a failure   |
| fault    | fresh; refuses existing state | newest valid of its own ancestry, | as after a failure   |
|          |                               | else fresh                        |                      |
| resume   | newest valid, else exit 3     | ends                              | newest valid, else 3 |

A continuation is a start after an intended stop, a preemption, the time limit or the loss of a node. `hpc-rl
recover --from` names the generation for the first start; if it can't be loaded, exit 3. A start from a step
(also from 0) is impossible if later batches were trimmed from the batch log. Mode fault refuses a fresh start
if a generation may belong to the submission but its records are lost.

The loop guard comes before the table. It counts starts in a row without a new generation: `recover.retries`
of them may fail or use up their whole time; ten times as many may be stopped externally or find the disk
full.
"""

import enum
from dataclasses import dataclass
from typing import Literal

from hpc_rl.core.errors import ExitCode

OUTSIDE_FACTOR = 10
MAX_NAMED = 3  # past starts in a reason


class Cause(enum.StrEnum):
    """Why a start ended."""

    STOPPED = "was stopped"
    PREEMPTED = "was stopped by the scheduler"
    WALLTIME = "ran into its time limit"
    NODE = "was killed from outside without a record: node failure, preemption or requeue"
    SUPERVISOR = "lost its supervisor"
    DISK_FULL = "found the disk full"
    FAILED = "failed"


CONTINUATIONS = frozenset({Cause.STOPPED, Cause.PREEMPTED, Cause.WALLTIME, Cause.NODE})
OWN_FAULT = frozenset({Cause.FAILED, Cause.WALLTIME})


@dataclass(frozen=True)
class GenerationInfo:
    """A generation on disk. `problem` is why it is not valid. If not `read`, its content is unchecked."""

    step: int
    lineage: int
    submission: str
    valid: bool
    problem: str = ""
    read: bool = True


@dataclass(frozen=True)
class PastStart:
    """A start of the trainer without a new generation, and how it ended."""

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
    """The input of the decision: the request, and the state of the trial directory."""

    mode: str  # recover.mode
    start_mode: str  # mode of the submission's first start; `resume` for `hpc-rl recover`
    first_start: bool = True  # no trainer of this submission has a lineage
    generations: tuple[GenerationInfo, ...] = ()  # in `recover/`
    ancestry: frozenset[str] = frozenset()  # this submission and the submissions whose state it continues
    has_state: bool = False  # the trial directory has state of another submission
    cause: Cause | None = None  # why the previous start ended; None for the first start
    history: tuple[PastStart, ...] = ()  # starts of this submission since its last generation, oldest first
    retries: int = 3  # recover.retries
    wanted: int | None = None  # step of `hpc-rl recover --from`, for a first start
    trimmed: int = 0  # batches up to this step were removed from the batch log
    lost: tuple[int, ...] = ()  # ancestor lineages whose records and generations can't be read


@dataclass(frozen=True)
class Decision:
    """An action with the reason. `step` and `lineage` identify the generation to load.

    `exit_code` is for `refuse` and `end`. `set_aside` has the steps of generations to move away.
    """

    action: Literal["fresh", "load", "refuse", "end"]
    reason: str
    step: int | None = None
    lineage: int | None = None
    exit_code: int = 0
    set_aside: tuple[int, ...] = ()


def decide(situation: Situation) -> Decision:
    """Return the decision from the table, with the reason."""
    if reason := guard(situation.history, situation.retries):
        return _end(reason)
    return _decide_first_start(situation) if situation.first_start else _decide_later_start(situation)


def _end(reason: str) -> Decision:
    return Decision("end", reason, exit_code=ExitCode.FAILED)


def _refuse_to_resume(reason: str) -> Decision:
    return Decision("refuse", reason, exit_code=ExitCode.NOTHING_TO_RESUME)


def guard(history: tuple[PastStart, ...], retries: int) -> str:
    """Return why no further start is allowed after these, or ""."""
    at_fault = [past for past in history if past.cause in OWN_FAULT]
    if len(at_fault) > retries:
        count, starts = _describe_count(len(at_fault)), _describe_starts(at_fault)
        return f"{count}; recover.retries allows {retries}: {starts}"
    most = OUTSIDE_FACTOR * (retries + 1)
    if len(history) > most:
        allowed = f"mostly stopped externally; {most} are allowed"
        return f"{_describe_count(len(history))}, {allowed}: {_describe_starts(list(history))}"
    return ""


def _describe_count(count: int) -> str:
    return f"{count} start{'' if count == 1 else 's'} in a row without a new checkpoint"


def _describe_starts(history: list[PastStart]) -> str:
    earlier = f"{len(history) - MAX_NAMED} earlier; " if len(history) > MAX_NAMED else ""
    return earlier + "; ".join(map(str, history[-MAX_NAMED:]))


def _decide_first_start(situation: Situation) -> Decision:
    mode = situation.start_mode
    if situation.wanted is not None:
        return _decide_from(situation, situation.wanted)
    if mode in ("disabled", "fault"):
        if situation.has_state or situation.generations:
            reason = (
                f"recover.mode {mode} starts fresh, and the trial directory already has state; "
                "use another trial_name, or hpc-rl recover"
            )
            return Decision("refuse", reason, exit_code=ExitCode.BAD_CONFIG)
        return Decision("fresh", f"first start, recover.mode {mode}")
    when = "resume" if mode == "resume" else f"first start, recover.mode {mode}"
    return _decide_newest(situation, situation.generations, when, must_load=mode == "resume")


def _decide_from(situation: Situation, step: int) -> Decision:
    """Return the decision if the user named the generation."""
    when = f"from checkpoint {step} as asked"
    found = max(
        (one for one in situation.generations if one.step == step),
        key=lambda one: (one.valid, one.lineage),
        default=None,
    )
    if found is None:
        there = ", ".join(str(one) for one in sorted({one.step for one in situation.generations})) or "none"
        return _refuse_to_resume(f"{when}: there is no such checkpoint; the trial has checkpoints {there}")
    if not found.valid:
        return _refuse_to_resume(f"{when}: it can't be used: {found.problem}")
    if trimmed := _explain_trimmed(situation, step):
        return _refuse_to_resume(f"{when}: {trimmed}")
    later = tuple(sorted({one.step for one in situation.generations if one.step > step}))
    notes = f" (later ones are set aside: {', '.join(map(str, later))})" if later else ""
    return Decision("load", f"{when}: loading it{notes}", step, found.lineage, set_aside=later)


def _decide_later_start(situation: Situation) -> Decision:
    ended = f"the start before this one {situation.cause or Cause.FAILED}"
    continues = situation.cause in CONTINUATIONS
    if situation.mode == "disabled":
        return _end(f"{ended}; recover.mode disabled does not {'continue' if continues else 'start again'}")
    if situation.mode == "resume" and not continues:
        return _end(f"{ended}; recover.mode resume does not start again after a failure")
    eligible = situation.generations
    if situation.mode == "fault":
        eligible = tuple(one for one in eligible if one.submission in situation.ancestry)
    return _decide_newest(situation, eligible, ended, must_load=situation.mode == "resume")


def _explain_trimmed(situation: Situation, step: int) -> str:
    """Return why the batches after this step are not available, or ""."""
    if step >= situation.trimmed:
        return ""
    batches = f"batches {step + 1} to {situation.trimmed}"
    return f"{batches} were trimmed from the batch log, so step {step} can't be resumed"


def _decide_newest(
    situation: Situation, eligible: tuple[GenerationInfo, ...], when: str, must_load: bool
) -> Decision:
    usable = [one for one in eligible if one.valid and not _explain_trimmed(situation, one.step)]
    newest = max(usable, key=lambda one: (one.step, one.lineage), default=None)
    passed_over = [
        f"checkpoint {one.step}: {one.problem or 'it is older than the batch log'}"
        for one in sorted(eligible, key=lambda one: -one.step)
        if one not in usable and (newest is None or one.step > newest.step)
    ]
    if len(eligible) < len(situation.generations):
        num_others = len(situation.generations) - len(eligible)
        passed_over.append(f"recover.mode fault ignores {num_others} checkpoint(s) of other submissions")
    notes = f" ({'; '.join(passed_over)})" if passed_over else ""
    if newest is not None:
        reason = f"{when}: loading checkpoint {newest.step}, the newest valid one{notes}"
        return Decision("load", reason, newest.step, newest.lineage)
    if must_load:
        problem = f"no valid checkpoint to resume from{notes}"
        return _refuse_to_resume(problem if when == "resume" else f"{when}: {problem}")
    if situation.lost and len(eligible) < len(situation.generations):
        records = ", ".join(f"lineages/{number:04d}.json" for number in situation.lost)
        reason = f"{when}: no valid checkpoint{notes}, but {records} can't be read"
        use = (
            "some ignored ones may be of this submission: `hpc-rl recover` takes the newest valid checkpoint"
        )
        return _refuse_to_resume(f"{reason}; {use}")
    if trimmed := _explain_trimmed(situation, 0):
        reason = f"{when}: no valid checkpoint{notes}, and {trimmed}; use another trial_name"
        return _refuse_to_resume(reason)
    return Decision("fresh", f"{when}: there is no valid checkpoint, so training starts at step 0{notes}")
