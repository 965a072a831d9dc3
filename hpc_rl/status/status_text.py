"""The text of `hpc-rl status`: state, times, attempts, roles, rollout and metrics of a trial, as lines."""

import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any

from hpc_rl.checkpoint.decide import PastStart
from hpc_rl.checkpoint.start_facts import find_fruitless_starts
from hpc_rl.core.files import Row
from hpc_rl.core.records import ForkRecord, LineageRecord, TrialState
from hpc_rl.core.trial import SCORES, Trial, load_object
from hpc_rl.stats.read import is_number
from hpc_rl.status import formatting
from hpc_rl.status.attempts import AttemptStatus, RoleStatus
from hpc_rl.status.formatting import flatten_line, format_duration, format_number, format_time
from hpc_rl.status.goodput import RECENT_STEPS, describe_steps
from hpc_rl.status.rollout_report import (
    describe_environments,
    describe_reasons,
    describe_rollout,
    list_problems,
)
from hpc_rl.status.trial_status import TrialStatus, find_replica_names
from hpc_rl.supervise.server_array import describe_array

WIDTH = 12  # of the first column
FROM_START = "the start"
MOST_MEASURES = 6  # of held-out data


def list_fruitless_starts(status: TrialStatus) -> tuple[PastStart, ...]:
    """Return the starts of the newest job since the newest checkpoint, which the loop guard counts.

    Raises TrialStateError if recover/ or lineages/ is not a folder.
    """
    if status.state in (TrialState.DONE, TrialState.RENDERED) or not status.attempts:
        return ()
    newest = status.attempts[-1]
    return find_fruitless_starts(status.trial, newest.job_id, newest.id if status.live else "")


def describe_trial(
    status: TrialStatus, max_attempts: int | None = None, past: tuple[PastStart, ...] = ()
) -> list[str]:
    """Return everything but the next steps; `past` are the starts that the loop guard counts."""
    lines = [format_headline(status), *describe_times(status), format_row("directory", str(status.trial.dir))]
    if fork := ForkRecord.read(status.trial.forked_from):
        origin = f"weights {fork.version}" if fork.only_weights else f"checkpoint {fork.step}"
        lines.append(format_row("forked from", flatten_line(f"{fork.trial}, {origin}")))
    if status.plan:
        lines.append(format_row("plan", describe_plan(status.plan)))
    if status.jobs:
        lines.append(format_row("job", describe_job(status)))
    lines += [format_row("servers", describe_array(array)) for array in status.servers[-1:]]
    if status.attempts:
        newest = status.attempts[-max_attempts:] if max_attempts else status.attempts
        earlier = len(status.attempts) - len(newest)
        lines += ["", "attempts", *([f"  and {earlier} earlier: --all shows them"] if earlier else [])]
        lines += [flatten_line(line) for attempt in newest for line in describe_attempt(attempt, status)]
    if past and not (status.over and len(past) == 1):  # of one start that ended it the first lines tell all
        lines += ["", *describe_loop_guard(status, past)]
    if status.live is not None:
        names = find_replica_names(status)
        lines += ["", "roles", *(f"  {describe_role(role, names)}" for role in status.live.roles)]
    if status.rollout is not None and status.state is not TrialState.DONE:
        live = status.live is not None
        lines += ["", format_row("rollout", describe_rollout(status.rollout, live))]
        more = [*describe_environments(status.rollout, live), *list_problems(status.rollout, live)]
        lines += [format_row("", flatten_line(line)) for line in more]
    elif status.over and status.last_rollout is not None:
        lines += ["", format_row("rollout", describe_rollout(status.last_rollout, live=False))]
        if status.rejected:
            lines.append(format_row("", f"rejected: {describe_reasons(status.rejected)}"))
    if status.history.steps or status.history.evaluations:
        lines += ["", *describe_metrics(status)]
    if text := describe_scores(status.trial):
        lines.append(format_row("scores", text))
    return lines


def describe_scores(trial: Trial) -> str:
    """Return the scores of a trial without a trainer as one line; empty before its end."""
    scores = load_object(trial.results / SCORES)
    numbers = (f"{name} {format_number(one)}" for name, one in scores.items() if is_number(one))
    return flatten_line(", ".join(numbers))


def format_row(name: str, value: str) -> str:
    return f"{name:<{WIDTH}}{value}"


