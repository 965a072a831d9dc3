"""Make a sweep and submit its trials, without a process that stays behind.

On Slurm the trials are one job array if their requests are equal, else jobs of which each waits for an
earlier one, so that a bounded number runs. Without a scheduler the caller submits the next trial when one
ends. The directory of the sweep records the submitted trials: a repeated call continues.
"""

import os
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.core.errors import CannotWrite, ConfigError, TrialBusy, TrialNameError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.sweep import Sweep, SweepRecord, SweepTrial, list_sweeps
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.schedulers import pick
from hpc_rl.schedulers.base import SchedulerAnswer
from hpc_rl.schedulers.slurm import SlurmScheduler, reuse_nodes
from hpc_rl.stats import median_rule
from hpc_rl.stats.read import HELD_OUT
from hpc_rl.status.scheduler_view import query_all
from hpc_rl.status.submitted_jobs import load_jobs
from hpc_rl.status.trial_status import TrialStatus, load_status
from hpc_rl.trials import prepare, submission, trial_index
from hpc_rl.trials.array_submission import ArrayMember, adopt_arrays, has_equal_requests, submit_array
from hpc_rl.trials.cancellation import CancelledJob, cancel_all
from hpc_rl.trials.checklist import ALL, Planned, Stage, judge
from hpc_rl.trials.dependency import join_dependencies
from hpc_rl.trials.prepare import ConfigSources


@dataclass(frozen=True)
class SweepPlan:
    """A sweep with the configuration of each trial, ready for submissions."""

    sweep: Sweep
    record: SweepRecord
    sources: Mapping[str, ConfigSources]  # by trial_name
    scheduler: str  # slurm or local
    max_running: int | None  # trials that may run at once; None for no limit
    lifts: str = ""  # token of an earlier cancel of the sweep, which this plan takes back

    @property
    def trials(self) -> dict[str, Trial]:
        return {one.name: self.sweep.trial(one.name) for one in self.record.trials}


@dataclass(frozen=True)
class Advance:
    """The result of a round of submissions."""

    submitted: tuple[str, ...]  # trial_name, in order
    array: str  # job id of the array; empty for single jobs
    num_waiting: int  # trials that the next round may submit
    num_live: int
    notes: tuple[str, ...] = ()  # on the configurations of the submitted trials
    num_dropped: int = 0  # trials that are not submitted, because the sweep was cancelled meanwhile


def plan_sweep(
    sources: ConfigSources,
    trials: Sequence[SweepTrial],
    name: str,
    *,
    metric: str = "",
    max_running: int | None = None,
    stop_from: int | None = None,
    command: Sequence[str] = (),
) -> SweepPlan:
    """Return a sweep, new or as it was begun. Writes nothing.

    Args:
        sources: The configuration that the trials share.
        trials: Their names, and the options in which they differ.
        name: The sweep's, unique in the experiment.
        metric: The one that compares trials; "" for the held-out measure, else reward or loss.
        max_running: How many trials may run at once; on this machine 1 if it is None.
        stop_from: The step from which the median rule stops bad trials; None for never.
        command: For the records.

    Raises ConfigError; TrialBusy if a sweep of that name has other trials.
    """
    if max_running is not None and max_running < 1:
        raise ConfigError(f"max_running must be at least 1, got {max_running}")
    if stop_from is not None and stop_from < 0:
        raise ConfigError(f"stop_early must be a step, 0 or more, got {stop_from}")
    each = {one.name: _make_sources(sources, one) for one in trials}
    first = prepare.load_config(each[trials[0].name])
    config = first.config
    if stop_from is not None:
        for_all = [f"callbacks={_list_callbacks(config)}"]
        each = {name: replace(one, overrides=[*one.overrides, *for_all]) for name, one in each.items()}
    made = submission.make_trial(config)
    sweep = Sweep(made.dir.parent / f"{name}.sweep")
    record = SweepRecord(
        name=name,
        trials=tuple(trials),
        metric=metric or _choose_metric(config),
        stop_from=stop_from,
        command=tuple(command),
        time=time.time(),
    )
    known = sweep.load()
    if known is not None and known.trials != record.trials:
        raise TrialBusy(
            f"sweep {sweep} exists with {len(known.trials)} other trials: give this one another --name, or "
            "repeat the command of the existing one to continue it."
        )
    scheduler = pick(config.launcher.type)
    if scheduler == "local" and max_running is None:
        max_running = 1
    return SweepPlan(sweep, record, each, scheduler, max_running, sweep.load_cancel())


