"""A live view of a trial until it is over: what happens as lines, how far it is as a progress bar (on a terminal) or more lines.

Reads files; asks the scheduler rarely, and only to learn of a death that left no word. Interrupting it leaves the trial alone.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpc_rl.errors import ExitCode
from hpc_rl.files import last_lines
from hpc_rl.status.attempts import RoleStatus
from hpc_rl.status.formatting import exit_text, format_duration, format_number, format_rate
from hpc_rl.status.rollout_report import problems
from hpc_rl.status.scheduler_view import TrialWatch
from hpc_rl.status.trial_status import AttemptStatus, TrialStatus
from hpc_rl.trial import Trial

TICK_S = 0.5
PLAIN_EVERY_S = 5.0  # between progress lines where there is no terminal
LOG_LINES = 20
ORDERLY = {
    0,
    ExitCode.STOPPED,
    ExitCode.KILLED_BY_SYSTEM,
    -15,
    None,
}  # ends that follow from another one, or from a wish


def follow(trial: Trial, tick_s: float = TICK_S) -> int:
    """Show the trial until it is over; returns its exit code."""
    console = Console(highlight=False, soft_wrap=True)
    view = _Terminal(console) if console.is_terminal else _Plain(print)
    watch, narrator = TrialWatch(trial), ChangeReporter()
    with view:
        while True:
            story = watch.look()
            for line in narrator.news(story):
                view.say(line)
            view.show(story)
            if story.over:
                break
            time.sleep(tick_s)
    for line in final_lines(story):
        print(line)
    sys.stdout.flush()
    return exit_code(story)


class ChangeReporter:
    """Turns successive stories into lines, each fact once."""

    def __init__(self) -> None:
        self._told: set[tuple[object, ...]] = set()
        self._state = ""

    def news(self, story: TrialStatus) -> list[str]:
        lines = []
        if story.state != self._state and not story.over:
            lines.append(f"{story.trial}: {story.state}" + (f" ({story.reason})" if story.reason else ""))
            self._state = story.state
        for attempt in story.attempts:
            lines += self._attempt(attempt)
        for trouble in problems(story.rollout, story.live is not None) if story.rollout else []:
            if self._first("trouble", re.sub(r"\d+", "", trouble)):  # once, not at every count
                lines.append(f"rollout: {trouble}")
        name, values = story.history.held_out
        for step, value in values:
            if self._first("held-out", step, value):
                lines.append(f"step {step}: held-out {name} {format_number(value)}")
        return lines

    def _attempt(self, attempt: AttemptStatus) -> list[str]:
        lines = []
        if self._first("attempt", attempt.id):
            lines.append(f"attempt {attempt.id} started")
        for role in attempt.roles:
            if role.gave_up and self._first("gave up", attempt.id, role.name):
                lines.append(f"{role.name} is given up: {role.gave_up}")
            for end in role.ends:
                if end.incarnation < role.incarnation and self._first(
                    "end", attempt.id, role.name, end.incarnation
                ):
                    why = exit_text(end.code, end.reason)
                    lines.append(f"{role.name}: {why}; started again (incarnation {end.incarnation + 1})")
        for line in attempt.lineages:
            if line.lineage and self._first("lineage", line.lineage):
                origin = f"generation {line.from_step}" if line.from_step else "the start"
                why = f": {line.reason}" if line.reason else ""
                lines.append(f"training goes on from {origin} as lineage {line.lineage}{why}")
        if attempt.state != "running" and self._first("over", attempt.id):
            lines.append(f"attempt {attempt.id}: {attempt.cause or attempt.state}")
        return lines

    def _first(self, *fact: object) -> bool:
        seen = fact in self._told
        self._told.add(fact)
        return not seen


def progress_text(story: TrialStatus) -> str:
    """One line on how far training is."""
    total = f"/{story.total_steps}" if story.total_steps else ""
    parts = [f"step {story.step}{total}"]
    last = story.history.steps[-1] if story.history.steps else {}
    for key, words in (("reward", "reward"), ("loss", "loss"), ("staleness_mean", "staleness")):
        if isinstance(last.get(key), (int, float)):
            parts.append(f"{words} {format_number(last[key])}")
    name, values = story.history.held_out
    if values:
        parts.append(f"held-out {name} {format_number(values[-1][1])}")
    if story.rate:
        parts.append(format_rate(story.rate))
        if story.eta_s is not None and not story.over:
            parts.append(f"{format_duration(story.eta_s)} left")
    return "  ".join(parts)


class _Plain:
    """Lines only: the news, and a progress line every few seconds while steps are made."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._shown: tuple[int, float] = (-1, float("-inf"))

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, line: str) -> None:
        self._write(line)
        sys.stdout.flush()

    def show(self, story: TrialStatus) -> None:
        step, when = self._shown
        if (
            story.history.steps
            and story.step != step
            and (story.over or time.monotonic() - when >= PLAIN_EVERY_S)
        ):
            self._shown = (story.step, time.monotonic())
            self.say(progress_text(story))


