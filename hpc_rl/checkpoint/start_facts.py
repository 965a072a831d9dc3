"""Gathers the facts for the decision of a start: generations, lineages, past starts. Only reads files."""

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
    load_events,
    load_lineages,
)
from hpc_rl.core.trial import Attempt, Trial, list_entries, load_object

_SEAL = re.compile(r"(\d+)\.seal")
# largest generation that a command reads whole before it submits a start from it
IN_PASSING_BYTES = 1 << 30


def decide_start(
    trial: Trial, attempt: Attempt, incarnation: int, asked: Situation
) -> tuple[Decision, list[Found]]:
    """Decide how a trainer starts now; return the decision and the generations to set aside first.

    These are the skipped damaged ones, or with `wanted` (`hpc-rl recover --from`) the later ones. Reads
    eligible generations, newest first, until one is valid.
    """
    situation, damaged = gather(trial, attempt, incarnation, asked)
    decision = decide(situation)
    if decision.action not in ("load", "fresh"):
        return decision, []
    if not decision.set_aside:
        return decision, damaged
    why = f"it is later than checkpoint {decision.step}"
    later = [found for found in generation.scan(trial) if found.step in decision.set_aside]
    return decision, [replace(found, problem=found.problem or why) for found in later]


def gather(
    trial: Trial, attempt: Attempt, incarnation: int, asked: Situation, in_passing: bool = False
) -> tuple[Situation, list[Found]]:
    """Return the input of decide() from the trial directory, and the damaged generations.

    `asked` has the request: modes, retries, wanted. `in_passing` is for commands that only predict a start;
    see choose_read_limit.
    """
    submission = attempt.job_id
    records = load_lineages(trial)
    own = [record for record in records if record.submission == submission]
    wanted = None if own else asked.wanted
    found = generation.scan(trial)
    ancestors, lost = _find_ancestors(trial, records, own, found)
    ancestry = frozenset({submission}) | ancestors
    only = ancestry if asked.mode == "fault" and own else None
    generations, damaged = _verify_generations(found, only, wanted, in_passing)
    before = [record for record in own if (record.attempt, record.incarnation) != (attempt.id, incarnation)]
    situation = replace(
        asked,
        first_start=not own,
        generations=tuple(generations),
        ancestry=ancestry,
        has_state=len(own) < len(records),
        cause=find_cause(trial, before[-1], attempt.id)[0] if before else None,
        history=list_past_starts(trial, attempt.id, before, generations),
        wanted=wanted,
        trimmed=find_trimmed(trial),
        lost=lost,
    )
    return situation, damaged


def find_fruitless_starts(trial: Trial, submission: str, running: str = "") -> tuple[PastStart, ...]:
    """Return the starts of a job's trainer since the newest generation, oldest first. Reads only manifests.

    `running` is the running attempt, if any.
    """
    own = [record for record in load_lineages(trial) if record.submission == submission]
    generations, _ = _verify_generations(generation.scan(trial), frozenset(), None)
    runs = running and own and own[-1].attempt == running
    if runs and find_trainer_exit(trial.attempt(running), own[-1].incarnation) is None:
        own = own[:-1]
    return list_past_starts(trial, running, own, generations)


def find_trimmed(trial: Trial) -> int:
    """Return the step up to which batches were removed from the batch log, or 0."""
    step = load_object(trial.trimmed).get("step")
    return max(step if isinstance(step, int) else 0, min(list_seals(trial), default=1) - 1)


def list_seals(trial: Trial) -> list[int]:
    """Return the steps of the batches in the batch log, in no order."""
    return [int(match[1]) for entry in list_entries(trial.batches) if (match := _SEAL.fullmatch(entry.name))]


