"""What a report says of trials: a table of facts, curves, goodput, attempts, options that differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_rl.core.records import TrialState, flatten
from hpc_rl.core.trial import load_object
from hpc_rl.core.types import WeightVersion
from hpc_rl.stats.kept_samples import Sample, load_samples
from hpc_rl.stats.read import Curve, History, is_held_out
from hpc_rl.status.formatting import format_duration, format_number, format_time
from hpc_rl.status.goodput import Bucket, Goodput, compute_goodput
from hpc_rl.status.rollout_report import describe_difficulty, describe_reasons
from hpc_rl.status.trial_status import TrialStatus

MAX_POINTS = 1500  # of a curve; more are thinned evenly
IDENTITY = ("experiment_name", "trial_name", "fileroot")  # last parts of options that differ by nature
NOT_SET = "not set"
EMPTY = {NOT_SET, "null", "", "[]", "{}"}  # alike where a trial lacks the section of an option


@dataclass
class TrialReport:
    """Everything that a report shows of one trial."""

    name: str  # unique among the trials of the report
    status: TrialStatus
    goodput: Goodput
    samples: list[Sample]
    config: dict[str, Any]  # option -> value
    provenance: dict[str, Any]

    @property
    def history(self) -> History:
        return self.status.history


def make_report(name: str, status: TrialStatus, now: float) -> TrialReport:
    """Return the report of a trial at `now`, in Unix seconds."""
    trial = status.trial
    allocation = {"allocation_mode": status.plan["allocation"]} if status.plan.get("allocation") else {}
    return TrialReport(
        name=name,
        status=status,
        goodput=compute_goodput(status, now),
        samples=list(load_samples(trial)),
        config=flatten(load_object(trial.config_json)) | allocation,
        provenance=load_object(trial.provenance_json),
    )


def find_differences(reports: Sequence[TrialReport]) -> list[tuple[str, list[str]]]:
    """Return the options that differ between trials, each with the value of every trial."""
    options = {name: None for report in reports for name in report.config}
    values = [(name, [format_option(report.config, name) for report in reports]) for name in options]
    return [
        (name, shown)
        for name, shown in values
        if len(set(shown)) > 1
        and not (NOT_SET in shown and EMPTY.issuperset(shown))
        and name.rpartition(".")[2] not in IDENTITY
    ]


def format_option(config: Mapping[str, Any], name: str) -> str:
    """Return the value of an option as a report shows it."""
    return "null" if name in config and config[name] is None else str(config.get(name, NOT_SET))


def is_own(metric: str) -> bool:
    """Return whether a metric is of the user's reward, workflow or held-out sets."""
    is_set = metric.startswith("eval_") and ("/" in metric or "pass@" in metric)
    return is_set or metric.startswith(("agent/", "reward/"))


