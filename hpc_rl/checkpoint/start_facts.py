"""Gathers what a start of the trainer is decided by: generations, lineages, past starts. Reads files only."""

import re
from collections.abc import Sequence
from dataclasses import replace

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.decide import Cause, Decision, GenerationInfo, PastStart, Situation, decide
from hpc_rl.checkpoint.generation import IMPORTED, IMPORTED_LINEAGE, Found
from hpc_rl.core.errors import WARNING_S, ExitCode, FailureClass, StopCause
from hpc_rl.core.records import (
    EndedRecord,
    Event,
    EventKind,
    JobRecord,
    LineageRecord,
    read_events,
    read_lineages,
)
from hpc_rl.core.trial import Attempt, Trial, entries, read_object

_SEAL = re.compile(r"(\d+)\.seal")
# a command reads a whole generation up to this size before it submits a start from it
IN_PASSING_BYTES = 1 << 30


def decide_start(
    trial: Trial, attempt: Attempt, incarnation: int, asked: Situation
) -> tuple[Decision, list[Found]]:
    """Return the decision for a trainer that starts now, and the generations to be set aside before it does.

    Those are the damaged ones that it skips, and with `wanted` (`hpc-rl recover --from`) the later ones.
    Reads every byte of the generations that it considers, newest first, up to the first that is valid and
    eligible.
    """
    situation, damaged = gather(trial, attempt, incarnation, asked)
    decision = decide(situation)
    if decision.action not in ("load", "fresh"):
        return decision, []
    if not decision.set_aside:
        return decision, damaged
    why = f"is later than {decision.step}"
    later = [found for found in generation.scan(trial) if found.step in decision.set_aside]
    return decision, [replace(found, problem=found.problem or why) for found in later]


def gather(
    trial: Trial, attempt: Attempt, incarnation: int, asked: Situation, in_passing: bool = False
) -> tuple[Situation, list[Found]]:
    """Return what decide() needs of the trial directory, and the generations that do not verify.

    `asked` has what was requested: modes, retries, wanted. `in_passing` is for a command that only asks what
    a start would do: see read_limit.
    """
    submission = attempt.job_id
    records = read_lineages(trial)
    own = [record for record in records if record.submission == submission]
    wanted = None if own else asked.wanted
    found = generation.scan(trial)
    ancestors, lost = _ancestors(trial, records, own, found)
    ancestry = frozenset({submission}) | ancestors
    only = ancestry if asked.mode == "fault" and own else None
    generations, damaged = _verified(found, only, wanted, in_passing)
    before = [record for record in own if (record.attempt, record.incarnation) != (attempt.id, incarnation)]
    situation = replace(
        asked,
        first_start=not own,
        generations=tuple(generations),
        ancestry=ancestry,
        has_state=len(own) < len(records),
        cause=cause_of(trial, before[-1], attempt.id)[0] if before else None,
        history=past_starts(trial, attempt.id, before, generations),
        wanted=wanted,
        trimmed=trimmed(trial),
        lost=lost,
    )
    return situation, damaged


def fruitless_starts(trial: Trial, submission: str, running: str = "") -> tuple[PastStart, ...]:
    """Return the starts of a job's trainer since the newest generation, oldest first, by manifests alone.

    `running` is the attempt that runs, if one does.
    """
    own = [record for record in read_lineages(trial) if record.submission == submission]
    generations, _ = _verified(generation.scan(trial), frozenset(), None)
    runs = running and own and own[-1].attempt == running
    if runs and trainer_exit(trial.attempt(running), own[-1].incarnation) is None:
        own = own[:-1]
    return past_starts(trial, running, own, generations)


def trimmed(trial: Trial) -> int:
    """Return the step up to which batches are gone from the batch log; 0 where all are there."""
    step = read_object(trial.trimmed).get("step")
    return max(step if isinstance(step, int) else 0, min(seals_of(trial), default=1) - 1)


