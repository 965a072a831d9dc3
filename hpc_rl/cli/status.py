"""`hpc-rl status <trial>`: the story of a trial, from its files and at most one question to the scheduler."""

from __future__ import annotations

import sys
from typing import Any

from hpc_rl.cli.options import add_json, add_trial, new_parser, print_json
from hpc_rl.launch import index
from hpc_rl.launch.ask import ask_newest
from hpc_rl.launch.incarnations import RoleStory
from hpc_rl.launch.server_array import array_line
from hpc_rl.launch.story import AttemptStory, Story, tell
from hpc_rl.launch.words import clock, end_words, number, rate, span, typed

WIDTH = 12  # of the first column


def run(argv: list[str]) -> int:
    parser = new_parser("status", "What a trial does, and what happened to it. Reads files; asks the scheduler once at most.")
    add_trial(parser)
    parser.add_argument("--offline", action="store_true", help="do not ask the scheduler")
    add_json(parser, "everything")
    args = parser.parse_args(argv)
    trial = index.resolve(args.trial)
    job_state, complaint = (None, "") if args.offline else ask_newest(trial)
    story = tell(trial, job_state)
    if args.json:
        print_json(story.to_json() | {"scheduler_error": complaint})
    else:
        print("\n".join(text(story)))
        if complaint:
            print(f"hpc-rl: the scheduler did not answer, so this is from files alone: {complaint}", file=sys.stderr)
    return 0


def text(story: Story) -> list[str]:
    """The lines of `hpc-rl status`."""
    lines = [headline(story), row("directory", str(story.trial.dir))]
    if story.plan:
        lines.append(row("plan", plan_line(story.plan)))
    if story.jobs:
        lines.append(row("job", job_line(story)))
    lines += [row("servers", array_line(array)) for array in story.servers[-1:]]
    if story.attempts:
        lines += ["", "attempts", *(line for attempt in story.attempts for line in attempt_lines(attempt, story))]
    if story.live is not None:
        lines += ["", "roles", *(f"  {role_line(role)}" for role in story.live.roles)]
    if story.history.steps or story.history.evaluations:
        lines += ["", *metric_lines(story)]
    return [*lines, "", *next_lines(story)]


def row(name: str, words: str) -> str:
    return f"{name:<{WIDTH}}{words}"


def headline(story: Story) -> str:
    parts = [str(story.trial), story.state]
    if story.step or story.total_steps:
        parts.append(progress(story))
    if story.state == "running" and story.rate:
        parts.append(rate(story.rate) + (f", done in about {span(story.eta_s)}" if story.eta_s is not None else ""))
    lines = "   ".join(parts)
    return f"{lines}\n{row('', story.reason)}" if story.reason else lines


def progress(story: Story) -> str:
    total = story.total_steps
    return f"step {story.step}" + (f" of {total} ({100 * story.step // total} %)" if total else "")


def plan_line(plan: dict[str, Any]) -> str:
    nodes = plan.get("n_nodes")
    where = f"{nodes} node{'' if nodes == 1 else 's'}" if nodes else ""
    parts = (plan.get("trainer"), plan.get("allocation"), where, f"recover.mode {plan.get('recover_mode')}")
    return ", ".join(str(part) for part in parts if part)


def job_line(story: Story) -> str:
    job = story.jobs[-1]
    words = f"{job.job_id}" + (f" ({job.scheduler})" if job.scheduler else "")
    words += f", goes on as job {job.native_id}" if job.native_id not in ("", job.job_id) else ""
    return words + (f", submitted {clock(job.time)}" if job.time else "")


def attempt_lines(attempt: AttemptStory, story: Story) -> list[str]:
    start = f"started {clock(attempt.started)}" if attempt.started else "started"
    took = f" after {span(attempt.ended - attempt.started)}" if attempt.ended and attempt.started else ""
    lines = [f"  {attempt.id:<{WIDTH}}  {attempt.state}{took}   {start}, {span_of_steps(attempt)}"]
    if attempt.cause and attempt.cause != attempt.state:
        lines.append(f"  {'':<{WIDTH}}  {attempt.cause}")
    for line in attempt.lineages[1:] if attempt.lineages and attempt.lineages[0].from_step == 0 else attempt.lineages:
        why = f": {line.reason}" if line.reason else ""
        lines.append(f"  {'':<{WIDTH}}  lineage {line.lineage} from {origin(line.from_step)}{why}")
    for role in attempt.roles:
        for end in role.ends:
            if end.incarnation < role.incarnation:
                why = end_words(end.code, end.reason)
                lines.append(f"  {'':<{WIDTH}}  {role.name} started again after incarnation {end.incarnation}: {why}")
    return lines


def origin(from_step: int) -> str:
    return f"generation {from_step}" if from_step else "the start"


def span_of_steps(attempt: AttemptStory) -> str:
    first = attempt.lineages[0].from_step if attempt.lineages else None
    reached = "" if attempt.last_step is None else f", reached step {attempt.last_step}"
    if first is None:
        return f"training had not begun{reached}" if not reached else reached.removeprefix(", ")
    return ("from generation " + str(first) if first else "fresh") + reached


def role_line(role: RoleStory) -> str:
    state = "running" if role.running else "ended"
    restarts = f", started again {role.num_restarts} time{'s' if role.num_restarts != 1 else ''}" if role.num_restarts else ""
    return f"{role.name:<{WIDTH}}{state}, incarnation {role.incarnation}{restarts}"


SHOWN = (  # what a person looks at first, in this order
    ("reward", "reward"),
    ("loss", "loss"),
    ("grad_norm", "gradient norm"),
    ("entropy", "entropy"),
    ("staleness_mean", "staleness"),
    ("staleness_max", "largest staleness"),
    ("lr", "learning rate"),
    ("step_s", "seconds per step"),
    ("wait_s", "of them waiting"),
)


def metric_lines(story: Story) -> list[str]:
    lines = []
    if story.history.steps:
        last = story.history.steps[-1]
        shown = [f"{words} {number(last[key])}" for key, words in SHOWN if isinstance(last.get(key), (int, float))]
        lines.append(row("metrics", f"step {last['step']}: " + ", ".join(shown)))
    name, values = story.history.held_out
    if values:
        ends = values[:1] if len(values) == 1 else [values[0], values[-1]]
        lines.append(row("held-out", f"{name} " + " -> ".join(f"{number(value)} (step {step})" for step, value in ends)))
    return lines


def next_lines(story: Story) -> list[str]:
    lines = []
    if story.attempts:
        lines.append(row("generation", "none yet" if story.generation is None else f"newest {story.generation}"))
    if story.exports:
        lines.append(row("exports", ", ".join(story.exports[-3:]) + f"  in {story.trial.exports}"))
    for number_, command in enumerate(suggestions(story)):
        lines.append(row("next" if number_ == 0 else "", command))
    return lines


def suggestions(story: Story) -> list[str]:
    """What to type next."""
    name, program = index.handle(story.trial), typed()
    if story.state in ("running", "pending", "stopping"):
        commands = [f"{program} logs {name} --follow"]
        return commands if story.state == "stopping" else [*commands, f"{program} cancel {name}"]
    if story.state == "done":
        return [f"{program} logs {name}"]
    if story.state == "rendered":
        return [f"ls {story.trial.scripts}"]
    commands = [f"{program} logs {name}"]
    return [*commands, f"{program} recover {name}"] if story.generation is not None else commands
