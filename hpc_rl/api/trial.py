"""A trial from Python: its state, its results, and the work of the commands."""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_rl.api.configuration import Configuration, PathLike, format_options, make_configuration
from hpc_rl.api.display import make_curve, make_table
from hpc_rl.api.tables import Records, make_records
from hpc_rl.checkpoint import generation
from hpc_rl.core import trial as paths
from hpc_rl.core.errors import HpcRlError, TrialFailed
from hpc_rl.core.files import load_last_lines
from hpc_rl.core.records import TrialState
from hpc_rl.core.trial import load_object
from hpc_rl.stats.kept_samples import load_samples, select_step
from hpc_rl.stats.read import HELD_OUT, load_history
from hpc_rl.status.log_files import choose, collect
from hpc_rl.status.scheduler_view import TrialWatch, load_current_status
from hpc_rl.status.state_reason import describe_state
from hpc_rl.status.trial_report import TrialReport, list_facts, make_report
from hpc_rl.status.trial_status import load_status
from hpc_rl.trials import cancellation, listing, prepare, submission, trial_index

POLL_S = 0.5  # between two looks at the files of a trial
NUM_LINES = 40  # of a log


@dataclass(frozen=True)
class Result:
    """The outcome of a trial that is done.

    Args:
        step: The last one.
        metrics: Of the last step.
        held_out: The newest main measure on held-out data; None without such data.
        measure: Its name, such as `reward`; empty without held-out data.
        model: The final export, in Hugging Face format.
    """

    step: int
    metrics: dict[str, Any]
    held_out: float | None
    measure: str
    model: Path | None


class Report:
    """What `hpc-rl report` says of a trial."""

    def __init__(self, report: TrialReport) -> None:
        self._report = report

    @property
    def facts(self) -> dict[str, str]:
        """State, results and use of time, as texts by the name of the fact."""
        return list_facts(self._report)

    @property
    def goodput(self) -> float | None:
        """The share of the allocation that went into generation or training; None if it is not known."""
        return self._report.goodput.share

    def html(self) -> str:
        """Return the page of `hpc-rl report TRIAL --html FILE`.

        Raises ConfigError if plotly is not installed.
        """
        from hpc_rl.status.report_page import make_page  # importing plotly takes time

        return make_page([self._report], time.time())

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.facts.items())

    def _repr_html_(self) -> str:
        return make_table((), list(self.facts.items()))


