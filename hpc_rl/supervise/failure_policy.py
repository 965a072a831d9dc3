"""The failure policy: the consequences of an exit of a unit, the trainer or an attempt. Pure.

Four tables decide whether anything starts again, in this order:

1. A role fails: POLICIES maps the class of the failure to an action. The role restarts in place, the job
   gets other nodes, or the attempt ends. The functions below find the class and count the retries.
2. The attempt is asked to stop: STOPS maps each cause to a reason and a class.
3. The supervisor has exited, or the job stops without it: the tables in job_policy.py give the action of
   the job script.
4. The next start chooses its checkpoint, or refuses: the table in checkpoint/decide.py.

Slurm's FAILED and srun's exit code tell little, so the class of a failure comes from the exit record of the
process, then from the log lines of srun and the node, then from the exit code.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from hpc_rl.core.errors import ExitCode, FailureClass, StopCause
from hpc_rl.core.files import is_full, load_last_lines
from hpc_rl.core.records import Event, EventKind, ExitRecord
from hpc_rl.core.trial import Attempt
from hpc_rl.plan.schema import Unit

FINAL_CODES = (ExitCode.BAD_CONFIG, ExitCode.REFUSED, ExitCode.NOTHING_TO_RESUME)  # the same on every start
KILLED = 128 + signal.SIGKILL
RESTARTING_MODES = ("auto", "fault")
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
HEALTHY_LIFE_S = 60.0  # an incarnation that lived this long is not part of a crash loop
MAX_EXITS_IN_A_ROW = 5
# The cause may be temporary (a full disk, a drained node), and the other servers keep working.
GIVE_UP_PAUSE_S = 600.0
# Attempts in a row without a new checkpoint: another start would not help.
MAX_FRUITLESS_ATTEMPTS = 10
LOG_LINES = 12  # of each log, searched for the launcher's reason
MAX_QUOTE = 200  # characters of a log line in a reason


# --- the tables --------------------------------------------------------------------------------------------


class FailurePolicy(NamedTuple):
    """Consequences of a failure of one class."""

    # restart the role in place; restart the job, on other nodes; wait for the user
    action: Literal["restart", "requeue", "end"]
    uses_retry: bool  # counts against `recover.retries`; a new generation resets the count
    advice: str  # for the user, after the attempt has ended because of it
    max_restarts: int | None = None  # without a new generation, if `recover.retries` allows more
    exclude_nodes: bool = False  # the nodes of the failure are avoided for a while
    # before each restart in place; None: grows with the number of failures
    pause_s: float | None = None


NOT_RETRIED = "not retried: it would fail the same way."
RESUME = "then run the command that `hpc-rl status` shows under 'next'"
POLICIES: dict[FailureClass, FailurePolicy] = {
    FailureClass.USER: FailurePolicy(
        "end",
        True,
        f"{NOT_RETRIED} Fix the reward, the workflow or the configuration, {RESUME}",
    ),
    FailureClass.DATA: FailurePolicy(
        "end",
        True,
        f"{NOT_RETRIED} Check the data, the workflow and the reward, {RESUME}",
    ),
    FailureClass.OUT_OF_MEMORY: FailurePolicy(
        "restart",
        True,
        f"give it more memory, or make its batches smaller (max_tokens_per_mb), {RESUME}",
        max_restarts=1,
    ),
    FailureClass.NODE: FailurePolicy(
        "requeue", True, f"ask the administrators about the nodes, {RESUME}", exclude_nodes=True
    ),
    FailureClass.INFRASTRUCTURE: FailurePolicy("restart", True, f"look for the cause in the logs, {RESUME}"),
    FailureClass.DISK_FULL: FailurePolicy(
        "restart", False, f"free space on the trial's file system, {RESUME}", pause_s=20.0
    ),
    FailureClass.PREEMPTION: FailurePolicy("requeue", False, "nothing: the scheduler starts it again"),
    FailureClass.WALL_TIME: FailurePolicy("requeue", False, "nothing: it continues where it stopped"),
    FailureClass.UNKNOWN: FailurePolicy("restart", True, f"look for the cause in the logs, {RESUME}"),
}


# recorded reason, and class
STOPS: dict[StopCause, tuple[str, FailureClass]] = {
    StopCause.PREEMPTION: (
        "SIGTERM from the scheduler: a cancel, a preemption or the time limit",
        FailureClass.PREEMPTION,
    ),
    StopCause.USER_SIGNAL: ("SIGUSR1: asked to save and stop", FailureClass.USER),
    StopCause.INTERRUPTED: ("SIGINT: interrupted by the user", FailureClass.USER),
    StopCause.TIME_LIMIT: ("the job's time is nearly over", FailureClass.WALL_TIME),
    StopCause.CANCELLED: ("cancelled by the user", FailureClass.USER),
    StopCause.SCRIPT_KILLED: ("the job script that started the supervisor was killed", FailureClass.USER),
    StopCause.NOT_NEEDED: ("the trial does not need these servers any more", FailureClass.USER),
}


# --- exits of units --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitExit:
    code: int  # 128 + signal of a death by signal
    reason: str
    failure: FailureClass = FailureClass.UNKNOWN
    nodes: tuple[str, ...] = ()  # nodes to blame
    final: bool = False  # by its own report, another start would fail the same way
    out_of_contact: bool = False  # those nodes have no other known problem

    @property
    def by_signal(self) -> bool:
        return self.code > 128

    @property
    def is_failure(self) -> bool:
        """Whether it counts against the retry budget, if its class does."""
        return self.code not in (ExitCode.DONE, ExitCode.STOPPED)

    @property
    def policy(self) -> FailurePolicy:
        return POLICIES[self.failure]


def classify_exit(
    attempt: Attempt, unit: Unit, incarnation: int, launcher_code: int, launcher_log: Path | None = None
) -> UnitExit:
    """Return the exit of an incarnation, from its exit records, its launcher's code and its logs.

    `launcher_log`: log of the launcher, if it has a separate one.
    """
    process = (unit.role, unit.index, incarnation)
    ranks = range(unit.num_tasks)
    records = [ExitRecord.read(attempt.exit_record(*process, rank)) for rank in ranks]
    found = combine_ranks(records, launcher_code)
    logs = [attempt.log(*process, rank) for rank in (None, *ranks)]  # the launcher's own comes first
    if launcher_log is not None:
        logs.insert(0, launcher_log)
    if not any(records) and not found.by_signal:
        quotes = (lines[0].strip()[:MAX_QUOTE] for log in logs if (lines := load_last_lines(log, 1)))
        quote = next(filter(None, quotes), "")
        found = replace(found, reason=f"{found.reason}; its log ends: {quote}") if quote else found
    if all(records):
        return classify(found, [], [])
    every_line = [line for log in logs for line in load_last_lines(log, LOG_LINES)]
    return classify(found, load_last_lines(logs[0], LOG_LINES), every_line)


def start_failure(error: OSError) -> UnitExit:
    """Return the exit of an incarnation that could not be started."""
    is_missing = isinstance(error, FileNotFoundError | PermissionError)
    failure = FailureClass.DISK_FULL if is_full(error) else FailureClass.UNKNOWN
    code = ExitCode.BAD_CONFIG if is_missing else ExitCode.FAILED
    return UnitExit(code, f"can't be started: {error}", failure)


def make_unplaced_exit(role: str, reason: str, is_first_start: bool) -> UnitExit:
    """Return the exit of a unit whose step the scheduler can't place on the nodes of its job.

    A first start exceeds the job's resources; later, Slurm may hold back resources of a lost node's steps.
    A server is tried again: the trial works without it.
    """
    if not is_first_start:
        failure = FailureClass.NODE
    else:
        failure = FailureClass.UNKNOWN if role == "server" else FailureClass.USER
    return UnitExit(KILLED, reason, failure)


def combine_ranks(records: Sequence[ExitRecord | None], launcher_code: int) -> UnitExit:
    """Return the exit of a unit from the records of its ranks (None: no record) and its launcher's code.

    Final codes come first, 78 before the others, then any failure recorded by a rank, then rank 0, which
    commits: peers killed after it (143) tell nothing. Without a record the launcher's code counts.
    """
    exits = [
        None if record is None else _classify_recorded(rank, record) for rank, record in enumerate(records)
    ]
    known = [one for one in exits if one is not None]
    for code in FINAL_CODES:
        for one in known:
            if one.code == code:
                return one
    for one in known:
        if one.is_failure and not one.by_signal:
            return _classify_silent_ranks(one, [rank for rank, other in enumerate(exits) if other is None])
    if exits and exits[0] is not None:
        return exits[0]
    return known[0] if known and known[0].by_signal else _classify_unrecorded(launcher_code, len(records))


def _classify_silent_ranks(found: UnitExit, silent: list[int]) -> UnitExit:
    # A killed rank leaves no record, and its peers report a lost connection: name the killed rank first.
    if not silent:
        return found
    ranks = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
    reason = f"{ranks} exited without a record (killed?); first error of a peer: {found.reason}"
    return UnitExit(found.code, reason, final=found.final)


def _classify_recorded(rank: int, record: ExitRecord) -> UnitExit:
    reason = f"rank {rank}: {record.reason}" if rank and record.reason else record.reason
    return UnitExit(record.code, reason, record.failure, tuple(record.nodes or ()), record.final)


def _classify_unrecorded(launcher_code: int, num_ranks: int) -> UnitExit:
    code = 128 - launcher_code if launcher_code < 0 else launcher_code
    if code > 128:
        names = {number.value: number.name for number in signal.Signals}
        return UnitExit(code, f"killed by {names.get(code - 128, f'signal {code - 128}')}")
    if code == ExitCode.CANNOT_WRITE:
        return UnitExit(code, "could not write (disk full or over quota?), not even its exit record")
    if code == 0 and num_ranks:
        return UnitExit(ExitCode.FAILED, "exited without leaving an exit record")
    return UnitExit(code, f"exited with code {code} before it could leave an exit record")


# Messages of srun, slurmstepd, the kernel and PyTorch about exhausted memory or a dead node.
_MEMORY = re.compile(
    r"exceeded (?:job |step )?memory limit|memory limit at some point"
    r"|oom[-_ ]?kill|out[ -]of[ -]memory|OutOfMemory",
    re.IGNORECASE,
)
_NODE = re.compile(
    r"(?:srun|slurmstepd|slurmd)[^:]*: .*?(?:"
    r"node failure on (?P<list>[\w.\[\],-]+)|CANCELLED AT \S+ DUE TO NODE FAILURE"
    r"|launch (?:for|of) .* failed on node (?P<launch>[\w.-]+)|node configuration is not available"
    r"|\bnodes? .*?\b(?:down|not responding)\b)",
    re.IGNORECASE,
)


def classify(found: UnitExit, launcher_lines: Sequence[str], all_lines: Sequence[str]) -> UnitExit:
    """Return the exit with its class, from its code and the last lines of the launcher's and of all logs.

    The reason quotes the deciding line. Only the launcher reports failed nodes.
    """
    if not found.is_failure or found.final or found.failure is not FailureClass.UNKNOWN:
        return found
    if found.code in FINAL_CODES:
        return UnitExit(found.code, found.reason, FailureClass.USER)
    for line in all_lines:
        if _MEMORY.search(line):
            reason = f"killed for using too much memory ({line.strip()})"
            return UnitExit(found.code, reason, FailureClass.OUT_OF_MEMORY)
    for line in launcher_lines:
        if match := _NODE.match(line):
            nodes = tuple(name for name in match.groups() if name)
            reason = f"lost its node ({line.strip()})"
            is_lost = match["launch"] is None
            return UnitExit(found.code, reason, FailureClass.NODE, nodes, out_of_contact=is_lost)
    if found.code == ExitCode.CANNOT_WRITE:
        return UnitExit(found.code, found.reason, FailureClass.DISK_FULL)
    return found


# --- consequences ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Consequence:
    """Consequence of a unit's exit: start it again, or end the attempt with this code."""

    restart: bool
    exit_code: int
    reason: str