def begin_sweep(plan: SweepPlan) -> None:
    """Write the record of a sweep. Raises CannotWrite."""
    try:
        os.makedirs(plan.sweep.dir, mode=0o700, exist_ok=True)
        write_json(plan.sweep.record_path, plan.record.to_json())
        if plan.lifts and plan.sweep.load_cancel() == plan.lifts:
            plan.sweep.cancel_path.unlink(missing_ok=True)
    except OSError as error:
        path = plan.sweep.record_path
        raise CannotWrite(f"{path} can't be written: {error.strerror or error}") from error


def advance_sweep(plan: SweepPlan, command: Sequence[str]) -> Advance:
    """Submit the trials that were not submitted yet and may be now; begin the sweep if it is new.

    On Slurm these are all. Queries the scheduler a few times, however many trials there are. A sweep that was
    cancelled after the plan gets no further trials. Raises ConfigError, TrialBusy, CannotWrite,
    SchedulerError.
    """
    waiting = [name for name, trial in plan.trials.items() if not load_jobs(trial)]
    if waiting and plan.sweep.record_path.exists() and plan.scheduler == "slurm":
        adopt_arrays(plan.sweep, SlurmScheduler(), command)
        waiting = [name for name in waiting if not load_jobs(plan.sweep.trial(name))]
    is_cancelled = plan.sweep.load_cancel() not in ("", plan.lifts)
    if not waiting or is_cancelled:
        live = 0 if plan.scheduler == "slurm" else len(list_live(plan))
        return Advance((), "", 0, live, num_dropped=len(waiting))
    if plan.scheduler == "slurm":
        return _submit_to_slurm(plan, waiting, command)
    live = len(list_live(plan))
    room = max(0, (plan.max_running or 1) - live)
    if not plan.sweep.record_path.exists():
        for planned in _plan_trials(plan, waiting):  # before the first one: refuse early
            submission.check_programs(planned.plan, planned.loaded)
    begin_sweep(plan)
    chosen = waiting[:room]
    checked = _plan_trials(plan, chosen)
    for name, planned in zip(chosen, checked, strict=True):
        submission.submit(planned.loaded, planned.plan, command=command, trial=plan.sweep.trial(name))
    num_waiting = len(waiting) - len(chosen)
    return Advance(tuple(chosen), "", num_waiting, live + len(chosen), _collect_notes(chosen, checked))


def cancel_sweep(sweep: Sweep, record: SweepRecord) -> dict[str, list[CancelledJob]]:
    """Cancel all trials of a sweep, and return the outcomes of their jobs by the name of the trial.

    A command that still submits trials of it submits no more. Raises CannotWrite, SchedulerError.
    """
    try:
        write_json(sweep.cancel_path, {"token": secrets.token_hex(8), "time": time.time()})
    except OSError as error:
        why = f"{sweep.cancel_path} can't be written: {error.strerror or error}. Nothing was cancelled."
        raise CannotWrite(why) from error
    made = {one.name: sweep.trial(one.name) for one in record.trials}
    done = cancel_all([trial for trial in made.values() if trial.dir.is_dir()])
    return {name: done[trial.dir] for name, trial in made.items() if trial.dir in done}


def list_live(plan: SweepPlan) -> list[TrialStatus]:
    """Return the trials that run or wait, by at most one query."""
    return [status for status in load_statuses(plan.sweep, plan.record).values() if _is_live(status)]


def load_statuses(sweep: Sweep, record: SweepRecord) -> dict[str, TrialStatus]:
    """Return the status of every trial of a sweep by its name, by at most one query of the scheduler."""
    trials = {one.name: sweep.trial(one.name) for one in record.trials}
    answers = query_all(trials.values())
    known = {name: answers.get(trial.dir, SchedulerAnswer()) for name, trial in trials.items()}
    return {
        name: load_status(trial, known[name].newest, known[name].asked_at or None)
        for name, trial in trials.items()
    }


