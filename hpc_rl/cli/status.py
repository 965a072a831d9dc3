"""`hpc-rl status <trial>`: what a trial does and what happened to it; at most one scheduler query."""

import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from statistics import fmean
from types import MappingProxyType
from typing import Any

from hpc_rl.checkpoint.decide import PastStart
from hpc_rl.checkpoint.start_facts import fruitless_starts
from hpc_rl.cli import list as listing
from hpc_rl.cli.options import CommandParser, Namespace, print_json
from hpc_rl.core.errors import ConfigError, ExitCode, TrialStateError
from hpc_rl.core.files import Row
from hpc_rl.core.records import DoneRecord, ForkRecord, JobRecord, LineageRecord, TrialState
from hpc_rl.core.trial import Trial
from hpc_rl.schedulers.base import SchedulerAnswer
from hpc_rl.stats.read import is_number
from hpc_rl.status import formatting
from hpc_rl.status.attempts import AttemptStatus, RoleStatus
from hpc_rl.status.formatting import format_duration, format_number, format_time, one_line, size_text
from hpc_rl.status.goodput import RECENT_STEPS, step_text
from hpc_rl.status.heartbeat import WATCH_S
from hpc_rl.status.rollout_report import environment_lines, problems, reasons_text, summary
from hpc_rl.status.scheduler_view import query
from hpc_rl.status.trial_status import TrialStatus, names_of_replicas, read_status
from hpc_rl.supervise.server_array import array_line
from hpc_rl.trials import trial_index

WIDTH = 12  # of the first column
FROM_START = "the start"
SHOWN_ATTEMPTS = 5  # without --all
MOST_MEASURES = 6  # of held-out data
OLD_ANSWER_S = 60.0  # age from which the scheduler's answer counts as stale
DESCRIPTION = """Show what a trial does and what happened to it. Reads files, and queries the scheduler
rarely: all commands of an account share one query for all of its jobs, at most 4 a minute."""
EPILOG = f"""--json prints one object; null and "" mean that a value is not known, times are Unix seconds:
  state, reason         {", ".join(TrialState)}; and why
  step, total_steps, steps_per_second, eta_s
                        last trained step, length, rate, time left
  since, ends_at, last_sign
                        start of this state, time limit of the job, newest change of a file
  checkpoint, exports   step of the newest checkpoint, names of the exports
  metrics, evaluations, rollout
                        metrics of the newest step, all evaluations, counters of the rollout role
  rejected_prompts, held_out_rows
                        prompts without a group, by reason; held-out rows that were scored and left out
  idle_steps            steps that taught the model nothing: in a row up to the newest, in all, and why
  jobs, servers         submissions, and server arrays of layout jobs
  attempts, lineages    starts by the scheduler with their roles, starts of training
  fruitless_starts, last_end
                        starts in a row without a new checkpoint, why the last attempt ended
  scheduler_error, scheduler_asked_at
                        error message and time of the scheduler query"""


def parser() -> CommandParser:
    made = CommandParser(DESCRIPTION, EPILOG)
    made.add_trial("the one that runs, else the newest; several that run are listed")
    made.add_flag("--offline", help="do not query the scheduler")
    made.add_flag("--all", help=f"show every attempt, not only the newest {SHOWN_ATTEMPTS}")
    made.add_flag("-f", "--follow", help="live view until the trial is over; exits with its code")
    made.add_json("everything")
    return made


