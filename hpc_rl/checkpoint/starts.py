"""Past starts of a trial: which led to no new generation, and why each ended. Reads lineages and events."""

from __future__ import annotations

from typing import Any

from hpc_rl.checkpoint.decide import Cause, GenerationInfo, PastStart
from hpc_rl.errors import ExitCode, FailureClass
from hpc_rl.files import JsonLines, Row
from hpc_rl.records import LineageRecord
from hpc_rl.trial import Attempt, Trial, entries, read_json, submission_of

TIME_IS_OVER = "the job's time is nearly over"  # why a supervisor drains, in its events


def attempts_of(trial: Trial, submission: str) -> list[Attempt]:
    """The attempts of one job, oldest first."""
    names = [entry.name for entry in entries(trial.attempts) if entry.is_dir()]
    own = [
        name for name in names if submission_of(name) == submission and name.rpartition(".")[2].isdecimal()
    ]
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


def past_starts(
    trial: Trial, attempt_id: str, own: list[LineageRecord], found: list[GenerationInfo]
) -> tuple[PastStart, ...]:
    """Past starts that led to no generation, since the last that did: by their lineages, and those that failed before they had
    one by the events. One that made a generation and failed then is none of them."""
    submission = own[-1].submission if own else submission_of(attempt_id)
    newest = max(
        [one.lineage for one in found] + [one.from_lineage for one in own if one.from_lineage is not None],
        default=-1,
    )
    failed, fruitful = _failures(trial, submission)
    made = max(
        ((_restart(one.attempt), one.incarnation) for one in own if one.lineage <= newest), default=(-1, -1)
    )
    fruitful = max(fruitful, made)  # a supervisor that was killed may have missed the progress
    failed = [past for past in failed if _order(past) > fruitful]
    silent = [
        one for one in own if one.lineage > newest and (_restart(one.attempt), one.incarnation) > fruitful
    ]
    starts = [PastStart(one.attempt, one.incarnation, *cause_of(trial, one, attempt_id)) for one in silent]
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


def cause_of(trial: Trial, record: LineageRecord, now: str) -> tuple[Cause, str]:
    """Why a start that had a lineage ended, and the words on record; `now` is the attempt of whoever asks."""
    attempt = trial.attempt(record.attempt)
    seen = trainer_end(attempt, record.incarnation)
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
    return (
        _stop(attempt)
        if ended.get("exit_code") in (ExitCode.STOPPED, ExitCode.DONE)
        else (Cause.FAILED, reason)
    )


def _stop(attempt: Attempt) -> tuple[Cause, str]:
    """A drain, by what asked for it: the words of the supervisor's `stopping`."""
    asked = [
        str(row.get("reason") or "")
        for row in JsonLines(attempt.events).poll()
        if row.get("event") == "stopping"
    ]
    words = asked[-1] if asked else ""
    if words.startswith((TIME_IS_OVER, "SIGUSR1")):  # the script's warning comes some time before the limit
        return Cause.WALLTIME, words
    return (Cause.PREEMPTED, words) if words.startswith("SIGTERM") else (Cause.STOPPED, words)


def trainer_end(attempt: Attempt, incarnation: int) -> Row | None:
    """How the supervisor saw one trainer incarnation end; None where it did not."""
    for row in reversed(JsonLines(attempt.events).poll()):
        if (
            row.get("event") == "exited"
            and row.get("role") == "trainer"
            and row.get("incarnation") == incarnation
        ):
            return row
    return None


def _is_failure(row: Row) -> bool:
    return bool(row.get("event") == "exited" and row.get("role") == "trainer" and row.get("failure"))


def _restart(attempt_id: str) -> int:
    number = attempt_id.rpartition(".")[2]
    return int(number) if number.isdecimal() else -1


def _order(past: PastStart) -> tuple[int, int]:
    return _restart(past.attempt), past.incarnation
