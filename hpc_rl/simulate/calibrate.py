"""Measures costs in the files of trials: metrics, the batch log, events, and the servers' use.

What a trial does not tell stays at its default, and `Costs.origins` tells which is which. Several trials are
measured together; values that depend on the number of ranks, tokens or sequences are fitted over all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from hpc_rl.core.errors import JobEvent, TrialStateError
from hpc_rl.core.records import EventKind, load_events, load_job_state
from hpc_rl.core.trial import Attempt, AttemptId, Trial, list_entries, load_object
from hpc_rl.core.types import TrajectoryGroup, decode
from hpc_rl.plan.schema import Plan
from hpc_rl.rollout.batch_log.ledger import (
    GroupRecord,
    get_segment_path,
    list_segments,
    load_group,
    load_segment,
)
from hpc_rl.simulate.costs import Costs
from hpc_rl.stats.read import is_evaluation, is_number, load_history
from hpc_rl.status.goodput import PARTS, list_metric_files, sum_seconds

MAX_GROUPS = 2000  # of the batch log that are read for their lengths
MIN_STEPS = 3


@dataclass
class Evidence:
    """What the files of one trial tell."""

    name: str
    ranks: int
    rows: list[dict[str, Any]]  # of steps
    evaluations: list[dict[str, Any]]
    groups: list[list[int]]  # tokens of the completions of each prompt that was read
    prompt_tokens: float | None
    generated: float  # tokens of all groups in the batch log
    busy_s: float = 0.0  # of all servers
    request_s: float = 0.0
    requests: int = 0
    decode: list[float] = field(default_factory=lambda: [0.0] * 5)  # sums of servers/decode_speed.py
    first_start_s: list[float] = field(default_factory=list)  # the trainer's, with the servers
    restart_s: list[float] = field(default_factory=list)  # of a trainer alone
    start_job_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    async_save: bool = False
    publishes_whole: bool = False


def calibrate(trials: Sequence[Trial], costs: Costs | None = None) -> Costs:
    """Return costs measured in trials, over the given ones. Raises TrialStateError if no trial has steps."""
    found = [collect(trial) for trial in trials]
    usable = [one for one in found if len(one.rows) >= MIN_STEPS]
    if not usable:
        names = ", ".join(str(trial) for trial in trials)
        raise TrialStateError(
            f"{names}: fewer than {MIN_STEPS} steps are in the metrics, so nothing can be measured. "
            "Let the trial make more steps."
        )
    costs = costs or Costs()
    for measure in (_measure_lengths, _measure_servers, _measure_training, _measure_steps, _measure_starts):
        costs = measure(usable, costs)
    return costs


def collect(trial: Trial) -> Evidence:
    """Read the files of a trial. Raises TrialStateError for a trial without a plan."""
    if not (stored := load_object(trial.plan_json)):
        raise TrialStateError(
            f"{trial} has no {trial.plan_json.name} in {trial.dir}: run `hpc-rl submit` or "
            "`hpc-rl render` first."
        )
    plan, history = Plan.from_json(stored), load_history(trial)
    config = load_object(trial.config_json)
    trainer = next((unit for unit in plan.units if unit.role == "trainer"), None)
    groups, prompt_tokens, generated = _load_groups(trial)
    found = Evidence(
        name=str(trial),
        ranks=trainer.num_tasks if trainer else 1,
        rows=history.steps,
        evaluations=[row for row in history.evaluations if is_evaluation(row)],
        groups=groups,
        prompt_tokens=prompt_tokens,
        generated=generated,
        async_save=bool((config.get("recover") or {}).get("async_save")),
    )
    for entry in list_entries(trial.attempts):
        if AttemptId.parse(entry.name) is not None:
            _load_attempt(trial.attempt(entry.name), found)
    for folder in (trial.attempts, trial.server_attempts):  # the latter of layout jobs
        for path in folder.glob("*/use/server-*.json"):
            _add_use(load_object(path), found)
    return found


def _add_use(use: dict[str, Any], found: Evidence) -> None:
    if not all(is_number(use.get(name)) for name in ("busy_s", "request_s", "requests")):
        return
    found.busy_s += use["busy_s"]
    found.request_s += use["request_s"]
    found.requests += use["requests"]
    sums = use.get("decode")
    if isinstance(sums, list) and len(sums) == len(found.decode) and all(map(is_number, sums)):
        found.decode = [total + one for total, one in zip(found.decode, sums, strict=True)]


def _load_groups(trial: Trial) -> tuple[list[list[int]], float | None, float]:
    """Return the lengths of the newest groups, the mean tokens of a prompt, and all generated tokens."""
    places = [
        (place, record)
        for number in list_segments(trial.rollout)
        for place, record in load_segment(trial.rollout, number)
        if isinstance(record, GroupRecord)
    ]
    lengths, prompts = [], []
    fds: dict[int, int] = {}
    try:
        for place, _ in places[-MAX_GROUPS:]:
            if place.segment not in fds:
                fds[place.segment] = os.open(get_segment_path(trial.rollout, place.segment), os.O_RDONLY)
            group: TrajectoryGroup = decode(load_group(fds[place.segment], place))
            lengths.append([int(one.loss_mask.sum()) for one in group.trajectories])
            prompts += [len(one.ids) - int(one.loss_mask.sum()) for one in group.trajectories]
    finally:
        for fd in fds.values():
            os.close(fd)
    prompt_tokens = fmean(prompts) if prompts else None
    generated = sum(one.num_tokens - one.num_trajectories * (prompt_tokens or 0.0) for _, one in places)
    return lengths, prompt_tokens, generated


def _load_attempt(attempt: Attempt, found: Evidence) -> None:
    events = load_events(attempt)
    files = dict(list_metric_files(attempt))
    lines = [one for one in load_job_state(attempt.trial, attempt.job_id) if one.restart == attempt.restart]
    job_began = min((one.time for one in lines if one.event is JobEvent.STARTED), default=None)
    job_ended = max((one.time for one in lines if one.event is JobEvent.ENDED), default=None)
    starts = {
        one.incarnation: one.time for one in events if one.role == "trainer" and one.kind is EventKind.STARTED
    }
    last_row = max((row["time"] for rows in files.values() for row in rows), default=None)
    for incarnation, rows in files.items():
        begun = starts.get(incarnation)
        if begun is None or not rows:
            continue
        # the first line counts from when the trainer was made
        spent_s = sum(sum_seconds(rows[0], name) for name, _ in PARTS)
        seconds = rows[0]["time"] - spent_s - begun
        first = begun == min(starts.values())  # type: ignore[type-var]
        (found.first_start_s if first else found.restart_s).append(max(0.0, seconds))
        if first and job_began is not None:
            found.start_job_s.append(max(0.0, begun - job_began))
    if last_row is not None and job_ended is not None and attempt.trial.done.exists():
        found.end_s.append(max(0.0, job_ended - last_row))


def _measure_lengths(found: list[Evidence], costs: Costs) -> Costs:
    lengths = tuple(length for one in found for group in one.groups for length in group)
    if not lengths:
        return costs
    origin = f"{len(lengths)} completions in the batch log"
    known = [one.prompt_tokens for one in found if one.prompt_tokens is not None]
    return costs.replace_measured(origin, lengths=lengths, prompt_tokens=fmean(known))


def _measure_servers(found: list[Evidence], costs: Costs) -> Costs:
    """Measure the decode speed by the servers' sums, else by the mean durations of requests.

    A request has the samples of a prompt, and lasts as long as its longest one.
    """
    origin = f"{sum(one.requests for one in found)} requests to servers"
    line = fit_decode([sum(column) for column in zip(*(one.decode for one in found), strict=True)])
    if line is None:
        points = []
        for one in found:
            if one.requests and one.groups and one.busy_s:
                iterations = fmean(max(group) for group in one.groups)
                token_s = one.request_s / one.requests / iterations
                points.append((one.generated * token_s / one.busy_s, token_s))  # by Little's law
        if not points:
            return costs
        line = fit_line(points)
    if line is None:  # one level of load: divide it as the defaults would
        load, token_s = fmean(n for n, _ in points), fmean(s for _, s in points)
        factor = token_s / costs.compute_token_s(round(load))
        line = costs.decode_s * factor, costs.decode_sequence_s * factor
        origin += " at one level of load"
    # the prefill is part of the measured duration
    return costs.replace_measured(origin, decode_s=line[0], decode_sequence_s=line[1], prefill_token_s=0.0)


def fit_decode(sums: Sequence[float]) -> tuple[float, float] | None:
    """Return (seconds of an iteration, more for each sequence), both at least 0, by DecodeSpeed's sums.

    None if the number of sequences hardly varies.
    """
    xx, xy, yy, xs, ys = sums
    if not xx or not yy or xx * yy - xy * xy < 0.05**2 * xx * yy:
        return None
    each = (xx * ys - xy * xs) / (xx * yy - xy * xy)
    each = min(max(0.0, each), ys / yy)
    return (xs - each * xy) / xx, each


def _measure_training(found: list[Evidence], costs: Costs) -> Costs:
    points = [
        (row["num_tokens"] / one.ranks, sum_seconds(row, "train_s"))
        for one in found
        for row in one.rows[1:]
        if is_number(row.get("num_tokens")) and sum_seconds(row, "train_s")
    ]
    if not points:
        return costs
    origin, ranks = f"{len(points)} steps", found[0].ranks
    line = fit_line(points) or (0.0, fmean(s for _, s in points) / fmean(n for n, _ in points))
    values: dict[str, Any] = {"train_s": line[0], "train_token_s": line[1], "train_ranks": ranks}
    if len({one.ranks for one in found}) > 1:
        values["train_scaling"] = 1.0  # the fit has several numbers of ranks
    return costs.replace_measured(origin, **values)


def _measure_steps(found: list[Evidence], costs: Costs) -> Costs:
    rows = [row for one in found for row in one.rows[1:]]
    origin = f"{len(rows)} steps"
    waits = sorted(sum_seconds(row, "wait_s") for row in rows)
    rest = [
        sum_seconds(row, "step_s") - sum(sum_seconds(row, name) for name, _ in PARTS)
        for row in rows
        if is_number(row.get("step_s"))
    ]
    values: dict[str, Any] = {"log_s": max(0.0, median(rest)) if rest else costs.log_s}
    if waits[0] < costs.batch_s:  # else every step may have waited for generation
        values["batch_s"] = waits[0]
    writes = [row["publish_write_s"] for row in rows if is_number(row.get("publish_write_s"))]
    if writes:
        blocked = sorted(sum_seconds(row, "publish_s") for row in rows)
        pauses = [row["publish_pause_s"] for row in rows if is_number(row.get("publish_pause_s"))]
        values |= {
            "publish_blocked_s": blocked[len(blocked) // 10],  # others waited for the publication before
            "publish_write_s": median(writes),
            "publish_pause_s": median(pauses) if pauses else costs.publish_pause_s,
        }
    saves = [s for row in rows if (s := sum_seconds(row, "save_s")) > 1e-3]
    if saves:
        values["save_copy_s" if all(one.async_save for one in found) else "save_s"] = median(saves)
    evaluations = [row["eval_s"] for one in found for row in one.evaluations if is_number(row.get("eval_s"))]
    if evaluations:
        values["evaluate_s"] = median(evaluations)
    return costs.replace_measured(origin, **values)


def _measure_starts(found: list[Evidence], costs: Costs) -> Costs:
    first, again, job, end = (
        [seconds for one in found for seconds in getattr(one, name)]
        for name in ("first_start_s", "restart_s", "start_job_s", "end_s")
    )
    if first:
        # the servers start beside the trainer; which of them was last is not known
        values = {"start_trainer_s": median(again or first), "start_server_s": median(first)}
        values |= {"load_s": 0.0, "start_rollout_s": min(median(first), costs.start_rollout_s)}
        costs = costs.replace_measured(f"{len(first) + len(again)} starts of a trainer", **values)
    if job:
        costs = costs.replace_measured(
            f"{len(job)} starts of a job", start_job_s=median(job), start_step_s=0.0
        )
    return costs.replace_measured(f"{len(end)} ends of a trial", end_s=median(end)) if end else costs


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """Return (intercept, slope) by least squares, both at least 0; None if x hardly varies."""
    known = list(points)
    mean_x, mean_y = fmean(x for x, _ in known), fmean(y for _, y in known)
    spread = sum((x - mean_x) ** 2 for x, _ in known)
    if len(known) < 2 or spread < len(known) * (0.05 * mean_x) ** 2:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in known) / spread
    slope = min(max(0.0, slope), mean_y / mean_x if mean_x else 0.0)
    return mean_y - slope * mean_x, slope