def find_sweep(text: str) -> tuple[Sweep, SweepRecord]:
    """Return the sweep with a path, `experiment/name`, or a name that only one sweep has.

    Sweeps are found beside the trials of the index. Raises TrialNameError.
    """
    path = Path(os.path.expanduser(text))
    found = [Sweep(path.absolute())] if (path / "sweep.json").is_file() else []
    if not found:
        folders = {entry.trial.dir.parent: None for entry in trial_index.list_entries() if not entry.gone}
        every = [sweep for folder in folders for sweep in list_sweeps(folder)]
        found = [sweep for sweep in every if text in (sweep.name, str(sweep))]
        known = ", ".join(sorted(map(str, every))) or "none"
        if not found:
            raise TrialNameError(f"there is no sweep {text!r}. Sweeps of yours: {known}.")
    if len(found) > 1:
        names = "\n".join(f"  {sweep}  {sweep.dir}" for sweep in found)
        raise TrialNameError(f"{len(found)} sweeps match {text!r}; use experiment/name or a path:\n{names}")
    record = found[0].load()
    if record is None:
        path = found[0].record_path
        raise TrialNameError(f"{path} is missing or damaged: repeat the command of the sweep.")
    return found[0], record


def _is_live(status: TrialStatus) -> bool:
    return not status.over and bool(status.jobs)


def _make_sources(sources: ConfigSources, trial: SweepTrial) -> ConfigSources:
    own = [f"{name}={value}" for name, value in trial.options.items()]
    return replace(sources, overrides=[*sources.overrides, *own, f"trial_name={trial.name}"])


def _list_callbacks(config: Config) -> str:
    paths = [path for path in config.callbacks if path != median_rule.PATH]
    return f"[{','.join([*paths, median_rule.PATH])}]"


def _choose_metric(config: Config) -> str:
    if config.valid_dataset is not None:
        return HELD_OUT
    return "reward" if isinstance(config, GRPOConfig) else "loss"


def _plan_trials(plan: SweepPlan, names: Sequence[str]) -> list[Planned]:
    """Check and plan trials; an interpreter and the nodes are asked once for all of them.

    Raises ConfigError with the name of the trial.
    """
    planned = []
    with reuse_nodes():
        for number, name in enumerate(names):
            loaded = prepare.load_config(plan.sources[name])
            verdict = judge(loaded, ALL - {Stage.ACCEPTANCE})
            if verdict.refusals and number:
                why = f"trial {name} of the sweep can't be submitted"
                raise ConfigError(Refusal(option="", kind=Kind.CONFLICT, why=why), *verdict.error().args)
            planned.append(verdict.require())
    return planned


def _submit_to_slurm(plan: SweepPlan, names: Sequence[str], command: Sequence[str]) -> Advance:
    planned = _plan_trials(plan, names)
    notes = _collect_notes(names, planned)
    pairs = zip(names, planned, strict=True)
    members = [ArrayMember(plan.sweep.trial(name), one) for name, one in pairs]
    begin_sweep(plan)
    if has_equal_requests(members):
        made = submit_array(plan.sweep, members, plan.max_running, command, SlurmScheduler())
        array = load_jobs(made[0].trial)[-1].native_id.partition("_")[0]
        return Advance(tuple(names), array, 0, len(names), notes)
    lanes: deque[str] = deque()
    if plan.max_running is not None:
        lanes += [status.jobs[-1].native_id for status in list_live(plan)]
    for member in members:
        options: tuple[str, ...] = ()
        slurm = member.planned.loaded.config.launcher.slurm
        if plan.max_running is not None and len(lanes) >= plan.max_running:
            options = join_dependencies(f"afterany:{lanes.popleft()}", slurm.dependency)
        done = submission.submit(
            member.planned.loaded,
            member.planned.plan,
            command=command,
            trial=member.trial,
            avoid=member.planned.avoid,
            options=options,
            is_checked=True,
        )
        lanes.append(done.job_id)
    return Advance(tuple(names), "", 0, len(names), notes)


def _collect_notes(names: Sequence[str], planned: Sequence[Planned]) -> tuple[str, ...]:
    """Return each note once; a note that only some trials have begins with their names."""
    of: dict[str, list[str]] = {}
    for name, one in zip(names, planned, strict=True):
        for note in dict.fromkeys(map(str, one.notes)):
            of.setdefault(note, []).append(name)
    return tuple(
        note if len(have) == len(names) else f"{', '.join(have)}: {note}" for note, have in of.items()
    )
