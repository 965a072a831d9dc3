"""The rules of restarting and stopping, as pure functions: what an end means, who is started again, when a drain begins.

Which state a trainer starts from is checkpoint/decide.py; how the rules act on each other is supervisor.py.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_rl.errors import ExitCode, FailureClass
from hpc_rl.supervise.failures import FINAL_CODES, End, class_of

RESTARTING_MODES = ("auto", "fault")
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
HEALTHY_LIFE_S = 60.0  # an incarnation that lived so long was not part of a crash loop
ENDS_IN_A_ROW = 5
GIVEN_UP_S = 600.0  # what kept a server down may pass, as a full disk or a node that is drained; its peers work meanwhile
MARGIN_S = 30.0
BARREN_ATTEMPTS = (
    10  # in a row, without a new generation: then something is wrong that no other start will change
)


@dataclass(frozen=True)
class Verdict:
    """What follows from the end of a trainer: start it again, or end the attempt with this code."""

    restart: bool
    exit_code: int
    reason: str


def unit_end(records: Sequence[dict[str, Any] | None], raw_code: int) -> End:
    """The end of a unit from the exit records of its ranks (None: it left none) and the launcher's own code.

    78 beats all, then the other final codes, then any failure that a rank put on record. Without one, the word of rank 0
    counts, for it commits: peers that were ended after it (143) say nothing. Without that, the launcher's code does.
    """
    ends = [_recorded(rank, record) for rank, record in enumerate(records)]
    known = [end for end in ends if end is not None]
    for code in FINAL_CODES:
        for end in known:
            if end.code == code:
                return end
    for end in known:
        if end.code not in (ExitCode.DONE, ExitCode.STOPPED) and not end.by_signal:
            return _after_silent_ranks(end, [rank for rank, one in enumerate(ends) if one is None])
    if ends and ends[0] is not None:
        return ends[0]
    return known[0] if known and known[0].by_signal else _unrecorded(raw_code, len(records))


def _after_silent_ranks(end: End, silent: list[int]) -> End:
    """A rank that was killed leaves no record, and its peers complain of a lost connection: name the former first."""
    if not silent:
        return end
    ranks = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
    return End(
        end.code, f"{ranks} ended without a word (killed?); then a peer: {end.reason}", final=end.final
    )


def _recorded(rank: int, record: dict[str, Any] | None) -> End | None:
    if record is None or not isinstance(record.get("code"), int):
        return None
    reason = str(record.get("reason") or "")
    words = f"rank {rank}: {reason}" if rank and reason else reason
    return End(record["code"], words, class_of(record), final=bool(record.get("final")))


def _unrecorded(raw_code: int, num_ranks: int) -> End:
    code = 128 - raw_code if raw_code < 0 else raw_code
    if code > 128:
        return End(code, f"ended by {_signal_name(code - 128)}")
    if code == ExitCode.CANNOT_WRITE:
        return End(code, "could not write where it must (a full disk, or a quota?), not even its exit record")
    if code == 0 and num_ranks:
        return End(ExitCode.FAILED, "ended without leaving an exit record")
    return End(code, f"ended with code {code} before it could leave an exit record")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def after_trainer(end: End, mode: str, failures: int, retries: int) -> Verdict:
    """What follows while nobody asked for a stop. `failures` in a row without a new generation include this end."""
    if end.code == ExitCode.DONE:
        return Verdict(False, ExitCode.DONE, "the trainer reached its last step")
    if end.code == ExitCode.STOPPED:
        return Verdict(False, ExitCode.STOPPED, end.reason or "the trainer stopped")
    return after_failure("trainer", end, mode, failures, retries)


def after_failure(who: str, end: End, mode: str, failures: int, retries: int) -> Verdict:
    """What the table of failures says of an end that can't be left alone, within the retry budget."""
    words = f"{who}: {end.reason or f'code {end.code}'}"
    if end.code in FINAL_CODES or end.final:
        return Verdict(False, end.code, words)
    policy = end.policy
    if policy.then == "end":
        return Verdict(False, ExitCode.FAILED, f"{words} ({end.failure}: {policy.advice})")
    if mode not in RESTARTING_MODES:
        return Verdict(False, ExitCode.FAILED, f"{words}; recover.mode {mode} does not start it again")
    limit = retries if policy.most is None else min(retries, policy.most)
    if policy.counts and failures > limit:
        spent = f"{failures} failures in a row without a new generation; recover.retries allows {retries}"
        if limit < retries:
            spent = f"{failures} failures in a row without a new generation; {end.failure} is tried again {limit} times"
        return Verdict(False, ExitCode.FAILED, f"{words} ({spent}; {policy.advice})")
    if policy.then == "requeue":
        return Verdict(False, ExitCode.STOPPED, f"{words}; other nodes are needed")
    return Verdict(True, ExitCode.FAILED, words)


