"""What a sweep found: the value of each trial, means and deviations over seeds, and the best."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from hpc_rl.core.records import TrialState
from hpc_rl.core.sweep import SEED, Sweep, SweepRecord
from hpc_rl.stats.read import History, is_held_out, is_lower_better
from hpc_rl.status.trial_status import TrialStatus

MEAN_STEPS = 10  # newest steps over which a metric of steps is a mean


@dataclass(frozen=True)
class TrialRow:
    """One trial of a sweep."""

    name: str
    dir: str
    options: dict[str, str]  # that vary in the sweep
    state: TrialState
    reason: str
    step: int
    value: float | None  # of the sweep's metric: the newest evaluation, or the mean of the newest steps
    job_id: str


@dataclass(frozen=True)
class GroupRow:
    """The trials of a sweep that differ in the seed alone."""

    options: dict[str, str]  # without the seed
    trials: tuple[str, ...]
    values: tuple[float, ...]  # of the trials that have one
    mean: float | None
    deviation: float | None  # of the sample; None for less than two values


@dataclass(frozen=True)
class SweepReport:
    """The results of a sweep, as of now.

    Args:
        name: `experiment/name`.
        metric: The one that compares trials.
        lower_is_better: Whether the smallest value is the best.
        trials: Of each trial `name`, `dir`, `options`, `state`, `reason`, `step`, `value` and `job_id`.
        groups: Trials that differ in the seed alone, the best mean first: `options`, `trials`, `values`,
            `mean`, and `deviation` of the sample (None for less than two values).
        is_cancelled: Whether the sweep was cancelled; its other trials are then not submitted.
    """

    name: str
    metric: str
    lower_is_better: bool
    trials: tuple[TrialRow, ...]
    groups: tuple[GroupRow, ...]
    is_cancelled: bool = False

    @property
    def num_over(self) -> int:
        """How many trials are over; of a cancelled sweep also those that were not submitted."""
        return sum(one.state.is_over and bool(one.job_id or self.is_cancelled) for one in self.trials)

    @property
    def best_group(self) -> GroupRow | None:
        """The group with the best mean; None before the first value."""
        return self.groups[0] if self.groups and self.groups[0].mean is not None else None

    @property
    def best_trial(self) -> TrialRow | None:
        """The trial with the best value; None before the first value."""
        sign = -1 if self.lower_is_better else 1
        known = [one for one in self.trials if one.value is not None]
        return max(known, key=lambda one: sign * (one.value or 0.0), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, with the names of the best."""
        best, group = self.best_trial, self.best_group
        return asdict(self) | {
            "best_trial": best.name if best else None,
            "best_options": group.options if group else None,
            "num_over": self.num_over,
        }


def make_sweep_report(sweep: Sweep, record: SweepRecord, statuses: Mapping[str, TrialStatus]) -> SweepReport:
    """Return the results of a sweep from the status of each trial by its name."""
    rows = []
    for one in record.trials:
        status = statuses[one.name]
        rows.append(
            TrialRow(
                name=one.name,
                dir=str(sweep.trial(one.name).dir),
                options=one.options,
                state=status.state,
                reason=status.reason,
                step=status.step,
                value=compute_value(status.history, record.metric),
                job_id=status.jobs[-1].job_id if status.jobs else "",
            )
        )
    measured = [one.history for one in statuses.values() if one.history.curve(record.metric)]
    lower = any(is_lower_better(record.metric, history) for history in measured)
    groups = _make_groups(rows, lower)
    return SweepReport(str(sweep), record.metric, lower, tuple(rows), groups, bool(sweep.load_cancel()))


def compute_value(history: History, metric: str) -> float | None:
    """Return the newest value of an evaluation, or the mean of the newest steps; None without one."""
    curve = history.curve(metric)
    if not curve:
        return None
    return curve[-1][1] if is_held_out(metric) else fmean(value for _, value in curve[-MEAN_STEPS:])


def _make_groups(rows: list[TrialRow], lower_is_better: bool) -> tuple[GroupRow, ...]:
    members: dict[tuple[tuple[str, str], ...], list[TrialRow]] = {}
    for row in rows:
        key = tuple((name, value) for name, value in row.options.items() if name != SEED)
        members.setdefault(key, []).append(row)
    groups = []
    for key, of in members.items():
        values = tuple(one.value for one in of if one.value is not None)
        mean = fmean(values) if values else None
        deviation = stdev(values) if len(values) > 1 else None
        groups.append(GroupRow(dict(key), tuple(one.name for one in of), values, mean, deviation))
    sign = 1 if lower_is_better else -1
    groups.sort(key=lambda one: (one.mean is None, sign * (one.mean or 0.0)))
    return tuple(groups)