def format_count(number: int, noun: str) -> str:
    """Return `1 start`, `2 starts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_headline(status: TrialStatus) -> str:
    parts = [str(status.trial), str(status.state)]
    if status.step or status.total_steps:
        parts.append(format_progress(status))
    if status.state is TrialState.RUNNING:
        parts += filter(None, [status.pace])
    lines = ["   ".join(parts)]
    lines += [
        format_row("", flatten_line(text)) for text in [*status.silent_hosts, *filter(None, [status.reason])]
    ]
    return "\n".join(lines)


def describe_times(status: TrialStatus) -> list[str]:
    """Return since when the trial has been in its state, until when it can be, and its last heartbeat."""
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
        parts.append(f"last heartbeat {format_time(status.last_sign)}")
    return [format_row("time", "; ".join(parts))] if parts else []


def format_progress(status: TrialStatus) -> str:
    total = status.total_steps
    return f"step {status.step}" + (f" of {total} ({100 * status.step // total} %)" if total else "")


def describe_plan(plan: dict[str, Any]) -> str:
    nodes = plan.get("n_nodes")
    where = format_count(nodes, "node") if nodes else ""
    purpose = plan.get("purpose", "train")
    first = plan.get("trainer") if purpose == "train" else purpose
    parts = (first, plan.get("allocation"), where, f"recover.mode {plan.get('recover_mode')}")
    return ", ".join(str(part) for part in parts if part)


def describe_job(status: TrialStatus) -> str:
    job = status.jobs[-1]
    line = job.job_id + (f" ({job.scheduler})" if job.scheduler else "")
    if job.native_id not in ("", job.job_id):
        line += f", continued as job {job.native_id}"
    return line + (f", submitted {format_time(job.time)}" if job.time else "")


def describe_attempt(attempt: AttemptStatus, status: TrialStatus) -> list[str]:
    indent = f"  {'':<{WIDTH}}  "
    start = f"started {format_time(attempt.started)}" if attempt.started else "started"
    took = ""
    if attempt.ended and attempt.started:
        took = f" after {format_duration(attempt.ended - attempt.started)}"
    steps = f", {describe_attempt_steps(attempt)}" if _trains(status) else ""
    lines = [f"  {attempt.id:<{WIDTH}}  {attempt.state}{took}   {start}{steps}"]
    in_headline = attempt is status.attempts[-1] and status.reason == attempt.cause
    if attempt.cause and not in_headline:
        lines.append(indent + attempt.cause)
    over = [one for one in attempt.silences if one.until is not None or attempt is not status.live]
    lines += [indent + one.text(False) for one in over]  # the first lines tell the others
    fresh = bool(attempt.lineages) and describe_origin(attempt.lineages[0]) == FROM_START
    for lineage in attempt.lineages[1:] if fresh else attempt.lineages:
        why = f": {lineage.reason}" if lineage.reason else ""
        lines.append(f"{indent}lineage {lineage.lineage} from {describe_origin(lineage)}{why}")
    return lines + [indent + line for line in map(describe_restart, attempt.roles) if line]


def _trains(status: TrialStatus) -> bool:
    return all(job.trains for job in status.jobs)


def describe_restart(role: RoleStatus) -> str:
    """Return why a role was last started again; empty if it was not."""
    before = [end for end in role.ends if end.incarnation < role.incarnation]
    if not before:
        return ""
    last = max(before, key=lambda end: end.incarnation)
    again = f"after incarnation {last.incarnation}"
    if len(before) > 1:
        again = f"{len(before)} times, the last time"
    return f"{role.name} started again {again}: {formatting.format_exit(last.code, last.reason)}"


def describe_loop_guard(status: TrialStatus, past: tuple[PastStart, ...]) -> list[str]:
    """Return the count of the loop guard, and its limit."""
    allowed = status.plan.get("recover_retries")
    limit = "" if allowed is None else f" (more than {allowed} failures end it: recover.retries)"
    since = "" if status.generation is None else f" since checkpoint {status.generation}"
    line = f"{format_count(len(past), 'start')} in a row without a new checkpoint{since}{limit}"
    return [format_row("no progress", line), *(flatten_line(f"  {one}") for one in past)]


def describe_origin(lineage: LineageRecord) -> str:
    fresh = not lineage.from_step and lineage.from_lineage is None
    return FROM_START if fresh else f"checkpoint {lineage.from_step}"


def describe_attempt_steps(attempt: AttemptStatus) -> str:
    """Return from where to where an attempt trained."""
    reached = "" if attempt.last_step is None else f"reached step {attempt.last_step}"
    if not attempt.lineages:
        return reached or "training had not begun"
    first = describe_origin(attempt.lineages[0])
    start = "fresh" if first == FROM_START else f"from {first}"
    return f"{start}, {reached}" if reached else start


def describe_role(role: RoleStatus, names: Mapping[tuple[str, int], str] = MappingProxyType({})) -> str:
    """Return a role's state, with its name of `names`."""
    state = f"{'running' if role.running else 'exited'}, incarnation {role.incarnation}"
    if role.gave_up:
        state = f"not started again: {role.gave_up}"
    elif role.restarting and not role.running:
        state = f"about to be started again: {role.restarting}"
    elif role.incarnation:
        state += f", started again {format_count(role.incarnation, 'time')}"
    name = role.name
    if own := names.get((role.role, role.index)):
        name += f" ({own})"
    return flatten_line(f"{name:<{WIDTH - 1}} {state}")


