"""A live view of a trial until it is over: events as lines, and below them the view of `top`, on a terminal.

Reads files, and queries the scheduler rarely. Interrupting the view leaves the trial alone.
"""

import contextlib
import re
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hpc_rl.core.errors import ExitCode
from hpc_rl.core.files import load_last_lines
from hpc_rl.core.log import escape_controls
from hpc_rl.core.records import TrialState
from hpc_rl.core.trial import Trial
from hpc_rl.status.attempts import AttemptStatus, RoleStatus
from hpc_rl.status.formatting import format_exit, format_number
from hpc_rl.status.rollout_report import list_problems
from hpc_rl.status.state_reason import describe_state
from hpc_rl.status.status_text import describe_scores
from hpc_rl.status.top_view import TrialEye, describe_frame
from hpc_rl.status.trial_status import TrialStatus

TICK_S = 0.5
PLAIN_EVERY_S = 5.0  # between progress lines if there is no terminal
LOG_LINES = 20
EXPECTED_CODES = {0, ExitCode.STOPPED, ExitCode.KILLED_BY_SYSTEM, -15, None}  # of a role that was stopped


def follow(trial: Trial, tick_s: float = TICK_S) -> int:
    """Show the trial until it is over; return its exit code."""
    # its input is printable; it moves the cursor by control characters
    console = Console(file=getattr(sys.stdout, "stream", None), highlight=False, soft_wrap=True)
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    eye, reporter = TrialEye(trial), ChangeReporter()
    shown_step, shown_at = -1, float("-inf")  # the last progress line
    with live or contextlib.nullcontext():
        while True:
            view = eye.look()
            status = view.status
            for line in reporter.news(status):
                console.print(Text(escape_controls(line)))
            due = status.over or time.monotonic() - shown_at >= PLAIN_EVERY_S
            if live is not None:
                live.update(Text(describe_frame([view])), refresh=True)
            elif status.history.steps and status.step != shown_step and due:
                shown_step, shown_at = status.step, time.monotonic()
                console.print(Text(describe_progress(status)))
            if status.over:
                break
            time.sleep(tick_s)
    for line in describe_final_state(status):
        print(line)
    sys.stdout.flush()
    return find_exit_code(status)


class ChangeReporter:
    """Turns successive statuses into lines, each fact once."""

    def __init__(self) -> None:
        self._reported: set[tuple[object, ...]] = set()
        self._state: TrialState | None = None

    def news(self, status: TrialStatus) -> list[str]:
        """Return the lines about changes since the last call."""
        lines = []
        if status.state is not self._state and not status.over:
            lines.append(describe_trial_state(status))
            self._state = status.state
        for fact, line in _list_facts(status):
            if fact not in self._reported:
                self._reported.add(fact)
                lines.append(line)
        return lines


def _list_facts(status: TrialStatus) -> Iterator[tuple[tuple[object, ...], str]]:
    """Yield all events, oldest attempt first: a unique key and a line."""
    for attempt in status.attempts:
        yield ("attempt", attempt.id), f"attempt {attempt.id} started"
        for role in attempt.roles:
            if role.gave_up:
                yield ("gave up", attempt.id, role.name), f"{role.name} is not started again: {role.gave_up}"
            for exited in role.ends:
                if exited.incarnation < role.incarnation:
                    why = format_exit(exited.code, exited.reason)
                    again = f"started again (incarnation {exited.incarnation + 1})"
                    yield ("end", attempt.id, role.name, exited.incarnation), f"{role.name}: {why}; {again}"
        for one in attempt.lineages:
            if one.lineage:
                origin = f"checkpoint {one.from_step}" if one.from_step else "the start"
                later = f"in a later start of the trainer (lineage {one.lineage})"
                line = f"training continues from {origin} {later}"
                yield ("lineage", one.lineage), line + (f": {one.reason}" if one.reason else "")
        for silence in attempt.silences:
            yield ("silent", attempt.id, silence.node, silence.since, silence.until), silence.text(False)
        if attempt.state is not TrialState.RUNNING:
            yield (
                ("over", attempt.id),
                f"attempt {attempt.id}: {describe_state(attempt.state, attempt.cause)}",
            )
    if status.supervisor_silence is not None:
        line = f"the supervisor on {status.supervisor_silence.node} sends no heartbeat"
        yield ("silent", status.attempts[-1].id, line), line
    for problem in list_problems(status.rollout, status.live is not None) if status.rollout else []:
        yield ("problem", re.sub(r"\d+", "", problem)), f"rollout: {problem}"  # once, not at every count
    name, values = status.history.held_out
    for step, value in values:
        yield ("held-out", step, value), f"step {step}: held-out {name} {format_number(value)}"


def describe_trial_state(status: TrialStatus) -> str:
    return f"{status.trial}: {describe_state(status.state, status.reason)}"


def describe_progress(status: TrialStatus) -> str:
    total = f"/{status.total_steps}" if status.total_steps else ""
    parts = [f"step {status.step}{total}"]
    last = status.history.steps[-1] if status.history.steps else {}
    for key, label in (("reward", "reward"), ("loss", "loss"), ("staleness_mean", "staleness")):
        if isinstance(last.get(key), (int, float)):
            parts.append(f"{label} {format_number(last[key])}")
    name, values = status.history.held_out
    if values:
        parts.append(f"held-out {name} {format_number(values[-1][1])}")
    if status.pace and not status.over:
        parts.append(status.pace)
    return "  ".join(parts)


def describe_final_state(status: TrialStatus) -> list[str]:
    """Return how the trial ended; of a failure also the end of a log.

    That is the log of the role that failed first, else the output of the job script.
    """
    lines = [describe_trial_state(status)]
    if scores := describe_scores(status.trial):
        lines.append(f"scores: {scores}; in {status.trial.results}")
    if status.state not in (TrialState.FAILED, TrialState.KILLED):
        return lines
    path = status.trial.job_output(status.jobs[-1].job_id) if status.jobs else None
    if status.attempts and (role := find_failing_role(status.attempts[-1])):
        path = status.trial.attempt(status.attempts[-1].id).log(role.role, role.index, role.incarnation)
    if path is not None and (last := load_last_lines(path, LOG_LINES)):
        lines += [f"the last lines of {path}:", *(f"  {line}" for line in last)]
    return lines


def find_failing_role(attempt: AttemptStatus) -> RoleStatus | None:
    """Return the role whose newest incarnation was the first to fail."""
    failed = [
        (end.time or 0.0, role)
        for role in attempt.roles
        for end in role.ends
        if end.incarnation == role.incarnation and end.code not in EXPECTED_CODES
    ]
    return min(failed, key=lambda pair: pair[0])[1] if failed else None


def find_exit_code(status: TrialStatus) -> int:
    """Return the trial's exit code for the command line."""
    if status.state is TrialState.DONE:
        return ExitCode.DONE
    code = status.attempts[-1].exit_code if status.attempts else None
    if code:
        return code
    stopped = status.state in (TrialState.CANCELLED, TrialState.STOPPED)
    return ExitCode.STOPPED if stopped else ExitCode.FAILED