def _find_ancestors(
    trial: Trial, records: list[LineageRecord], own: list[LineageRecord], found: list[Found]
) -> tuple[frozenset[str], tuple[int, ...]]:
    """Return the ancestor submissions of the lineages `own`, and the lost lineages.

    If the record of a lineage is lost, its generations and the job records are used instead.
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
            known = _find_recovered_from(trial, child) | ({makers[number]} if number in makers else set())
            submissions |= known
            todo += [(record.lineage, record.submission) for record in records if record.submission in known]
            lost |= set() if known else {number}
    return frozenset(submissions), tuple(sorted(lost))


def _find_recovered_from(trial: Trial, submission: str) -> set[str]:
    """Return the submissions that a submission continues, by the job records of `hpc-rl recover`."""
    found: set[str] = set()
    while True:
        job = JobRecord.read(trial.job(submission))
        parent = job.lineage_parent if job else None
        if parent is None or parent in found:
            return found
        found.add(parent)
        submission = parent


def choose_read_limit(found: Found, wanted: int | None, in_passing: bool = False) -> int | None:
    """Return the size in bytes up to which files of a generation are read before it is chosen; None for all.

    Large files are checked during loading, so that each is read once. If the user named the generation
    (`wanted`), all are read, because later generations are set aside for it. With `in_passing`, only if the
    generation is small.
    """
    size = sum(file.size for file in found.manifest.files) if found.manifest else 0
    return generation.LIGHT_BYTES if wanted is None or (in_passing and size > IN_PASSING_BYTES) else None


def _verify_generations(
    found: list[Found], only: frozenset[str] | None, wanted: int | None, in_passing: bool = False
) -> tuple[list[GenerationInfo], list[Found]]:
    """Return all generations, and the damaged ones. Reads eligible ones, newest first, until one is valid."""
    infos, damaged, looking = [], [], True
    for one in found:
        lineage, submission = (one.manifest.lineage, one.manifest.submission) if one.manifest else (-1, "")
        eligible = one.step == wanted if wanted is not None else only is None or submission in only
        read = looking and eligible
        if read:
            one = generation.verify(one, choose_read_limit(one, wanted, in_passing))
            looking = bool(one.problem)
            damaged += [one] if one.problem else []
        infos.append(GenerationInfo(one.step, lineage, submission, not one.problem, one.problem, read))
    return infos, damaged


def count_failures(events: list[Event]) -> int:
    """Count the exits since the newest generation that used a retry."""
    count = 0
    for event in events:
        if event.kind is EventKind.PROGRESS:
            count = 0
        elif event.kind is EventKind.EXITED and event.uses_retry:
            count += 1
    return count


def list_past_starts(
    trial: Trial, attempt_id: str, own: list[LineageRecord], found: list[GenerationInfo]
) -> tuple[PastStart, ...]:
    """Return the starts since the last one that made a generation, oldest first.

    Lineages give the starts; events give starts that failed before they had a lineage.
    """
    submission = own[-1].submission if own else trial.attempt(attempt_id).job_id
    parents = [one.from_lineage for one in own if one.from_lineage is not None]
    newest = max([one.lineage for one in found] + parents, default=-1)
    failed, fruitful = _list_failures(trial, submission)
    made = [_make_order(trial, one) for one in own if one.lineage <= newest]
    # a killed supervisor may have missed progress
    fruitful = max([fruitful, *made])
    failed = [past for past in failed if _make_order(trial, past) > fruitful]
    silent = [one for one in own if one.lineage > newest and _make_order(trial, one) > fruitful]
    starts = [PastStart(one.attempt, one.incarnation, *find_cause(trial, one, attempt_id)) for one in silent]
    by_order = {_make_order(trial, past): past for past in [*starts, *failed]}
    return tuple(by_order[order] for order in sorted(by_order))


def _list_failures(trial: Trial, submission: str) -> tuple[list[PastStart], tuple[int, int]]:
    """Return the failures since the newest generation, and the (restart, incarnation) that made it."""
    failed: list[PastStart] = []
    fruitful, running = (-1, -1), (-1, -1)
    for attempt in trial.list_attempts(submission):
        for event in load_events(attempt):
            number = -1 if event.incarnation is None else event.incarnation
            if event.kind is EventKind.PROGRESS:
                failed, fruitful = [], running
            elif event.role == "trainer" and event.kind is EventKind.STARTED:
                running = (attempt.restart, number)
            elif event.role == "trainer" and event.kind is EventKind.EXITED and event.uses_retry:
                failed.append(PastStart(attempt.id, number, Cause.FAILED, event.reason))
    return failed, fruitful


def find_cause(trial: Trial, record: LineageRecord, now: str) -> tuple[Cause, str]:
    """Return why a start with a lineage ended, with the reason. `now` is the attempt of the caller."""
    attempt = trial.attempt(record.attempt)
    exited = find_trainer_exit(attempt, record.incarnation)
    if exited is not None:
        if exited.code in (ExitCode.STOPPED, ExitCode.DONE):
            return _find_stop_cause(attempt)
        is_full = exited.failure is FailureClass.DISK_FULL
        return Cause.DISK_FULL if is_full else Cause.FAILED, exited.reason
    if record.attempt == now:
        return Cause.SUPERVISOR, ""
    ended = EndedRecord.read(attempt.ended)
    if ended is None:
        return Cause.NODE, ""
    if ended.exit_code in (ExitCode.STOPPED, ExitCode.DONE):
        return _find_stop_cause(attempt)
    return Cause.FAILED, ended.reason


CAUSES = {
    StopCause.TIME_LIMIT: Cause.WALLTIME,
    StopCause.PREEMPTION: Cause.PREEMPTED,
}


def _find_stop_cause(attempt: Attempt) -> tuple[Cause, str]:
    events = load_events(attempt)
    asked = [event for event in events if event.kind is EventKind.STOPPING]
    if not asked or asked[-1].cause is None:
        return Cause.STOPPED, asked[-1].reason if asked else ""
    if asked[-1].cause is StopCause.USER_SIGNAL and _is_warning(asked[-1], events):
        return Cause.WALLTIME, asked[-1].reason
    return CAUSES.get(asked[-1].cause, Cause.STOPPED), asked[-1].reason


def _is_warning(stop: Event, events: Sequence[Event]) -> bool:
    """Return whether a SIGUSR1 came shortly before the end of the job, so Slurm sent it."""
    ends = [event.ends_at for event in events if event.kind is EventKind.END_TIME and event.ends_at]
    return bool(ends) and stop.time is not None and ends[-1] - stop.time < WARNING_S


def find_trainer_exit(attempt: Attempt, incarnation: int) -> Event | None:
    """Return the exit of a trainer incarnation that the supervisor recorded, or None."""
    exits = [event for event in load_events(attempt) if event.kind is EventKind.EXITED]
    of_trainer = (event for event in reversed(exits) if event.unit == ("trainer", 0))
    return next((event for event in of_trainer if event.incarnation == incarnation), None)


def _make_order(trial: Trial, start: LineageRecord | PastStart) -> tuple[int, int]:
    return trial.attempt(start.attempt).restart, start.incarnation