def seals_of(trial: Trial) -> list[int]:
    """Return the steps of the batches that are cut and kept, in no order."""
    return [int(match[1]) for entry in entries(trial.batches) if (match := _SEAL.fullmatch(entry.name))]


def _ancestors(
    trial: Trial, records: list[LineageRecord], own: list[LineageRecord], found: list[Found]
) -> tuple[frozenset[str], tuple[int, ...]]:
    """Return the submissions whose lineages those of `own` continue, and the lineages that are lost.

    Where the record of a lineage is lost, its generations and the records of the submissions count.
    """
    by_number = {record.lineage: record for record in records}
    makers = {one.manifest.lineage: one.manifest.submission for one in found if one.manifest}
    submissions: set[str] = set()
    seen: set[int] = set()
    lost: set[int] = set()
    todo = [(record.lineage, record.submission) for record in own]
    while todo:
        number, child = todo.pop()
        if number in seen:
            continue
        seen.add(number)
        if number == IMPORTED_LINEAGE:
            submissions.add(IMPORTED)
        elif number in by_number:
            record = by_number[number]
            submissions.add(record.submission)
            todo += [] if record.from_lineage is None else [(record.from_lineage, record.submission)]
        else:
            known = _recovered_from(trial, child) | ({makers[number]} if number in makers else set())
            submissions |= known
            todo += [(record.lineage, record.submission) for record in records if record.submission in known]
            lost |= set() if known else {number}
    return frozenset(submissions), tuple(sorted(lost))


def _recovered_from(trial: Trial, submission: str) -> set[str]:
    """Return the submissions that a submission continues, by the records that `hpc-rl recover` left."""
    found: set[str] = set()
    while True:
        job = JobRecord.read(trial.job(submission))
        parent = job.lineage_parent if job else None
        if parent is None or parent in found:
            return found
        found.add(parent)
        submission = parent


def read_limit(found: Found, wanted: int | None, in_passing: bool = False) -> int | None:
    """Return up to which size the files of a generation are read before it is chosen, in bytes; None for all.

    Large ones are checked while they are loaded, so that each is read once. Of the one that was asked for
    (`wanted`) all are read, for later ones are set aside for it; `in_passing` only where that takes no time.
    """
    size = sum(file.size for file in found.manifest.files) if found.manifest else 0
    return generation.LIGHT_BYTES if wanted is None or (in_passing and size > IN_PASSING_BYTES) else None


def _verified(
    found: list[Found], only: frozenset[str] | None, wanted: int | None, in_passing: bool = False
) -> tuple[list[GenerationInfo], list[Found]]:
    """Return all generations; those that may be loaded are read, newest first, up to a valid one."""
    infos, damaged, looking = [], [], True
    for one in found:
        lineage, submission = (one.manifest.lineage, one.manifest.submission) if one.manifest else (-1, "")
        eligible = one.step == wanted if wanted is not None else only is None or submission in only
        read = looking and eligible
        if read:
            one = generation.verify(one, read_limit(one, wanted, in_passing))
            looking = bool(one.problem)
            damaged += [one] if one.problem else []
        infos.append(GenerationInfo(one.step, lineage, submission, not one.problem, one.problem, read))
    return infos, damaged


def failures_without_progress(events: list[Event]) -> int:
    """Return how many exits since the newest generation use up retries."""
    count = 0
    for event in events:
        if event.kind is EventKind.PROGRESS:
            count = 0
        elif event.kind is EventKind.EXITED and event.uses_retry:
            count += 1
    return count


