"""Sweeps from Python: submit trials that differ in some options, wait, and compare."""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_rl.api.configuration import Configuration, PathLike, format_value, make_configuration
from hpc_rl.api.display import make_table
from hpc_rl.api.tables import Records, make_records
from hpc_rl.api.trial import Trial
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.sweep import SweepTrial
from hpc_rl.status.state_reason import describe_state
from hpc_rl.status.sweep_report import SweepReport, make_sweep_report
from hpc_rl.trials import sweep_points
from hpc_rl.trials.sweeps import (
    SweepPlan,
    advance_sweep,
    cancel_sweep,
    find_sweep,
    load_statuses,
    plan_sweep,
)

POLL_S = 1.0  # between two looks at the trials of a sweep
Points = Mapping[str, Iterable[Any]] | Sequence[Mapping[str, Any]]


class Sweep:
    """A sweep that was begun, by its name, `experiment/name`, or directory. Raises TrialNameError."""

    def __init__(self, name: PathLike) -> None:
        self._sweep, self._record = find_sweep(os.fspath(name))
        self._plan: SweepPlan | None = None  # of `sweep`: what it may still submit

    @property
    def name(self) -> str:
        """Its name."""
        return self._sweep.name

    @property
    def dir(self) -> Path:
        """Its directory, next to the directories of its trials."""
        return self._sweep.dir

    @property
    def metric(self) -> str:
        """The metric that compares its trials; `held-out` is the main measure on held-out data."""
        return self._record.metric

    @property
    def trials(self) -> list[Trial]:
        """Its trials that were submitted."""
        made = [self._sweep.trial(one.name) for one in self._record.trials]
        return [Trial(trial.dir) for trial in made if trial.jobs.is_dir()]

    def advance(self) -> int:
        """Submit the trials that may run now, and return how many still wait.

        Only for a sweep without a scheduler that `sweep` made in this process; else none wait.
        """
        if self._plan is None:
            return 0
        return advance_sweep(self._plan, self._record.command).num_waiting

    def done(self) -> bool:
        """Return whether all its trials are over."""
        return self.report().num_over == len(self._record.trials)

    def wait(self, timeout_s: float | None = None) -> SweepReport:
        """Wait until all its trials are over, and return the results; submits the next ones meanwhile.

        Raises TimeoutError after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            waiting = self.advance()
            report = self.report()
            if not waiting and report.num_over == len(self._record.trials):
                return report
            if deadline is not None and time.monotonic() >= deadline:
                num_left = len(self._record.trials) - report.num_over
                raise TimeoutError(
                    f"{num_left} trials of sweep {self._sweep} are not over after {timeout_s:g} s"
                )
            time.sleep(POLL_S)

    def report(self) -> SweepReport:
        """Return the results so far: each trial's value, means and deviations over seeds, and the best."""
        statuses = load_statuses(self._sweep, self._record)
        return make_sweep_report(self._sweep, self._record, statuses)

    def records(self) -> Records:
        """Return one record per trial: name, its options, state, step, value."""
        rows = self.report().trials
        return make_records(
            {"trial": one.name, **one.options, "state": str(one.state), "step": one.step, "value": one.value}
            for one in rows
        )

    def metrics(self) -> Records:
        """Return the records of `Trial.metrics` of all trials, each with the trial and its options."""
        options = {one.name: one.options for one in self._record.trials}
        return make_records(
            {"trial": trial.name, **options[trial.name], **row}
            for trial in self.trials
            for row in trial.metrics()
        )

    def cancel(self) -> None:
        """Cancel all its trials; running trials save their state, and no further one is submitted.

        Raises CannotWrite, SchedulerError.
        """
        cancel_sweep(self._sweep, self._record)

    def __repr__(self) -> str:
        return f"Sweep({str(self._sweep.dir)!r})"

    def _repr_html_(self) -> str:
        report = self.report()
        groups = [
            (" ".join(f"{name}={value}" for name, value in one.options.items()), len(one.values), one.mean,
             one.deviation)
            for one in report.groups
        ]  # fmt: skip
        trials = [
            (one.name, one.step, one.value, describe_state(one.state, one.reason)) for one in report.trials
        ]
        return make_table(("options", "trials", "mean", "deviation"), groups) + make_table(
            ("trial", "step", report.metric, "state"), trials
        )


def sweep(
    config: Configuration | PathLike,
    points: Points,
    *,
    name: str | None = None,
    metric: str | None = None,
    max_running: int | None = None,
    stop_early: int | None = None,
    **options: Any,
) -> Sweep:
    """Submit a trial for each point, and return the sweep. Repeating the call continues it.

    On Slurm all trials are submitted at once, as one job array if their requests are equal. On this machine
    `max_running` of them start; `Sweep.wait` starts the others as these end.

    Args:
        config: A loaded configuration, or a YAML file.
        points: `{"actor.optimizer.lr": [1e-6, 3e-6], "seed": range(1, 5)}` means all combinations; a list of
            dicts names the options of each trial.
        name: Of the sweep; None for the `trial_name`.
        metric: The one that compares trials; None for the held-out measure, else reward or loss.
        max_running: How many trials may run at once; None for no limit on Slurm, and 1 on this machine.
        stop_early: From this step on, trials stop if their best value is below the median of the others.
        options: Of all trials, as for `load`.

    Raises ConfigError, TrialBusy if there is a sweep of that name with other trials, SchedulerError.
    """
    shared = make_configuration(config, options)
    made = _make_points(points)
    chosen = name or shared.config.trial_name
    trials: list[SweepTrial] = sweep_points.name_trials(chosen, made)
    plan = plan_sweep(
        shared.sources,
        trials,
        chosen,
        metric=metric or "",
        max_running=max_running,
        stop_from=stop_early,
        command=["hpc_rl.sweep", *shared.sources.files, *shared.sources.overrides],
    )
    advance_sweep(plan, plan.record.command)
    found = Sweep(plan.sweep.dir)
    found._plan = plan
    return found


def _make_points(points: Points) -> list[sweep_points.Point]:
    """Return the options of each trial as texts. Raises ConfigError."""
    if isinstance(points, Mapping):
        for key, values in points.items():
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise ConfigError(f"{key} needs a list of values in a sweep, got {values!r}.")
        return sweep_points.make_grid(
            {key: [_format(key, value) for value in values] for key, values in points.items()}
        )
    return [{key: _format(key, value) for key, value in point.items()} for point in points]


def _format(name: str, value: Any) -> str:
    """Return a value as the command line has it: text without unnecessary quotes."""
    text = format_value(name, value)
    return value if isinstance(value, str) and json.dumps(value) == f'"{value}"' and value else text