class Trial:
    """A trial that was submitted, by its name, `experiment/name`, or directory.

    Reads files, and asks the scheduler rarely, as `hpc-rl status` does. Raises TrialNameError if there is no
    such trial, or if several have the name.
    """

    def __init__(self, name: PathLike) -> None:
        self._trial = trial_index.resolve(os.fspath(name))

    @property
    def name(self) -> str:
        """The name of the trial, without the experiment."""
        return self._trial.name

    @property
    def experiment(self) -> str:
        """The name of its experiment."""
        return self._trial.experiment

    @property
    def dir(self) -> Path:
        """Its directory."""
        return self._trial.dir

    @property
    def options(self) -> dict[str, Any]:
        """Every option of its configuration as nested plain data, without secrets."""
        return load_object(self._trial.config_json)

    @property
    def job_id(self) -> str:
        """The id of its newest job; empty if none was submitted."""
        jobs = load_status(self._trial).jobs
        return jobs[-1].job_id if jobs else ""

    @property
    def state(self) -> TrialState:
        """Its state now, after at most one query of the scheduler."""
        return load_current_status(self._trial).state

    @property
    def step(self) -> int:
        """The last trained step."""
        return load_status(self._trial).step

    def status(self) -> dict[str, Any]:
        """Return what `hpc-rl status --json` prints, with the state of every attempt and role."""
        return load_current_status(self._trial).to_json()

    def done(self) -> bool:
        """Return whether the trial is over: done, failed, cancelled or stopped."""
        return load_current_status(self._trial).over

    def wait(self, timeout_s: float | None = None) -> TrialState:
        """Wait until the trial is over, and return its state. Raises TimeoutError after `timeout_s`."""
        watch = TrialWatch(self._trial)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (status := watch.poll()).over:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"trial {self._trial} is still {status.state} after {timeout_s:g} s")
            time.sleep(POLL_S)
        return status.state

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait until the trial is over, and return its results.

        Raises TrialFailed if it did not reach its last step, with the reason and the end of a log;
        TimeoutError after `timeout_s`.
        """
        self.wait(timeout_s)
        status = load_current_status(self._trial)
        if status.state is not TrialState.DONE:
            raise TrialFailed(f"{self._trial}: {describe_state(status.state, status.reason)}\n{self.logs()}")
        measure, values = status.history.held_out
        model = self._trial.exports / "final"
        return Result(
            step=status.step,
            metrics=dict(status.history.steps[-1]) if status.history.steps else {},
            held_out=values[-1][1] if values else None,
            measure=measure if values else "",
            model=model if model.is_dir() else None,
        )

    def cancel(self, now: bool = False, wait_s: float = 0.0) -> None:
        """Stop the trial for good; it saves its state first. Repeating it is harmless.

        Args:
            now: Have the scheduler terminate it, with a short grace period to save.
            wait_s: How long to wait until it is over.

        Raises CannotWrite, SchedulerError, TimeoutError.
        """
        cancellation.cancel(self._trial, now)
        if wait_s:
            self.wait(wait_s)

    def recover(self, from_step: int | None = None, replay: bool = False, **options: Any) -> "Trial":
        """Submit the trial again, from a checkpoint; options may change. Returns this trial.

        Args:
            from_step: The step of the checkpoint; None for the newest one.
            replay: Train on the batches after it as they are, although another policy made them.
            options: As for `load`.

        Raises TrialBusy, NothingToResume, ConfigError, SchedulerError.
        """
        loaded = prepare.load_stored(self._trial, format_options(options))
        recovery = prepare.make_recovery(self._trial, from_step, replay)
        planned = prepare.plan_recovery(self._trial, loaded, skip_cluster=False)
        submission.submit(
            planned.loaded,
            planned.plan,
            command=["hpc_rl.Trial.recover", *format_options(options)],
            trial=self._trial,
            recovery=recovery,
            avoid=planned.avoid,
        )
        return self

    def fork(self, name: str, from_step: int | None = None, **options: Any) -> "Trial":
        """Submit a new trial that begins with a checkpoint of this one, and return it.

        Args:
            name: Of the new trial, or experiment/name.
            from_step: The step of the checkpoint; None for the newest one.
            options: That differ, as for `load`.

        Raises TrialBusy if there is such a trial, NothingToResume, ConfigError, SchedulerError.
        """
        from hpc_rl.trials.fork_submission import make_fork  # imports NumPy

        command = ["hpc_rl.Trial.fork", name, *format_options(options)]
        made = make_fork(
            str(self._trial.dir),
            name,
            from_step=from_step,
            overrides=format_options(options),
            command=command,
        )
        submission.submit(
            made.planned.loaded,
            made.planned.plan,
            command=command,
            trial=made.trial,
            recovery=made.recovery,
            avoid=made.planned.avoid,
        )
        return Trial(made.trial.dir)

    def logs(
        self,
        role: str | None = None,
        *,
        index: int | None = None,
        attempt: str | None = None,
        lines: int = NUM_LINES,
    ) -> str:
        """Return the ends of logs: by default of the newest trainer and its supervisor.

        Args:
            role: `trainer`, `rollout`, `server`, `supervisor`, `job` and so on, as for `hpc-rl logs`.
            index: Of a replica.
            attempt: As `hpc-rl status` names it; None for the newest one.
            lines: From the end of each log.

        Raises TrialStateError if no log matches.
        """
        given = {"role": role, "index": index, "attempt": attempt}
        wanted = {name: value for name, value in given.items() if value is not None}
        found = collect(load_status(self._trial))
        if not found and not wanted:
            return ""
        texts = []
        for log in choose(self._trial, found, wanted):
            texts += [f"==> {log.format_title(self._trial)} <==", *load_last_lines(log.path, lines)]
        return "\n".join(texts)

    def report(self) -> Report:
        """Return results, use of time, and the ends of its attempts."""
        return Report(make_report(self.name, load_current_status(self._trial), time.time()))

    def metrics(self) -> Records:
        """Return one record per step, by step, with the evaluation of that step joined as `eval_…`.

        Each step appears once, as it led to the final weights. A first evaluation makes a record of step 0.
        """
        return make_records(load_history(self._trial).join())

    def samples(self, step: int | None = None, *, evaluation: bool = False) -> Records:
        """Return kept completions, one record each: prompt, completion, reward, its parts and more.

        Args:
            step: After which they were made; None for all steps.
            evaluation: Those of evaluations, not of steps.
        """
        kept = [one for one in load_samples(self._trial) if one.evaluation == evaluation]
        return make_records(asdict(one) for one in select_step(kept, step, every=step is None))

    def checkpoints(self) -> Records:
        """Return its checkpoints, the newest first: step, path, bytes, time, metrics, problem and more."""
        from hpc_rl.trials.checkpoints import make_row  # imports NumPy

        return make_records(map(make_row, generation.scan(self._trial)))

    def save(self, timeout_s: float = 600.0) -> Path:
        """Have a running trial save a checkpoint after its current step, and return the folder.

        Raises TrialStateError if it does not run, TimeoutError after `timeout_s`.
        """
        from hpc_rl.trials.checkpoints import request_checkpoint  # imports NumPy

        found = request_checkpoint(self._trial, timeout_s)
        if found is None:
            raise TimeoutError(f"trial {self._trial} saved no checkpoint within {timeout_s:g} s")
        return found.path

    def export(
        self,
        to: PathLike | None = None,
        *,
        step: int | None = None,
        best: str | None = None,
        merge: bool = False,
        push: str | None = None,
        private: bool = False,
    ) -> Path:
        """Write the weights of a checkpoint in Hugging Face format, and return the folder. Needs torch.

        The folder has a model card, README.md.

        Args:
            to: A new folder; None for one in the trial's directory.
            step: Of the checkpoint, or of published weights; None for the newest checkpoint.
            best: A metric, such as `eval_reward`: take the checkpoint with its largest value.
            merge: Write a whole model with the trained adapter merged into it.
            push: Upload the folder to this repository of Hugging Face's hub, `OWNER/NAME`; needs a token.
            private: Make a new repository private.

        Raises NothingToResume if there is no such checkpoint, ConfigError, CannotWrite, HpcRlError.
        """
        from hpc_rl.trials.exporting import plan_export, write_and_upload  # imports NumPy

        export = plan_export(
            self._trial,
            None if to is None else Path(to),
            step=step,
            best=best,
            merge=merge,
            push=push,
            private=private,
        )
        code, _ = write_and_upload(export)
        if code != 0:
            raise HpcRlError(f"{export.title} can't be exported (exit code {code})")
        return export.folder

    def __repr__(self) -> str:
        return f"Trial({str(self._trial.dir)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trial) and os.path.realpath(self.dir) == os.path.realpath(other.dir)

    def __hash__(self) -> int:
        return hash(os.path.realpath(self.dir))

    def _repr_html_(self) -> str:
        status = load_current_status(self._trial)
        total = f" of {status.total_steps}" if status.total_steps else ""
        rows: list[tuple[str, Any]] = [
            ("trial", status.trial),
            ("state", describe_state(status.state, status.reason)),
            ("step", f"{status.step}{total}"),
        ]
        rows += [("held-out", values[-1][1])] if (values := status.history.curve(HELD_OUT)) else []
        return make_table((), rows) + make_curve(status.history.curve("reward"))


class Trials(list[Trial]):
    """Trials, the newest submission first, with the columns of a list."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__(Trial(row["dir"]) for row in rows if row["state"] != listing.GONE)
        self._rows = rows

    def records(self) -> Records:
        """Return a record per trial: trial, state, reason, step, reward, held_out, job_id, dir and more."""
        return make_records(self._rows)

    def _repr_html_(self) -> str:
        names = ("trial", "state", "step", "reward", "held_out", "job_id")
        return make_table(names, [[row[name] for name in names] for row in self._rows])