class _Terminal:
    """The news above a progress bar, the newest numbers and the roles."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> _Terminal:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(*error)  # type: ignore[arg-type]

    def say(self, line: str) -> None:
        self._live.console.print(Text(line))

    def show(self, story: TrialStatus) -> None:
        self._live.update(panel(story), refresh=True)


def panel(story: TrialStatus) -> Group:
    """What stands at the foot of a terminal."""
    grid = Table.grid(padding=(0, 2))
    total = story.total_steps
    busy = total is None or (story.step == 0 and not story.over)
    bar = ProgressBar(total=total or 1, completed=story.step, width=30, pulse=busy and not story.over)
    grid.add_row(
        Text(story.state, style=STYLES.get(story.state, "")),
        bar,
        Text(progress_text(story), no_wrap=True, overflow="ellipsis"),
    )
    roles = story.attempts[-1].roles if story.attempts else []
    return Group(grid, Text("  ".join(map(role_text, roles)), style="dim", no_wrap=True, overflow="ellipsis"))


STYLES = {
    "running": "green",
    "done": "bold green",
    "failed": "bold red",
    "killed": "bold red",
    "pending": "yellow",
    "stopping": "yellow",
}


def role_text(role: RoleStatus) -> str:
    restarts = f" (started again {role.num_restarts}x)" if role.num_restarts else ""
    return f"{role.name} {'up' if role.running else 'ended'}{restarts}"


def final_lines(story: TrialStatus) -> list[str]:
    """How it ended; where it failed, the last lines of the log of the role that failed first."""
    lines = [f"{story.trial}: {story.state}" + (f" ({story.reason})" if story.reason else "")]
    path = _telling_log(story) if story.state in ("failed", "killed") else None
    if path is not None and (last := last_lines(path, LOG_LINES)):
        lines += [f"the last lines of {path}:", *(f"  {line}" for line in last)]
    return lines


def _telling_log(story: TrialStatus) -> Path | None:
    """The log of the role that failed first, else the batch script's own output."""
    attempt = story.attempts[-1] if story.attempts else None
    failed = failing_role(attempt) if attempt is not None else None
    if attempt is not None and failed is not None:
        return story.trial.attempt(attempt.id).log(failed.role, failed.index, failed.incarnation)
    return story.trial.jobs / f"{story.jobs[-1].job_id}.out" if story.jobs else None


def failing_role(attempt: AttemptStatus) -> RoleStatus | None:
    """The role whose newest incarnation was the first to end badly."""
    bad = [
        (end.time or 0.0, role)
        for role in attempt.roles
        for end in role.ends
        if end.incarnation == role.incarnation and end.code not in ORDERLY
    ]
    return min(bad, key=lambda pair: pair[0])[1] if bad else None


def exit_code(story: TrialStatus) -> int:
    """The trial's exit code as that of the command line."""
    if story.state == "done":
        return ExitCode.DONE
    code = story.attempts[-1].exit_code if story.attempts else None
    if code:
        return code
    return ExitCode.STOPPED if story.state in ("cancelled", "stopped") else ExitCode.FAILED