def run(args: Namespace) -> int:
    rows = [] if args.trial else listing.live_rows(args.offline)
    if len(rows) > 1 and not (args.follow or args.json):
        print("\n".join(listing.table(rows)))
        return 0
    trial = trial_index.resolve(args.trial) if args.trial else listing.only_trial(rows)
    if args.follow:
        if args.json:
            raise ConfigError("--json cannot be combined with --follow.")
        return follow(trial)
    answer = SchedulerAnswer() if args.offline else query(trial)
    status = read_status(trial, answer.newest, answer.asked_at or None, WATCH_S)
    past = fruitless(status)
    if args.json:
        asked = {"scheduler_error": answer.complaint, "scheduler_asked_at": answer.asked_at or None}
        print_json(status.to_json() | asked | {"fruitless_starts": [asdict(one) for one in past]})
        return 0
    print("\n".join(text(status, None if args.all else SHOWN_ATTEMPTS, past)))
    if answer.complaint:
        source = f"its answer of {format_duration(answer.age_s)} ago" if answer.asked_at else "files only"
        _warn(f"could not query the scheduler; showing data from {source}: {answer.complaint}")
    elif answer.asked_at and answer.age_s > OLD_ANSWER_S:
        _warn(f"scheduler state is {format_duration(answer.age_s)} old (queries are rate-limited)")
    return 0


def _warn(line: str) -> None:
    print(f"hpc-rl: {line}", file=sys.stderr)


def follow(trial: Trial) -> int:
    """Show a trial live until it is over; return its exit code."""
    from hpc_rl.status import follow as live  # importing rich takes time

    try:
        return live.follow(trial)
    except KeyboardInterrupt:
        [cancel] = trial_index.commands(trial, "cancel")
        print(f"\nhpc-rl: interrupted; the trial continues. Stop it with: {cancel}", file=sys.stderr)
        return ExitCode.KILLED_BY_PERSON


def fruitless(status: TrialStatus) -> tuple[PastStart, ...]:
    """Return the starts of the newest job since the newest checkpoint, which the loop guard counts."""
    if status.state in (TrialState.DONE, TrialState.RENDERED) or not status.attempts:
        return ()
    newest = status.attempts[-1]
    try:
        return fruitless_starts(status.trial, newest.job_id, newest.id if status.live else "")
    except TrialStateError as error:  # recover/ or lineages/ is not a folder: the rest can be shown
        _warn(str(error))
        return ()


def text(status: TrialStatus, max_attempts: int | None = None, past: tuple[PastStart, ...] = ()) -> list[str]:
    lines = [headline(status), *time_lines(status), row("directory", str(status.trial.dir))]
    if fork := ForkRecord.read(status.trial.forked_from):
        lines.append(row("forked from", one_line(f"{fork.trial}, checkpoint {fork.step}")))
    if status.plan:
        lines.append(row("plan", plan_line(status.plan)))
    if status.jobs:
        lines.append(row("job", job_line(status)))
    lines += [row("servers", array_line(array)) for array in status.servers[-1:]]
    if status.attempts:
        shown = status.attempts[-max_attempts:] if max_attempts else status.attempts
        earlier = len(status.attempts) - len(shown)
        lines += ["", "attempts", *([f"  and {earlier} earlier: --all shows them"] if earlier else [])]
        lines += [one_line(line) for attempt in shown for line in attempt_lines(attempt, status)]
    if past and not (status.over and len(past) == 1):  # of one start that ended it the first lines tell all
        lines += ["", *guard_lines(status, past)]
    if status.live is not None:
        names = names_of_replicas(status)
        lines += ["", "roles", *(f"  {role_line(role, names)}" for role in status.live.roles)]
    if status.rollout is not None and status.state is not TrialState.DONE:
        live = status.live is not None
        lines += ["", row("rollout", summary(status.rollout, live))]
        more = [*environment_lines(status.rollout, live), *problems(status.rollout, live)]
        lines += [row("", one_line(line)) for line in more]
    elif status.over and status.last_rollout is not None:
        lines += ["", row("rollout", summary(status.last_rollout, live=False))]
        if status.rejected:
            lines.append(row("", f"rejected: {reasons_text(status.rejected)}"))
    if status.history.steps or status.history.evaluations:
        lines += ["", *metric_lines(status)]
    return [*lines, "", *next_lines(status)]