def list_trials(*names: str, experiment: str | None = None, state: str | None = None) -> Trials:
    """Return your trials, the newest submission first, after at most one query of the scheduler.

    Args:
        names: Trial names, or experiment/name; * and ? match. None means all.
        experiment: Only trials of an experiment; * and ? match.
        state: Only trials in a state, or in several: `running`, or `done,failed`.

    Raises ConfigError for an unknown state.
    """
    wanted = [one for one in listing.parse_states(state) if state or one != listing.GONE]
    return Trials(listing.list_rows(names, experiment, wanted))


def submit(config: Configuration | PathLike, *, check_cluster: bool = True, **options: Any) -> Trial:
    """Check a configuration, submit it as a job, and return the trial at once.

    Args:
        config: A loaded configuration, or a YAML file.
        check_cluster: Compare the request with the nodes of the cluster, by one query.
        options: As for `load`.

    Raises ConfigError with all refusals, TrialBusy, CannotWrite, SchedulerError.
    """
    sources = make_configuration(config, options)
    planned = prepare.plan_submission(sources.loaded, skip_cluster=not check_cluster)
    trial: paths.Trial = submission.make_trial(planned.loaded.config)
    submission.submit(
        planned.loaded,
        planned.plan,
        command=["hpc_rl.submit", *sources.sources.files, *sources.sources.overrides],
        trial=trial,
        avoid=planned.avoid,
        is_checked=True,
    )
    return Trial(trial.dir)