def thin_out(curve: Curve) -> Curve:
    """Return at most MAX_POINTS points of a curve, the newest among them."""
    every = -(-len(curve) // MAX_POINTS)
    return curve[::-1][::every][::-1] if every > 1 else curve


def summarize_staleness(sample: Sample) -> int | None:
    """Return how many steps the oldest weights of a completion were behind; None if none are known."""
    try:
        steps = [WeightVersion.parse(version).step for version in sample.versions]
    except (ValueError, AttributeError):  # of an environment that does not tell, or a damaged file
        return None
    return max(0, sample.step - 1 - min(steps)) if steps else None


def list_facts(report: TrialReport) -> dict[str, str]:
    """Return the values of a trial in the table of a report, by row."""
    status, use = report.status, report.goodput
    total = f" of {status.total_steps}" if status.total_steps else ""
    found = {"state": str(status.state), "step": f"{status.step}{total}"}
    if status.reason:
        found["reason"] = status.reason
    for measure, values in report.history.evaluated.items():
        if known := [(step, value) for step, value in values if value is not None]:
            found[f"held-out {measure}"] = status.format_held_out(known)
    own = [name for name in report.history.metrics() if is_own(name) and not is_held_out(name)]
    for metric in ("reward", "loss", *own):
        if curve := report.history.curve(metric):
            last = [value for _, value in curve[-10:]]
            found[f"mean {metric} of the last 10 steps"] = format_number(sum(last) / len(last))
    if status.idle.total:
        note = f": {status.idle.text}" if status.learns_nothing else ""
        found["steps without learning"] = f"{status.idle.total} of {status.idle.num_steps}{note}"
    if status.last_rollout is not None:
        count = sum(status.rejected.values())
        found["rejected prompts"] = f"{count} ({describe_reasons(status.rejected)})" if count else "0"
        found["rows by mean reward"] = describe_difficulty(status.last_rollout.difficulty)
    if len(status.history.steps) > 1:
        times = sorted(value for _, value in report.history.curve("step_s"))
        found["seconds per step"] = f"{format_number(times[len(times) // 2])} (median)" if times else ""
    started = [use.start for use in use.attempts]
    found["started"] = format_time(min(started)) if started else ""
    found["attempts"] = str(len(status.attempts))
    found["in the queue"] = format_duration(use.queued_s)
    if use.share is not None:
        found["allocation"] = describe_device_time(use, use.allocation_s)
        found["goodput"] = f"{use.share:.1%} generated or trained"
    if status.state is not TrialState.DONE and status.generation is not None:
        found["checkpoint"] = str(status.generation)
    return {name: value for name, value in found.items() if value}


def describe_device_time(use: Goodput, device_s: float) -> str:
    """Return device-seconds for people, as `12.5 GPU-hours`."""
    unit = "GPU" if use.on_gpus else "process"
    return f"{device_s / 3600:.1f} {unit}-hours" if device_s >= 3600 else f"{device_s:.0f} {unit}-seconds"


def make_fact_rows(reports: Sequence[TrialReport]) -> list[tuple[str, list[str]]]:
    """Return the table of facts: the name of a row, and the value of each trial."""
    columns = [list_facts(report) for report in reports]
    names = {name: None for column in columns for name in column}
    return [(name, [column.get(name, "") for column in columns]) for name in names]


def make_goodput_rows(reports: Sequence[TrialReport]) -> list[tuple[Bucket, list[str]]]:
    """Return the table of buckets: the share of each trial's allocation, and the time."""
    rows = []
    for bucket in Bucket:
        seconds = [report.goodput.buckets.get(bucket, 0.0) for report in reports]
        if any(seconds):
            cells = [
                f"{duration_s / max(report.goodput.allocation_s, 1e-9):.1%}, "
                f"{describe_device_time(report.goodput, duration_s)}"
                for duration_s, report in zip(seconds, reports, strict=True)
            ]
            rows.append((bucket, cells))
    return rows


def make_attempt_rows(report: TrialReport) -> list[list[str]]:
    """Return a row per attempt: id, state, start, how long it held its nodes and waited, steps, cause."""
    known = {one.id: one for one in report.status.attempts}
    rows = []
    for use in report.goodput.attempts:
        held, one = format_duration(use.end - use.start), known.get(use.id)
        cells = [use.id, "servers" if one is None else str(one.state), format_time(use.start), held]
        lines = [] if one is None else [line for line in one.lineages if line.from_step]
        begun = ", ".join(f"from {line.from_step}" for line in lines) or "fresh"
        reached = "" if one is None or one.last_step is None else f"{begun}, to {one.last_step}"
        ends = [] if one is None else [(role, end) for role in one.roles for end in role.ends]
        again = [
            f"{role.name} was started again: {end.reason}"
            for role, end in ends
            if end.incarnation < role.incarnation
        ]
        cause = "; ".join([*again, *filter(None, [one.cause if one else ""])])
        rows.append([*cells, format_duration(use.waited_s), reached, cause])
    return rows