def row(name: str, value: str) -> str:
    return f"{name:<{WIDTH}}{value}"


def counted(number: int, noun: str) -> str:
    """Return `1 start`, `2 starts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def headline(status: TrialStatus) -> str:
    parts = [str(status.trial), str(status.state)]
    if status.step or status.total_steps:
        parts.append(progress(status))
    if status.state is TrialState.RUNNING:
        parts += filter(None, [status.pace])
    lines = ["   ".join(parts)]
    lines += [row("", one_line(text)) for text in [*status.silent_hosts, *filter(None, [status.reason])]]
    return "\n".join(lines)


def time_lines(status: TrialStatus) -> list[str]:
    """Return since when the trial has been in its state, until when it can be, and its last sign of life."""
    parts = []
    if status.since and status.state in (TrialState.RUNNING, TrialState.STOPPING):
        parts.append(f"since {format_time(status.since)}")
    if status.ends_at:
        left_s = status.ends_at - time.time()
        left = f", in {format_duration(left_s)}" if left_s > 0 else ""
        parts.append(f"the scheduler ends the job {format_time(status.ends_at)}{left}")
        if status.eta_s is not None and status.eta_s > left_s > 0:
            parts.append("training continues in a later attempt")
    if status.state is TrialState.UNKNOWN and status.last_sign:
        parts.append(f"last sign of life {format_time(status.last_sign)}")
    return [row("time", "; ".join(parts))] if parts else []


def progress(status: TrialStatus) -> str:
    total = status.total_steps
    return f"step {status.step}" + (f" of {total} ({100 * status.step // total} %)" if total else "")


def plan_line(plan: dict[str, Any]) -> str:
    nodes = plan.get("n_nodes")
    where = counted(nodes, "node") if nodes else ""
    parts = (plan.get("trainer"), plan.get("allocation"), where, f"recover.mode {plan.get('recover_mode')}")
    return ", ".join(str(part) for part in parts if part)


def job_line(status: TrialStatus) -> str:
    job = status.jobs[-1]
    line = job.job_id + (f" ({job.scheduler})" if job.scheduler else "")
    if job.native_id not in ("", job.job_id):
        line += f", continued as job {job.native_id}"
    return line + (f", submitted {format_time(job.time)}" if job.time else "")


def attempt_lines(attempt: AttemptStatus, status: TrialStatus) -> list[str]:
    indent = f"  {'':<{WIDTH}}  "
    start = f"started {format_time(attempt.started)}" if attempt.started else "started"
    took = ""
    if attempt.ended and attempt.started:
        took = f" after {format_duration(attempt.ended - attempt.started)}"
    lines = [f"  {attempt.id:<{WIDTH}}  {attempt.state}{took}   {start}, {steps_text(attempt)}"]
    in_headline = attempt is status.attempts[-1] and status.reason == attempt.cause
    if attempt.cause and not in_headline:
        lines.append(indent + attempt.cause)
    over = [one for one in attempt.silences if one.until is not None or attempt is not status.live]
    lines += [indent + one.text(False) for one in over]  # the first lines tell the others
    fresh = bool(attempt.lineages) and origin(attempt.lineages[0]) == FROM_START
    for lineage in attempt.lineages[1:] if fresh else attempt.lineages:
        why = f": {lineage.reason}" if lineage.reason else ""
        lines.append(f"{indent}lineage {lineage.lineage} from {origin(lineage)}{why}")
    return lines + [indent + line for line in map(restart_text, attempt.roles) if line]


def restart_text(role: RoleStatus) -> str:
    """Return why a role was last started again; empty where it was not."""
    before = [end for end in role.ends if end.incarnation < role.incarnation]
    if not before:
        return ""
    last = max(before, key=lambda end: end.incarnation)
    again = f"after incarnation {last.incarnation}"
    if len(before) > 1:
        again = f"{len(before)} times, the last time"
    return f"{role.name} started again {again}: {formatting.exit_text(last.code, last.reason)}"


def guard_lines(status: TrialStatus, past: tuple[PastStart, ...]) -> list[str]:
    """Return what the loop guard counts, and its limit."""
    allowed = status.plan.get("recover_retries")
    limit = "" if allowed is None else f" (more than {allowed} failures end it: recover.retries)"
    since = "" if status.generation is None else f" since checkpoint {status.generation}"
    line = f"{counted(len(past), 'start')} in a row without a new checkpoint{since}{limit}"
    return [row("no progress", line), *(one_line(f"  {one}") for one in past)]


def origin(lineage: LineageRecord) -> str:
    fresh = not lineage.from_step and lineage.from_lineage is None
    return FROM_START if fresh else f"checkpoint {lineage.from_step}"


def steps_text(attempt: AttemptStatus) -> str:
    """Return from where to where an attempt trained."""
    reached = "" if attempt.last_step is None else f"reached step {attempt.last_step}"
    if not attempt.lineages:
        return reached or "training had not begun"
    first = origin(attempt.lineages[0])
    start = "fresh" if first == FROM_START else f"from {first}"
    return f"{start}, {reached}" if reached else start


def role_line(role: RoleStatus, names: Mapping[tuple[str, int], str] = MappingProxyType({})) -> str:
    """Return a role's state, with its name of `names`."""
    state = f"{'running' if role.running else 'exited'}, incarnation {role.incarnation}"
    if role.gave_up:
        state = f"not started again: {role.gave_up}"
    elif role.restarting and not role.running:
        state = f"about to be started again: {role.restarting}"
    elif role.incarnation:
        state += f", started again {counted(role.incarnation, 'time')}"
    name = role.name
    if own := names.get((role.role, role.index)):
        name += f" ({own})"
    return one_line(f"{name:<{WIDTH - 1}} {state}")


