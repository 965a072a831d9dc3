"""The median rule: a trial of a sweep stops when its best value is worse than most others were on average.

The rule of Vizier (Golovin et al., 2017): a trial stops at step s if its best value up to s is worse than the
median of the other trials' running means up to s. It is a callback of the trainer, so that no process outside
the job is needed; it reads the metrics of the other trials.
"""

from collections.abc import Sequence
from statistics import fmean, median

from hpc_rl.core.callbacks import Callback, Event
from hpc_rl.core.sweep import Sweep, SweepRecord, find_sweep_of
from hpc_rl.core.trial import Trial
from hpc_rl.stats.read import Curve, MetricsReader, is_held_out, is_lower_better

MIN_OTHERS = 3  # trials that reached the step
PATH = "hpc_rl.stats.median_rule:MedianRule"


def compute_bar(others: Sequence[Curve], step: int) -> float | None:
    """Return the median of the running means up to a step; None if too few trials have reached it."""
    reached = [curve for curve in others if curve and curve[-1][0] >= step]
    means = [fmean(known) for curve in reached if (known := [value for at, value in curve if at <= step])]
    return median(means) if len(means) >= MIN_OTHERS else None


def find_best(curve: Curve, step: int, lower_is_better: bool) -> float | None:
    """Return the best value up to a step; None without one."""
    known = [value for at, value in curve if at <= step]
    if not known:
        return None
    return min(known) if lower_is_better else max(known)


class MedianRule(Callback):
    """The callback of `hpc-rl sweep --stop_early`; without effect in a trial of no sweep."""

    def __init__(self) -> None:
        self._readers: dict[str, MetricsReader] = {}
        self._found: tuple[Sweep, SweepRecord] | None = None

    def on_step(self, event: Event) -> None:
        """Judge by a metric of steps."""
        self._judge(event, of_evaluation=False)

    def on_evaluation(self, event: Event) -> None:
        """Judge by a metric of evaluations."""
        self._judge(event, of_evaluation=True)

    def _judge(self, event: Event, of_evaluation: bool) -> None:
        trial = Trial(event.trial_dir)
        self._found = self._found or find_sweep_of(trial)
        if event.is_check or self._found is None:
            return
        sweep, record = self._found
        is_due = record.stop_from is not None and event.step >= record.stop_from
        if not is_due or is_held_out(record.metric) is not of_evaluation:
            return
        curves = {one.name: self._load_curve(sweep.trial(one.name), record.metric) for one in record.trials}
        lower = is_lower_better(record.metric, self._readers[trial.name].poll())
        best = find_best(curves.pop(trial.name), event.step, lower)
        bar = compute_bar([*curves.values()], event.step)
        if best is None or bar is None or (best <= bar if lower else best >= bar):
            return
        worse = "above" if lower else "below"
        event.stop(
            f"its best {record.metric} up to step {event.step} is {best:.4g}, {worse} {bar:.4g}, the median "
            f"of the other trials of sweep {record.name}"
        )

    def _load_curve(self, trial: Trial, metric: str) -> Curve:
        return self._readers.setdefault(trial.name, MetricsReader(trial)).poll().curve(metric)
