"""Gathers what decide.py needs to know from a trial directory. Reads files only."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.decide import Decision, GenerationInfo, PastStart, Situation, decide
from hpc_rl.checkpoint.generation import Found
from hpc_rl.checkpoint.manifest import IMPORTED, IMPORTED_LINEAGE
from hpc_rl.checkpoint.starts import cause_of, past_starts, trainer_end
from hpc_rl.records import LineageRecord, read_lineages
from hpc_rl.trial import Attempt, Trial, entries, read_json, submission_of

_SEAL = re.compile(r"(\d+)\.seal")
IN_PASSING_BYTES = (
    1 << 30
)  # a command reads a whole generation of this size before it submits a start from it


def decide_start(
    trial: Trial,
    attempt: Attempt,
    incarnation: int,
    mode: str,
    start_mode: str,
    retries: int,
    wanted: int | None = None,
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
    return decision, [
        replace(found, problem=found.problem or f"is later than {decision.step}") for found in later
    ]


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
        cause=cause_of(trial, before[-1], attempt.id)[0] if before else None,
        history=past_starts(trial, attempt.id, before, generations),
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
    if (
        running
        and own
        and own[-1].attempt == running
        and trainer_end(trial.attempt(running), own[-1].incarnation) is None
    ):
        own = own[:-1]
    return past_starts(trial, running, own, generations)


def trimmed(trial: Trial) -> int:
    """The step up to which batches are gone from the batch log: by its own word, or by its oldest seal; 0 where all are there."""
    said: Any = read_json(trial.trimmed)
    word = said["step"] if isinstance(said, dict) and isinstance(said.get("step"), int) else 0
    return max(word, min(seals_of(trial), default=1) - 1)


def seals_of(trial: Trial) -> list[int]:
    """Steps of the batches that are cut and kept, in no order."""
    return [int(match[1]) for entry in entries(trial.batches) if (match := _SEAL.fullmatch(entry.name))]


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