def past_starts(
    trial: Trial, attempt_id: str, own: list[LineageRecord], found: list[GenerationInfo]
) -> tuple[PastStart, ...]:
    """Return the starts since the last that led to a generation, oldest first.

    They are known by their lineages, and those that failed before they had one by the events.
    """
    submission = own[-1].submission if own else trial.attempt(attempt_id).job_id
    parents = [one.from_lineage for one in own if one.from_lineage is not None]
    newest = max([one.lineage for one in found] + parents, default=-1)
    failed, fruitful = _failures(trial, submission)
    made = [_order(trial, one) for one in own if one.lineage <= newest]
    # a supervisor that was killed may have missed the progress
    fruitful = max([fruitful, *made])
    failed = [past for past in failed if _order(trial, past) > fruitful]
    silent = [one for one in own if one.lineage > newest and _order(trial, one) > fruitful]
    starts = [PastStart(one.attempt, one.incarnation, *cause_of(trial, one, attempt_id)) for one in silent]
    by_order = {_order(trial, past): past for past in [*starts, *failed]}
    return tuple(by_order[order] for order in sorted(by_order))


def _failures(trial: Trial, submission: str) -> tuple[list[PastStart], tuple[int, int]]:
    """Return the failures since the newest generation, and (restart, incarnation) that made it."""
    failed: list[PastStart] = []
    fruitful, running = (-1, -1), (-1, -1)
    for attempt in trial.attempts_of(submission):
        for event in read_events(attempt):
            number = -1 if event.incarnation is None else event.incarnation
            if event.kind is EventKind.PROGRESS:
                failed, fruitful = [], running
            elif event.role == "trainer" and event.kind is EventKind.STARTED:
                running = (attempt.restart, number)
            elif event.role == "trainer" and event.kind is EventKind.EXITED and event.uses_retry:
                failed.append(PastStart(attempt.id, number, Cause.FAILED, event.reason))
    return failed, fruitful


def cause_of(trial: Trial, record: LineageRecord, now: str) -> tuple[Cause, str]:
    """Return why a start that had a lineage ended, with its reason; `now` is the attempt of the caller."""
    attempt = trial.attempt(record.attempt)
    exited = trainer_exit(attempt, record.incarnation)
    if exited is not None:
        if exited.code in (ExitCode.STOPPED, ExitCode.DONE):
            return _cause_of_stop(attempt)
        is_full = exited.failure is FailureClass.DISK_FULL
        return Cause.DISK_FULL if is_full else Cause.FAILED, exited.reason
    if record.attempt == now:
        return Cause.SUPERVISOR, ""
    ended = EndedRecord.read(attempt.ended)
    if ended is None:
        return Cause.NODE, ""
    if ended.exit_code in (ExitCode.STOPPED, ExitCode.DONE):
        return _cause_of_stop(attempt)
    return Cause.FAILED, ended.reason


CAUSES = {
    StopCause.TIME_LIMIT: Cause.WALLTIME,
    StopCause.PREEMPTION: Cause.PREEMPTED,
}


def _cause_of_stop(attempt: Attempt) -> tuple[Cause, str]:
    events = read_events(attempt)
    asked = [event for event in events if event.kind is EventKind.STOPPING]
    if not asked or asked[-1].cause is None:
        return Cause.STOPPED, asked[-1].reason if asked else ""
    if asked[-1].cause is StopCause.USER_SIGNAL and _is_warning(asked[-1], events):
        return Cause.WALLTIME, asked[-1].reason
    return CAUSES.get(asked[-1].cause, Cause.STOPPED), asked[-1].reason


def _is_warning(stop: Event, events: Sequence[Event]) -> bool:
    """Return whether a SIGUSR1 came so shortly before the end of the job that Slurm sent it."""
    ends = [event.ends_at for event in events if event.kind is EventKind.END_TIME and event.ends_at]
    return bool(ends) and stop.time is not None and ends[-1] - stop.time < WARNING_S


def trainer_exit(attempt: Attempt, incarnation: int) -> Event | None:
    """Return how the supervisor saw one trainer incarnation exit; None where it did not."""
    exits = [event for event in read_events(attempt) if event.kind is EventKind.EXITED]
    of_trainer = (event for event in reversed(exits) if event.unit == ("trainer", 0))
    return next((event for event in of_trainer if event.incarnation == incarnation), None)


def _order(trial: Trial, start: LineageRecord | PastStart) -> tuple[int, int]:
    return trial.attempt(start.attempt).restart, start.incarnation