def decide_after_leader(role: str, found: UnitExit, mode: str, failures: int, retries: int) -> Consequence:
    """Return the consequence of the exit of the leading role if it was not asked to stop.

    `failures`: failures in a row without a new generation, including this one.
    """
    if found.code == ExitCode.DONE:
        done = "the trainer reached its last step" if role == "trainer" else "every prompt has its result"
        return Consequence(False, ExitCode.DONE, done)
    if found.code == ExitCode.STOPPED:
        return Consequence(False, ExitCode.STOPPED, found.reason or f"the {role} stopped")
    return decide_after_failure(role, found, mode, failures, retries)


def decide_after_failure(unit: str, found: UnitExit, mode: str, failures: int, retries: int) -> Consequence:
    """Return the consequence of a failure by its policy, within the retry budget."""
    text = f"{unit}: {found.reason or f'code {found.code}'}"
    if found.code in FINAL_CODES or found.final:
        return Consequence(False, found.code, text)
    policy = found.policy
    if policy.action == "end":
        return Consequence(False, ExitCode.FAILED, f"{text} ({found.failure}: {policy.advice})")
    if mode not in RESTARTING_MODES:
        return Consequence(False, ExitCode.FAILED, f"{text}; recover.mode {mode} does not start it again")
    limit = retries if policy.max_restarts is None else min(retries, policy.max_restarts)
    if policy.uses_retry and failures > limit:
        spent = f"{failures} failures in a row without a new checkpoint; "
        if limit < retries:
            spent += f"{found.failure} is tried again {limit} times"
        else:
            spent += f"recover.retries allows {retries}"
        return Consequence(False, ExitCode.FAILED, f"{text} ({spent}; {policy.advice})")
    if policy.action == "requeue":
        return Consequence(False, ExitCode.STOPPED, f"{text}; other nodes are needed")
    return Consequence(True, ExitCode.FAILED, text)