METRICS = {  # in the order shown; parts of the reward and what workflows measure come after it
    "reward": "reward",
    "reward_std": "its standard deviation",
    "accuracy_delta": "gain of the student",
    "accuracy": "accuracy",
    "margin": "margin",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "entropy": "entropy",
    "kl_loss": "KL to the reference",
    "kl_rewards": "KL in the reward",
    "lr": "learning rate",
}
OF_BATCH = {  # of what a step trained on
    "completion_len": "completion length",
    "truncated": "share truncated",
    "zero_advantage_groups": "share of zero-advantage groups",
    "staleness_mean": "staleness",
    "staleness_max": "largest staleness",
    "behave_approx_kl": "KL to the policy that generated",
    "given_up": "trajectories of weights that were given up",
}
FAR_KL = 1.0  # from which a batch teaches little of the policy that is trained


def metric_lines(status: TrialStatus) -> list[str]:
    lines = []
    if status.history.steps:
        last = status.history.steps[-1]
        # The reason of a trial that is done has it.
        if last.get("save_error") and status.state is not TrialState.DONE:
            failed = last.get("save_failed")
            times = "once" if failed == 1 else f"{failed} times in a row"
            lines.append(row("saving", one_line(f"FAILED {times}: {last['save_error']}")))
        parts = {key: key for key in last if key.startswith(("reward/", "agent/"))}
        known = shown({"reward": "reward", "reward_std": METRICS["reward_std"], **parts, **METRICS}, last)
        lines.append(row("metrics", one_line(f"step {last['step']}: {known}")))
        of_batch = {key: text for key, text in OF_BATCH.items() if key != "given_up" or last.get(key)}
        if text := shown(of_batch, last):
            lines.append(row("batch", text))
        if is_number(kl := last.get("behave_approx_kl")) and abs(kl) > FAR_KL:
            why = "the policy is far from the one that generated this batch"
            again = "hpc-rl recover --from STEP without --replay generates new completions"
            lines.append(row("", f"KL {format_number(kl)}: {why}; {again}"))
        newest = status.history.steps[-RECENT_STEPS:]
        share = fmean(number_of(one, "reward_clipped") for one in newest)
        if share:
            clip = "is beyond actor.reward_clip and counts as that value"
            what = f"a share of {format_number(share)} of the newest rewards {clip}"
            lines.append(row("", f"{what}; raise it, or lower actor.reward_scaling"))
        if status.learns_nothing:
            lines.append(row("learning", f"NOTHING IS LEARNED: {status.idle.text}"))
        if text := step_text(newest):
            lines.append(row("seconds", f"{text}  (newest {counted(len(newest), 'step')})"))
    measures = list(status.history.evaluated.items())
    for number, (name, values) in enumerate(measures[:MOST_MEASURES]):
        text = f"{name} {status.held_out_text(values)}"
        lines.append(row("" if number else "held-out", one_line(text)))
    if len(measures) > MOST_MEASURES:
        lines.append(row("", f"and {len(measures) - MOST_MEASURES} more: hpc-rl plot shows them"))
    return lines