def after_drain(end: End | None, mode: str, failures: int, retries: int, asked: str) -> Verdict:
    """What follows when the trainer ended after it was asked to stop; None where none ran.

    A trainer that was killed before it could save has its newest generation: that is a stop as well, only a poorer one.
    """
    if end is None:
        return Verdict(False, ExitCode.STOPPED, f"{asked}; no trainer was running")
    verdict = after_trainer(end, mode, failures, retries)
    if verdict.exit_code in (ExitCode.DONE, *FINAL_CODES):
        return verdict
    if end.code == ExitCode.STOPPED:
        return Verdict(False, ExitCode.STOPPED, asked)
    if end.by_signal or verdict.restart or verdict.exit_code == ExitCode.STOPPED:
        words = f"{asked}; the trainer ended before it could save ({end.reason or end.code}), the newest generation counts"
        return Verdict(False, ExitCode.STOPPED, words)
    return verdict


def hung(why: str) -> End:
    """The end of a unit that had to be killed because nothing moved."""
    return End(128 + signal.SIGKILL, why, FailureClass.INFRASTRUCTURE)


def unplaced(role: str, reason: str, is_first_start: bool) -> End:
    """Return the end of a unit whose step the scheduler can't place on the nodes of its job.

    A first start does not fit what the job asked for; later Slurm may hold back what a lost node's steps had. A server is
    tried again: the trial works without it.
    """
    if not is_first_start:
        failure = FailureClass.NODE
    else:
        failure = FailureClass.UNKNOWN if role == "server" else FailureClass.USER
    return End(128 + signal.SIGKILL, reason, failure)


def barren(attempts: Sequence[Sequence[dict[str, Any]]]) -> int:
    """Attempts in a row, the newest last, that came to no new generation; each is its events.

    Not those that a person ended, nor those that a higher priority did, as far as the supervisor could know.
    """
    count = 0
    for events in attempts:
        if any(row.get("event") == "progress" for row in events):
            count = 0
        elif not any(row.get("event") == "stopping" and row.get("class") in HARMLESS for row in events):
            count += 1
    return count


HARMLESS = (FailureClass.USER, FailureClass.PREEMPTION)


def pause_s(ends_in_a_row: int) -> float:
    """Seconds before the next start after so many ends in a row: 0.5, 1, 2 … 30."""
    return min(FIRST_PAUSE_S * 2 ** max(0, ends_in_a_row - 1), LONGEST_PAUSE_S)


def lead_s(step_s: float, save_s: float) -> float:
    """How long before the end the trainer is asked to stop: it ends its step and saves. Both are 95th percentiles, in seconds.

    The end is read on our own clock, so nothing is added for the minute by which Slurm's `--signal` may be early.
    """
    return step_s + 1.5 * save_s + MARGIN_S


def drain_time(start: float, end: float, step_s: float, save_s: float) -> float:
    """When to stop so that the state is saved before the scheduler ends the job; all in the same clock.

    Never in the first half of the job's time: a limit that is too short must not make it start and stop for ever.
    """
    return max(end - lead_s(step_s, save_s), start + (end - start) / 2)


def drain_grace_s(least: float, step_s: float, save_s: float) -> float:
    """How long a trainer that was asked to stop may take: a step and a save of its own kind, twice."""
    return max(least, 2 * (step_s + save_s))