def decide_after_drain(
    role: str, found: UnitExit | None, mode: str, failures: int, retries: int, asked: str
) -> Consequence:
    """Return the consequence of the leading role's exit after a request to stop, for the reason `asked`.

    `found` is None if it did not run. A trainer killed before it could save continues from its newest
    generation, and a rollout role from its ledger.
    """
    if found is None:
        return Consequence(False, ExitCode.STOPPED, f"{asked}; no {role} was running")
    follows = decide_after_leader(role, found, mode, failures, retries)
    if follows.exit_code in (ExitCode.DONE, *FINAL_CODES):
        return follows
    if found.code == ExitCode.STOPPED:
        return Consequence(False, ExitCode.STOPPED, asked)
    if found.by_signal or follows.restart or follows.exit_code == ExitCode.STOPPED:
        why = found.reason or found.code
        kept = "continues from the newest checkpoint" if role == "trainer" else "keeps the finished prompts"
        reason = f"{asked}; the {role} exited before it could save ({why}); a later start {kept}"
        return Consequence(False, ExitCode.STOPPED, reason)
    return follows


def count_fruitless_attempts(attempts: Sequence[Sequence[Event]]) -> int:
    """Count the last attempts in a row without a new generation; each is its events, the newest last.

    Attempts ended by the user, or by a preemption that the supervisor knew of, don't count.
    """
    count = 0
    for events in attempts:
        if any(event.kind is EventKind.PROGRESS for event in events):
            count = 0
        elif not any(event.kind is EventKind.STOPPING and event.failure in HARMLESS for event in events):
            count += 1
    return count


HARMLESS = (FailureClass.USER, FailureClass.PREEMPTION)


def compute_pause_s(exits_in_a_row: int) -> float:
    """Return the pause before the next start: 0.5, 1, 2 … 30 s."""
    return min(FIRST_PAUSE_S * 2 ** max(0, exits_in_a_row - 1), MAX_PAUSE_S)