def number_of(values: Row, key: str) -> float:
    """Return a metric of a row; 0 where it is none."""
    value = values.get(key)
    return value if is_number(value) else 0.0


def shown(names: Mapping[str, str], values: Row) -> str:
    """Return the metrics that are numbers, with their names for people."""
    known = [(text, values[key]) for key, text in names.items() if is_number(values.get(key))]
    return ", ".join(f"{text} {format_number(value)}" for text, value in known)


def next_lines(status: TrialStatus) -> list[str]:
    lines = []
    if status.attempts:
        newest = "none yet" if status.generation is None else f"newest {status.generation}"
        lines.append(row("checkpoint", newest))
    if status.exports:
        lines.append(row("exports", f"{', '.join(status.exports[-3:])}  in {status.trial.exports}"))
    done = DoneRecord.read(status.trial.done)
    if done is not None and done.freed_bytes:
        stay = "what was published for servers is removed; exports and checkpoints stay"
        lines.append(row("weights", f"{size_text(done.freed_bytes)} freed: {stay}"))
    for number, command in enumerate(suggestions(status)):
        lines.append(row("next" if number == 0 else "", command))
    return lines


def suggestions(status: TrialStatus) -> list[str]:
    if status.state is TrialState.RENDERED:
        return [f"ls {status.trial.scripts}"]
    if status.state in (TrialState.RUNNING, TrialState.PENDING):
        verbs = ["logs --follow", "cancel"]
    elif status.state is TrialState.STOPPING:
        verbs = ["logs --follow"]
    elif status.state is TrialState.DONE or status.generation is None:
        verbs = [log_of_failure(status)]
    else:
        verbs = [log_of_failure(status), "recover"]
    again = command_of_submission(status) if status.generation is None else ""
    return [*trial_index.commands(status.trial, *verbs), *filter(None, [again])]


def command_of_submission(status: TrialStatus) -> str:
    """Return what starts a trial that is over again where there is no checkpoint, "" where nothing does."""
    job = JobRecord.read(status.trial.job(status.jobs[-1].job_id)) if status.jobs else None
    failed = status.over and status.state is not TrialState.DONE
    # other modes refuse what there is of a trial
    if job is None or not failed or status.plan.get("recover_mode") != "auto":
        return ""
    if job.command[1:2] != ("submit",):
        return ""
    return shlex.join([trial_index.program_name(), *job.command[1:]])


def log_of_failure(status: TrialStatus) -> str:
    """Return the command for the log of the role that ended the newest attempt."""
    roles = status.attempts[-1].roles if status.attempts else []
    failed = next((one for one in roles if one.gave_up and one.role in ("rollout", "environment")), None)
    if failed is None:  # without options it shows the trainer and the supervisor
        return "logs"
    return f"logs --role {failed.role}" + (f" --index {failed.index}" if failed.index else "")