METRICS = {  # in order; parts of the reward and metrics of workflows follow it
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
OF_BATCH = {  # of the batch of a step
    "completion_len": "completion length",
    "truncated": "share truncated",
    "zero_advantage_groups": "share of zero-advantage groups",
    "staleness_mean": "staleness",
    "staleness_max": "largest staleness",
    "behave_approx_kl": "KL to the policy that generated",
    "given_up": "trajectories of discarded weights",
    "tokens_regenerated": "tokens generated again after servers were lost",
}
ONLY_IF_ANY = ("given_up", "tokens_regenerated")
FAR_KL = 1.0  # a batch with more teaches little
# Mean |log w| of trainer and servers with the same weights: 0.01 to 0.03 is usual in bfloat16
FAR_LOG_W = 0.1


def describe_mismatch(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a warning if the servers sample from another policy than the trainer's.

    Only tokens of the newest weights show it: after older ones, the policy has changed by training.
    """
    fresh = [value for one in steps if is_number(value := one.get("mismatch_log_w_fresh"))][-RECENT_STEPS:]
    if not fresh or (size := fmean(fresh)) <= FAR_LOG_W:
        return []
    what = "THE SERVERS SAMPLE FROM ANOTHER POLICY: "
    what += f"mean |log w| is {format_number(size)} at tokens of the newest weights"
    remedy = "compare dtype and sampling options of servers and trainer, or set actor.rollout_correction"
    return [format_row("mismatch", f"{what}, more than {FAR_LOG_W:g}; {remedy}")]


def describe_metrics(status: TrialStatus) -> list[str]:
    lines = []
    if status.history.steps:
        last = status.history.steps[-1]
        # The reason of a trial that is done has it.
        if last.get("save_error") and status.state is not TrialState.DONE:
            failed = last.get("save_failed")
            times = "once" if failed == 1 else f"{failed} times in a row"
            lines.append(format_row("saving", flatten_line(f"FAILED {times}: {last['save_error']}")))
        if last.get("callback_error"):
            count = format_count(int(get_number(last, "callback_errors")), "error")
            text = f"{count}; training continues. The last one: {last['callback_error']}"
            lines.append(format_row("callbacks", flatten_line(text)))
        parts = {key: key for key in last if key.startswith(("reward/", "agent/"))}
        known = format_metrics(
            {"reward": "reward", "reward_std": METRICS["reward_std"], **parts, **METRICS}, last
        )
        lines.append(format_row("metrics", flatten_line(f"step {last['step']}: {known}")))
        of_batch = {key: text for key, text in OF_BATCH.items() if key not in ONLY_IF_ANY or last.get(key)}
        if text := format_metrics(of_batch, last):
            lines.append(format_row("batch", text))
        if is_number(kl := last.get("behave_approx_kl")) and abs(kl) > FAR_KL:
            why = "the policy is far from the one that generated this batch"
            again = "hpc-rl recover --from STEP without --replay generates new completions"
            lines.append(format_row("", f"KL {format_number(kl)}: {why}; {again}"))
        newest = status.history.steps[-RECENT_STEPS:]
        lines += describe_mismatch(status.history.steps)
        share = fmean(get_number(one, "reward_clipped") for one in newest)
        if share:
            clip = "is beyond actor.reward_clip and counts as that value"
            what = f"a share of {format_number(share)} of the newest rewards {clip}"
            lines.append(format_row("", f"{what}; raise it, or lower actor.reward_scaling"))
        if status.learns_nothing:
            lines.append(format_row("learning", f"NOTHING IS LEARNED: {status.idle.text}"))
        if status.skipped.num_updates:
            lines.append(format_row("updates", status.skipped.text))
        if text := describe_steps(newest):
            lines.append(format_row("seconds", f"{text}  (newest {format_count(len(newest), 'step')})"))
    measures = list(status.history.evaluated.items())
    for number, (name, values) in enumerate(measures[:MOST_MEASURES]):
        text = f"{name} {status.format_held_out(values)}"
        lines.append(format_row("" if number else "held-out", flatten_line(text)))
    if len(measures) > MOST_MEASURES:
        lines.append(format_row("", f"and {len(measures) - MOST_MEASURES} more: hpc-rl plot shows them"))
    return lines


def get_number(values: Row, key: str) -> float:
    """Return a metric of a row; 0 for other values."""
    value = values.get(key)
    return value if is_number(value) else 0.0


def format_metrics(names: Mapping[str, str], values: Row) -> str:
    """Return the metrics that are numbers, with their names for people."""
    known = [(text, values[key]) for key, text in names.items() if is_number(values.get(key))]
    return ", ".join(f"{text} {format_number(value)}" for text, value in known)
