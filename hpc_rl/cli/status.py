"""`hpc-rl status <trial>`: the story of a trial, from its files and at most one question to the scheduler."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Any

from hpc_rl.checkpoint.decide import PastStart
from hpc_rl.checkpoint.start_facts import fruitless_starts
from hpc_rl.cli.options import ArgumentParser, Namespace, add_json, add_trial, new_parser, print_json
from hpc_rl.errors import ConfigError, ExitCode, TrialStateError
from hpc_rl.records import LineageRecord
from hpc_rl.status.attempts import RoleStatus
from hpc_rl.status.formatting import (
    exit_text,
    format_duration,
    format_number,
    format_rate,
    format_time,
    program_name,
)
from hpc_rl.status.rollout_report import problems, summary
from hpc_rl.status.scheduler_view import SchedulerAnswer, query
from hpc_rl.status.trial_status import AttemptStatus, TrialStatus, read_status
from hpc_rl.submit import trial_index
from hpc_rl.supervise.server_array import array_line
from hpc_rl.trial import Trial

WIDTH = 12  # of the first column
FRESH = "the start"
SHOWN_ATTEMPTS = 5  # without --all
OLD_S = 60.0  # an answer of the scheduler that is older is called so


def parser() -> ArgumentParser:
    made = new_parser(DESCRIPTION)
    add_trial(made)
    made.add_argument("--offline", action="store_true", help="do not ask the scheduler")
    made.add_argument(
        "--all", action="store_true", help=f"every attempt, not only the newest {SHOWN_ATTEMPTS}"
    )
    made.add_argument(
        "-f", "--follow", action="store_true", help="a live view until the trial is over; exits with its code"
    )
    add_json(made, "everything")
    return made


def run(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    if args.follow:
        return _follow(trial, args.json)
    answer = SchedulerAnswer() if args.offline else query(trial)
    story = read_status(trial, answer.newest, answer.asked_at or None)
    past = fruitless(story)
    if args.json:
        asked = {"scheduler_error": answer.complaint, "scheduler_asked_at": answer.asked_at or None}
        print_json(story.to_json() | asked | {"fruitless_starts": [asdict(one) for one in past]})
        return 0
    print("\n".join(text(story, SHOWN_ATTEMPTS if not args.all else None, past)))
    if answer.complaint:
        known = f"what it said {format_duration(answer.age_s)} ago" if answer.asked_at else "files alone"
        print(
            f"hpc-rl: the scheduler did not answer, so this is from {known}: {answer.complaint}",
            file=sys.stderr,
        )
    elif answer.asked_at and answer.age_s > OLD_S:
        print(
            f"hpc-rl: the scheduler was asked {format_duration(answer.age_s)} ago; it is asked rarely",
            file=sys.stderr,
        )
    return 0


DESCRIPTION = """What a trial does, and what happened to it. Reads files, and asks the scheduler rarely:
all commands of an account share one query for all of its jobs, at most 4 a minute."""


def _follow(trial: Trial, as_json: bool) -> int:
    if as_json:
        raise ConfigError("--json is for one look; --follow is a live view. Give one of them.")
    from hpc_rl.status.follow import follow  # rich takes its time to import

    try:
        return follow(trial)
    except KeyboardInterrupt:
        print("\nhpc-rl: interrupted; the trial goes on", file=sys.stderr)
        return ExitCode.KILLED_BY_PERSON


def fruitless(story: TrialStatus) -> tuple[PastStart, ...]:
    """What the loop guard counts: starts of the newest job since the newest generation; none once the trial is done."""
    if story.state in ("done", "rendered") or not story.attempts:
        return ()
    newest = story.attempts[-1]
    try:
        return fruitless_starts(story.trial, newest.job_id, newest.id if story.live else "")
    except TrialStateError as error:  # recover/ or lineages/ is no folder: the rest can be told all the same
        print(f"hpc-rl: {error}", file=sys.stderr)
        return ()


def text(story: TrialStatus, max_attempts: int | None = None, past: tuple[PastStart, ...] = ()) -> list[str]:
    """The lines of `hpc-rl status`."""
    lines = [headline(story), *time_lines(story), row("directory", str(story.trial.dir))]
    if story.plan:
        lines.append(row("plan", plan_line(story.plan)))
    if story.jobs:
        lines.append(row("job", job_line(story)))
    lines += [row("servers", array_line(array)) for array in story.servers[-1:]]
    if story.attempts:
        shown = story.attempts[-max_attempts:] if max_attempts else story.attempts
        earlier = len(story.attempts) - len(shown)
        more = [f"  and {earlier} earlier: --all shows them"] if earlier else []
        lines += [
            "",
            "attempts",
            *more,
            *(one_line(line) for attempt in shown for line in attempt_lines(attempt, story)),
        ]
    if past:
        lines += ["", *guard_lines(story, past)]
    if story.live is not None:
        lines += ["", "roles", *(f"  {role_line(role)}" for role in story.live.roles)]
    if story.rollout is not None and story.state != "done":
        lines += [
            "",
            row("rollout", summary(story.rollout, story.live is not None)),
            *(row("", line) for line in problems(story.rollout, story.live is not None)),
        ]
    if story.history.steps or story.history.evaluations:
        lines += ["", *metric_lines(story)]
    return [*lines, "", *next_lines(story)]


def one_line(words: str) -> str:
    """An exception may have several lines; each entry here has one."""
    return " ".join(words.split("\n"))


def row(name: str, words: str) -> str:
    return f"{name:<{WIDTH}}{words}"


def headline(story: TrialStatus) -> str:
    parts = [str(story.trial), story.state]
    if story.step or story.total_steps:
        parts.append(progress(story))
    if story.state == "running" and story.rate:
        parts.append(
            format_rate(story.rate)
            + (f", done in about {format_duration(story.eta_s)}" if story.eta_s is not None else "")
        )
    lines = "   ".join(parts)
    return f"{lines}\n{row('', one_line(story.reason))}" if story.reason else lines


def time_lines(story: TrialStatus) -> list[str]:
    """Since when, until when, and when the last sign of life was."""
    parts = (
        [f"since {format_time(story.since)}"]
        if story.since and story.state in ("running", "stopping")
        else []
    )
    if story.ends_at:
        left_s = story.ends_at - time.time()
        parts.append(
            f"the scheduler ends the job {format_time(story.ends_at)}"
            + (f", in {format_duration(left_s)}" if left_s > 0 else "")
        )
        if story.eta_s is not None and story.eta_s > left_s > 0:
            parts.append("training goes on in a later attempt")
    if story.state == "unknown" and story.last_sign:
        parts.append(f"last sign of life {format_time(story.last_sign)}")
    return [row("time", "; ".join(parts))] if parts else []


def progress(story: TrialStatus) -> str:
    total = story.total_steps
    return f"step {story.step}" + (f" of {total} ({100 * story.step // total} %)" if total else "")


def plan_line(plan: dict[str, Any]) -> str:
    nodes = plan.get("n_nodes")
    where = f"{nodes} node{'' if nodes == 1 else 's'}" if nodes else ""
    parts = (plan.get("trainer"), plan.get("allocation"), where, f"recover.mode {plan.get('recover_mode')}")
    return ", ".join(str(part) for part in parts if part)


def job_line(story: TrialStatus) -> str:
    job = story.jobs[-1]
    words = f"{job.job_id}" + (f" ({job.scheduler})" if job.scheduler else "")
    words += f", goes on as job {job.native_id}" if job.native_id not in ("", job.job_id) else ""
    return words + (f", submitted {format_time(job.time)}" if job.time else "")


def attempt_lines(attempt: AttemptStatus, story: TrialStatus) -> list[str]:
    start = f"started {format_time(attempt.started)}" if attempt.started else "started"
    took = (
        f" after {format_duration(attempt.ended - attempt.started)}"
        if attempt.ended and attempt.started
        else ""
    )
    lines = [f"  {attempt.id:<{WIDTH}}  {attempt.state}{took}   {start}, {span_of_steps(attempt)}"]
    if (
        attempt.cause
        and attempt.cause != attempt.state
        and not (attempt is story.attempts[-1] and story.reason == attempt.cause)
    ):
        lines.append(f"  {'':<{WIDTH}}  {attempt.cause}")
    for line in (
        attempt.lineages[1:]
        if attempt.lineages and origin(attempt.lineages[0]) == FRESH
        else attempt.lineages
    ):
        why = f": {line.reason}" if line.reason else ""
        lines.append(f"  {'':<{WIDTH}}  lineage {line.lineage} from {origin(line)}{why}")
    return lines + [f"  {'':<{WIDTH}}  {words}" for role in attempt.roles if (words := restarts(role))]


def restarts(role: RoleStatus) -> str:
    """Why a role was started again, the last time; empty where it was not."""
    before = [end for end in role.ends if end.incarnation < role.incarnation]
    if not before:
        return ""
    last = max(before, key=lambda end: end.incarnation)
    again = (
        f"after incarnation {last.incarnation}" if len(before) == 1 else f"{len(before)} times, the last time"
    )
    return f"{role.name} started again {again}: {exit_text(last.code, last.reason)}"


def guard_lines(story: TrialStatus, past: tuple[PastStart, ...]) -> list[str]:
    """How near the trial is to being given up, and what happened."""
    allowed = story.plan.get("recover_retries")
    limit = f" (recover.retries allows {allowed} at fault)" if isinstance(allowed, int) else ""
    since = "" if story.generation is None else f" since generation {story.generation}"
    words = (
        f"{len(past)} start{'' if len(past) == 1 else 's'} in a row without a new generation{since}{limit}"
    )
    return [row("no progress", words), *(one_line(f"  {one}") for one in past)]


def origin(line: LineageRecord) -> str:
    return f"generation {line.from_step}" if line.from_step or line.from_lineage is not None else FRESH


def span_of_steps(attempt: AttemptStatus) -> str:
    first = origin(attempt.lineages[0]) if attempt.lineages else None
    reached = "" if attempt.last_step is None else f", reached step {attempt.last_step}"
    if first is None:
        return f"training had not begun{reached}" if not reached else reached.removeprefix(", ")
    return ("fresh" if first == FRESH else f"from {first}") + reached


def role_line(role: RoleStatus) -> str:
    state = "running" if role.running else "ended"
    if role.gave_up:
        return f"{role.name:<{WIDTH}}given up: {role.gave_up}"
    if not role.running and role.restarting:
        return f"{role.name:<{WIDTH}}about to be started again: {role.restarting}"
    restarts = (
        f", started again {role.num_restarts} time{'s' if role.num_restarts != 1 else ''}"
        if role.num_restarts
        else ""
    )
    return f"{role.name:<{WIDTH}}{state}, incarnation {role.incarnation}{restarts}"


SHOWN = (  # what a person looks at first, in this order
    ("reward", "reward"),
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("entropy", "entropy"),
    ("staleness_mean", "staleness"),
    ("staleness_max", "largest staleness"),
    ("older_lineage", "trajectories of an earlier start"),
    ("lr", "learning rate"),
    ("step_s", "seconds per step"),
    ("wait_s", "of them waiting"),
)

ONLY_IF_ANY = ("older_lineage",)


def metric_lines(story: TrialStatus) -> list[str]:
    lines = []
    if story.history.steps:
        last = story.history.steps[-1]
        if (
            last.get("save_error") and story.state != "done"
        ):  # of the last save of all there is a word of its own
            failed = last.get("save_failed")
            lines.append(
                row(
                    "saving",
                    f"FAILED {'once' if failed == 1 else f'{failed} times in a row'}: {last['save_error']}",
                )
            )
        there = [(key, words) for key, words in SHOWN if isinstance(last.get(key), (int, float))]
        shown = [
            f"{words} {format_number(last[key])}"
            for key, words in there
            if key not in ONLY_IF_ANY or last[key]
        ]
        lines.append(row("metrics", f"step {last['step']}: " + ", ".join(shown)))
    name, values = story.history.held_out
    if values:
        ends = values[:1] if len(values) == 1 else [values[0], values[-1]]
        lines.append(
            row(
                "held-out",
                f"{name} " + " -> ".join(f"{format_number(value)} (step {step})" for step, value in ends),
            )
        )
    return lines


def next_lines(story: TrialStatus) -> list[str]:
    lines = []
    if story.attempts:
        lines.append(
            row("generation", "none yet" if story.generation is None else f"newest {story.generation}")
        )
    if story.exports:
        lines.append(row("exports", ", ".join(story.exports[-3:]) + f"  in {story.trial.exports}"))
    for number_, command in enumerate(suggestions(story)):
        lines.append(row("next" if number_ == 0 else "", command))
    return lines


def suggestions(story: TrialStatus) -> list[str]:
    """What to type next."""
    name, program = trial_index.cli_name(story.trial), program_name()
    if story.state in ("running", "pending", "stopping"):
        commands = [f"{program} logs {name} --follow"]
        return commands if story.state == "stopping" else [*commands, f"{program} cancel {name}"]
    if story.state == "done":
        return [f"{program} logs {name}"]
    if story.state == "rendered":
        return [f"ls {story.trial.scripts}"]
    commands = [f"{program} logs {name}"]
    return [*commands, f"{program} recover {name}"] if story.generation is not None else commands
