"""Lineages: which start went on from which state. Creates the record of the next one and gathers what decide.py needs to know.

`lineages/<NNNN>.json` is created exclusively, so that of two starters each has a number of its own. Reads files only.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.decide import Cause, Decision, GenerationInfo, PastStart, Situation, decide
from hpc_rl.checkpoint.generation import Found
from hpc_rl.checkpoint.manifest import IMPORTED, IMPORTED_LINEAGE
from hpc_rl.errors import ExitCode, FailureClass
from hpc_rl.stats.read import JsonLines, Row
from hpc_rl.trial import Attempt, Trial, create_exclusive, entries, fsync_dir, read_json

_NAME = re.compile(r"(\d{4,})\.json")
_SEAL = re.compile(r"(\d+)\.seal")
_LABEL = re.compile(r"(\d+)\.\d+")  # of published weights
IN_PASSING_BYTES = 1 << 30  # a command reads a whole generation of this size before it submits a start from it
TIME_IS_OVER = "the job's time is nearly over"  # why a supervisor drains, in its events


@dataclass(frozen=True, kw_only=True)
class LineageRecord:
    """One start of training that came as far as having state.

    Args:
        lineage: Its number, from 0.
        from_step: Step of the state that it started from; 0 for a fresh start.
        from_lineage: Lineage that made this state; None for a fresh start.
        attempt: Attempt id.
        incarnation: Trainer incarnation.
        submission: Job id.
        reason: Why it started so.
        set_aside: Steps of the generations that a person's `--from` moved out of the way.
        time: Unix seconds of its host's clock, for people.
    """

    lineage: int
    from_step: int
    from_lineage: int | None = None
    attempt: str
    incarnation: int
    submission: str
    reason: str = ""
    set_aside: tuple[int, ...] = ()
    time: float = 0.0


def read_lineages(trial: Trial) -> list[LineageRecord]:
    """All records, oldest first. Unreadable ones are passed over."""
    records = []
    for path in _paths(trial):
        record = _read(path)
        records += [] if record is None else [record]
    return sorted(records, key=lambda record: record.lineage)


def _read(path: Path) -> LineageRecord | None:
    data: Any = read_json(path) if path.is_file() else None  # a pipe would never end
    try:
        record = LineageRecord(**{**data, "set_aside": tuple(data.get("set_aside", ()))})
    except (TypeError, AttributeError):
        return None
    numbers = (record.lineage, record.from_step, record.from_lineage or 0, record.incarnation, *record.set_aside)
    words = (record.attempt, record.submission, record.reason)
    is_sound = all(isinstance(one, int) for one in numbers) and all(isinstance(one, str) for one in words)
    return record if is_sound and record.lineage == int(path.stem) else None


def next_lineage(trial: Trial, attempt: Attempt, incarnation: int, decision: Decision) -> LineageRecord:
    """Create the record of this start under the next number that nothing bears yet. Raises OSError."""
    trial.lineages.mkdir(exist_ok=True)
    number = max(_numbers(trial), default=-1) + 1
    while True:
        record = LineageRecord(
            lineage=number,
            from_step=decision.step or 0,
            from_lineage=decision.lineage,
            attempt=attempt.id,
            incarnation=incarnation,
            submission=submission_of(attempt.id),
            reason=decision.reason,
            set_aside=decision.set_aside,
            time=time.time(),
        )
        if create_exclusive(trial.lineages / f"{number:04d}.json", json.dumps(asdict(record), indent=2) + "\n"):
            fsync_dir(trial.lineages)
            return record
        number += 1


def _numbers(trial: Trial) -> list[int]:
    """Of lineages that have a record, made a generation or published weights: who lost records must not use a label twice."""
    made = [found.manifest.lineage for found in generation.scan(trial) if found.manifest]
    published = [int(match[1]) for entry in entries(trial.weights) if (match := _LABEL.fullmatch(entry.name))]
    return [int(path.stem) for path in _paths(trial)] + made + published


def withdraw(trial: Trial, lineage: int) -> None:
    """Take back the record of a start that loaded nothing and labelled no version. Raises OSError."""
    (trial.lineages / f"{lineage:04d}.json").unlink(missing_ok=True)
    fsync_dir(trial.lineages)


def decide_start(
    trial: Trial, attempt: Attempt, incarnation: int, mode: str, start_mode: str, retries: int, wanted: int | None = None
) -> tuple[Decision, list[Found]]:
    """The decision for a trainer that starts now, and the generations to be set aside before it does.

    Those are the damaged ones that it passes over, and with `wanted` (`hpc-rl recover --from`) the later ones. Reads every byte
    of the generations that it considers, newest first, up to the first that is valid and eligible.
    """
    situation, damaged = gather(trial, attempt, incarnation, mode, start_mode, retries, wanted)
    decision = decide(situation)
    if decision.action not in ("load", "fresh"):
        return decision, []
    if not decision.set_aside:
        return decision, damaged
    later = [found for found in generation.scan(trial) if found.step in decision.set_aside]
    return decision, [replace(found, problem=found.problem or f"is later than {decision.step}") for found in later]


def gather(
    trial: Trial,
    attempt: Attempt,
    incarnation: int,
    mode: str,
    start_mode: str,
    retries: int,
    wanted: int | None = None,
    in_passing: bool = False,
) -> tuple[Situation, list[Found]]:
    """What lies in the trial directory, as decide() wants it, and the generations that do not verify.

    `in_passing` is for who only wants to know what a start would do: see read_limit.
    """
    submission = submission_of(attempt.id)
    records = read_lineages(trial)
    own = [record for record in records if record.submission == submission]
    wanted = None if own else wanted
    found = generation.scan(trial)
    ancestors, lost = _ancestors(trial, records, own, found)
    ancestry = frozenset({submission}) | ancestors
    only = ancestry if mode == "fault" and own else None
    generations, damaged = _verified(found, only, wanted, in_passing)
    before = [record for record in own if (record.attempt, record.incarnation) != (attempt.id, incarnation)]
    situation = Situation(
        mode=mode,
        start_mode=start_mode,
        first_start=not own,
        generations=tuple(generations),
        ancestry=ancestry,
        has_state=len(own) < len(records),
        cause=_end(trial, before[-1], attempt.id)[0] if before else None,
        history=_history(trial, attempt.id, before, generations),
        retries=retries,
        wanted=wanted,
        trimmed=trimmed(trial),
        lost=lost,
    )
    return situation, damaged


def fruitless_starts(trial: Trial, submission: str, running: str = "") -> tuple[PastStart, ...]:
    """Starts of a job's trainer since the newest generation, oldest first; `running` is the attempt that runs, if one does.

    Reads manifests, not the content of generations.
    """
    own = [record for record in read_lineages(trial) if record.submission == submission]
    generations, _ = _verified(generation.scan(trial), frozenset(), None)
    if running and own and own[-1].attempt == running and _trainer_end(trial.attempt(running), own[-1].incarnation) is None:
        own = own[:-1]
    return _history(trial, running, own, generations)


def trimmed(trial: Trial) -> int:
    """The step up to which batches are gone from the batch log: by its own word, or by its oldest seal; 0 where all are there."""
    said: Any = read_json(trial.trimmed)
    word = said["step"] if isinstance(said, dict) and isinstance(said.get("step"), int) else 0
    return max(word, min(seals_of(trial), default=1) - 1)


def seals_of(trial: Trial) -> list[int]:
    """Steps of the batches that are cut and kept, in no order."""
    return [int(match[1]) for entry in entries(trial.batches) if (match := _SEAL.fullmatch(entry.name))]


def submission_of(attempt_id: str) -> str:
    """Job id of an attempt `<jobid>.<restart>`."""
    return attempt_id.rpartition(".")[0] or attempt_id


def attempts_of(trial: Trial, submission: str) -> list[Attempt]:
    """The attempts of one job, oldest first."""
    names = [entry.name for entry in entries(trial.attempts) if entry.is_dir()]
    own = [name for name in names if submission_of(name) == submission and name.rpartition(".")[2].isdigit()]
    return [trial.attempt(name) for name in sorted(own, key=lambda name: int(name.rpartition(".")[2]))]


def failures_without_progress(events: list[Row]) -> int:
    """Ends since the newest event of progress that use up the retries, by the supervisor's own words."""
    count = 0
    for row in events:
        if row.get("event") == "progress":
            count = 0
        elif row.get("event") == "exited" and row.get("failure"):
            count += 1
    return count


def _ancestors(
    trial: Trial, records: list[LineageRecord], own: list[LineageRecord], found: list[Found]
) -> tuple[frozenset[str], tuple[int, ...]]:
    """Submissions whose lineages those of `own` go on from, step by step, and the import that one of them began with.

    Where the record of a lineage is lost, what its generations say of it counts, and what the submissions say of each other;
    second come the lineages of which nothing at all is known.
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
    """The submissions that a submission goes on from, by the word of each that `hpc-rl recover` left."""
    found: set[str] = set()
    while True:
        job: Any = read_json(trial.job(submission))
        parent = job.get("lineage_parent") if isinstance(job, dict) else None
        if not isinstance(parent, str) or parent in found:
            return found
        found.add(parent)
        submission = parent


def read_limit(found: Found, wanted: int | None, in_passing: bool = False) -> int | None:
    """Up to which size the files of a generation are read before it is chosen, in bytes; None for all of them.

    Large ones are checked while they are loaded, so that each is read once. Of the one that a person asked for (`wanted`) all
    are read, for later ones are set aside for it; in passing only where that is quickly done.
    """
    size = sum(file.size for file in found.manifest.files) if found.manifest else 0
    return generation.LIGHT_BYTES if wanted is None or (in_passing and size > IN_PASSING_BYTES) else None


def _verified(
    found: list[Found], only: frozenset[str] | None, wanted: int | None, in_passing: bool = False
) -> tuple[list[GenerationInfo], list[Found]]:
    """What each generation is; content is read of those that may be loaded, newest first, up to the first that is valid."""
    infos, damaged, looking = [], [], True
    for one in found:
        submission = one.manifest.submission if one.manifest else ""
        eligible = one.step == wanted if wanted is not None else only is None or submission in only
        read = looking and eligible
        if read:
            one = generation.verify(one, read_limit(one, wanted, in_passing))
            if one.problem:
                damaged.append(one)
        lineage = one.manifest.lineage if one.manifest else -1
        infos.append(GenerationInfo(one.step, lineage, submission, not one.problem, one.problem, read))
        looking = looking and not (eligible and not one.problem)
    return infos, damaged


def _history(trial: Trial, attempt_id: str, own: list[LineageRecord], found: list[GenerationInfo]) -> tuple[PastStart, ...]:
    """Past starts that led to no generation, since the last that did: by their lineages, and those that failed before they had
    one by the events. One that made a generation and failed then is none of them."""
    submission = own[-1].submission if own else submission_of(attempt_id)
    newest = max([one.lineage for one in found] + [one.from_lineage for one in own if one.from_lineage is not None], default=-1)
    failed, fruitful = _failures(trial, submission)
    made = max(((_restart(one.attempt), one.incarnation) for one in own if one.lineage <= newest), default=(-1, -1))
    fruitful = max(fruitful, made)  # a supervisor that was killed may have missed the progress
    failed = [past for past in failed if _order(past) > fruitful]
    silent = [one for one in own if one.lineage > newest and (_restart(one.attempt), one.incarnation) > fruitful]
    starts = [PastStart(one.attempt, one.incarnation, *_end(trial, one, attempt_id)) for one in silent]
    return tuple(sorted({_order(past): past for past in [*starts, *failed]}.values(), key=_order))


def _failures(trial: Trial, submission: str) -> tuple[list[PastStart], tuple[int, int]]:
    """Failures since the newest event of progress, and (restart, incarnation) of the trainer that ran at that event."""
    failed: list[PastStart] = []
    fruitful, running = (-1, -1), (-1, -1)
    for attempt in attempts_of(trial, submission):
        for row in JsonLines(attempt.events).poll():
            number = row["incarnation"] if isinstance(row.get("incarnation"), int) else -1
            if row.get("event") == "started" and row.get("role") == "trainer":
                running = (_restart(attempt.id), number)
            elif row.get("event") == "progress":
                failed, fruitful = [], running
            elif _is_failure(row):
                failed.append(PastStart(attempt.id, number, Cause.FAILED, str(row.get("reason") or "")))
    return failed, fruitful


def _end(trial: Trial, record: LineageRecord, now: str) -> tuple[Cause, str]:
    """Why a start that had a lineage ended, and the words on record; `now` is the attempt of whoever asks."""
    attempt = trial.attempt(record.attempt)
    seen = _trainer_end(attempt, record.incarnation)
    if seen is not None:
        if seen.get("code") in (ExitCode.STOPPED, ExitCode.DONE):
            return _stop(attempt)
        cause = Cause.DISK_FULL if seen.get("class") == FailureClass.DISK_FULL else Cause.FAILED
        return cause, str(seen.get("reason") or "")
    if record.attempt == now:
        return Cause.SUPERVISOR, ""
    ended: Any = read_json(attempt.ended)
    if not isinstance(ended, dict):
        return Cause.NODE, ""
    reason = str(ended.get("reason") or "")
    return _stop(attempt) if ended.get("exit_code") in (ExitCode.STOPPED, ExitCode.DONE) else (Cause.FAILED, reason)


def _stop(attempt: Attempt) -> tuple[Cause, str]:
    """A drain, by what asked for it: the words of the supervisor's `stopping`."""
    asked = [str(row.get("reason") or "") for row in JsonLines(attempt.events).poll() if row.get("event") == "stopping"]
    words = asked[-1] if asked else ""
    if words.startswith((TIME_IS_OVER, "SIGUSR1")):  # the script's warning comes some time before the limit
        return Cause.WALLTIME, words
    return (Cause.PREEMPTED, words) if words.startswith("SIGTERM") else (Cause.STOPPED, words)


def _trainer_end(attempt: Attempt, incarnation: int) -> Row | None:
    """How the supervisor saw one trainer incarnation end; None where it did not."""
    for row in reversed(JsonLines(attempt.events).poll()):
        if row.get("event") == "exited" and row.get("role") == "trainer" and row.get("incarnation") == incarnation:
            return row
    return None


def _is_failure(row: Row) -> bool:
    return bool(row.get("event") == "exited" and row.get("role") == "trainer" and row.get("failure"))


def _restart(attempt_id: str) -> int:
    number = attempt_id.rpartition(".")[2]
    return int(number) if number.isdigit() else -1


def _order(past: PastStart) -> tuple[int, int]:
    return _restart(past.attempt), past.incarnation


def _paths(trial: Trial) -> list[Path]:
    return [Path(entry.path) for entry in entries(trial.lineages) if _NAME.fullmatch(entry.name)]
