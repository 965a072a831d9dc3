"""`hpc-rl submit`: configuration -> check -> plan -> scripts -> one call of the scheduler."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hpc_rl.cli.config import print_resolved
from hpc_rl.cli.continuation import continuation_json, continuation_lines
from hpc_rl.cli.options import TRIAL_NAMES, CommandParser, Namespace, print_json
from hpc_rl.cli.status import follow
from hpc_rl.config.loading.fields import names_in
from hpc_rl.config.loading.load import Loaded, UnusableOptions, load
from hpc_rl.config.rules.check import RulesRefuse, check, with_origins
from hpc_rl.config.tables.changes import Change
from hpc_rl.errors import ConfigError, DoesNotFit, HpcRlError
from hpc_rl.plan import train_mesh
from hpc_rl.plan.estimate import Estimate
from hpc_rl.plan.plan import make_plan
from hpc_rl.plan.schema import Plan
from hpc_rl.render.steps import plan_lines
from hpc_rl.schedulers import pick
from hpc_rl.schedulers.sinfo import UNKNOWN_THREADS_PER_CORE
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.submit import dependency, needs, preflight, submission, trial_index
from hpc_rl.submit.first_rows import check_first_rows
from hpc_rl.submit.first_start import Recovery
from hpc_rl.submit.lock import check_unlocked, check_writable
from hpc_rl.submit.submission import Submission
from hpc_rl.submit.surrounding_job import is_inside
from hpc_rl.submit.user_code import check_user_code
from hpc_rl.supervise import bad_nodes
from hpc_rl.trial import Trial

T = TypeVar("T")


@dataclass(frozen=True)
class Planned:
    """A checked configuration and its plan."""

    loaded: Loaded
    plan: Plan
    # Nodes that failed the trial lately; None where the cluster was not asked.
    avoid: tuple[str, ...] | None = None
    needs: Estimate | None = None  # None where the model's config.json says nothing
    problems: tuple[str, ...] = ()  # why the models can't be trained so

    @property
    def notes(self) -> list[str]:
        estimated = self.needs.notes if self.needs else []
        return [*self.loaded.notes, *self.plan.notes, *estimated]

    def note_lines(self) -> list[str]:
        return [f"note: {note}" for note in self.notes]


def run(args: Namespace) -> int:
    if args.print_config is not None:
        return print_config(args)
    given = loaded(args)
    options: tuple[str, ...] = ()
    if after := args.after_ok or args.after:
        where = pick(given.config.launcher.type)
        options = dependency.sbatch_options(after, bool(args.after_ok), given.config, where)
    if args.dry_run:
        return _dry_run(given, args.json)
    planned = plan_of(given)
    trial = submission.trial_of(planned.loaded.config)
    return submitted(compared(planned, trial, args.no_check), args, trial, options=options)


def parser() -> CommandParser:
    made = CommandParser("Check a configuration, plan it, and submit it as a job. Returns at once.", EPILOG)
    add_config_and_print(made)
    made.add_flag(
        "--dry_run",
        help="stop before anything is written; show the plan, what it needs, and all checks of render",
    )
    after = made.add_mutually_exclusive_group()
    text = "start once that job, or the newest job of that trial, has ended"
    only = "the same, and only if it succeeded"
    for name, help_text in (("--after", text), ("--after_ok", only)):
        action = after.add_argument(name, metavar="JOB|TRIAL", help=help_text)
        setattr(action, *TRIAL_NAMES)
    add_outcome(made)
    return made


NOTHING_WRITTEN = "nothing was written or submitted"
EPILOG = """examples:
  hpc-rl submit grpo.yaml --dry_run
  hpc-rl submit grpo.yaml -N 4 -p gpu -t 24:00:00 actor.optimizer.lr=1e-6
"""


def add_outcome(made: CommandParser) -> None:
    """Add the options for what submit and recover print."""
    made.add_flag("--no_check", help="do not compare the request with the cluster (one sinfo)")
    made.add_flag("-f", "--follow", help="show the trial live until it is over, and end with its exit code")
    how = made.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print job id, paths and notes as JSON")
    how.add_argument("--parsable", action="store_true", help="print the job id only")


def add_config_and_print(made: CommandParser) -> None:
    """Declare the configuration of submit and render, and --print_config."""
    made.add_config()
    text = "print the resolved configuration with the origin of each value, and stop"
    # The library writes `--print_config=`.
    made.add_argument("--print_config", nargs="?", const="", metavar="yaml", help=text)


def print_config(args: Namespace) -> int:
    """Print the resolved configuration with the origin of each value."""
    print_resolved(check(loaded(args), files=False))
    return 0


def loaded(args: Namespace) -> Loaded:
    """Read the configuration that a command was given.

    Raises ConfigError, with what else `plan_of` refuses, as far as it does not depend on that.
    """
    if not args.config and not args.overrides:
        raise ConfigError(f"give a configuration: hpc-rl {args.argv[0]} FILE")
    try:
        return load(
            args.config, args.overrides, presets=args.preset, cluster=args.cluster, environ=os.environ
        )
    except UnusableOptions as error:
        _, _, further = _judged(error.rest, files=True)
        lines = (line for one in further for line in str(one).splitlines())
        independent = (line for line in lines if not any(map(error.is_unknown, names_in(line))))
        raise ConfigError("\n".join([str(error), *independent])) from None


def plan_of(loaded: Loaded, files: bool = True, count_rows: bool = False) -> Planned:
    """Check and plan; with `files` that data and model exist, and that memory suffices.

    With `count_rows` the training data is read for the number of steps. Raises ConfigError with all that is
    refused, one a line.
    """
    checked, can_plan, errors = _judged(loaded, files)
    found = _planned(checked, files, count_rows, errors) if can_plan else None
    if found is None or errors:
        raise errors[0] if len(errors) == 1 else ConfigError("\n".join(map(str, errors)))
    return found


def plan_and_refusal(given: Loaded, count_rows: bool = False) -> tuple[Planned, ConfigError | None]:
    """Return the plan, and what refuses to submit it. Raises ConfigError where no plan can be made."""
    try:
        return plan_of(given, count_rows=count_rows), None
    except ConfigError as refusal:
        try:  # a plan, without what must be there
            return plan_of(given, files=False, count_rows=count_rows), refusal
        except ConfigError:
            raise refusal from None


def _judged(loaded: Loaded, files: bool) -> tuple[Loaded, bool, list[ConfigError]]:
    """Return the configuration with its defaults adapted, whether it can be planned, and what is refused."""
    errors: list[ConfigError] = []
    can_plan, unreadable = True, set[str]()
    try:
        checked = check(loaded, files=files)
    except RulesRefuse as error:
        errors.append(error)
        checked, can_plan, unreadable = error.adapted, error.is_about_files_only, error.unreadable
    if files:
        config, told, refused = checked.config, list[str](), list[ConfigError]()
        told += _tried(refused, lambda: check_first_rows(config, unreadable), [])
        python = config.launcher.python or sys.executable
        told += _tried(refused, lambda: check_user_code(config, python, Path.cwd()), [])
        lines = "\n".join(map(str, refused)).splitlines()
        errors += [ConfigError(with_origins(line, checked.origins)) for line in lines]
        checked = dataclasses.replace(checked, notes=[*checked.notes, *told])
    return checked, can_plan, errors


def _tried(errors: list[ConfigError], ask: Callable[[], T], otherwise: T) -> T:
    """Return the answer; where that is a ConfigError, put it to the others."""
    try:
        return ask()
    except ConfigError as error:
        errors.append(error)
        return otherwise


def _planned(checked: Loaded, files: bool, count_rows: bool, errors: list[ConfigError]) -> Planned | None:
    """Return the plan of a configuration; what refuses it is put to the errors, None where it has none."""
    config = checked.config
    scheduler = pick(config.launcher.type)
    # The true number is known only by sinfo, which a submission asks later.
    threads = UNKNOWN_THREADS_PER_CORE if scheduler == "slurm" else 1
    try:
        plan = make_plan(
            config,
            checked.explicit,
            interpreter=sys.executable,
            scheduler=scheduler,  # type: ignore[arg-type]
            threads_per_core=threads,
        )
    except ConfigError as error:
        errors.append(error)
        return None
    if files:
        _tried(errors, lambda: preflight.refuse_missing_engine(plan), None)
        checked = _tried(errors, partial(preflight.with_attention, checked, plan), checked)
        checked = _tried(errors, partial(preflight.with_mpi, checked, plan, scheduler), checked)
        checked = _tried(errors, partial(preflight.with_machine, checked, plan, scheduler), checked)
        config = checked.config
    known = needs.known_models(config)
    estimated = needs.needs_of(config, plan, known, scheduler, count_rows)
    problems = [*train_mesh.problems(config, plan, known), *(estimated.problems if estimated else [])]
    if files and problems:
        errors.append(DoesNotFit("\n".join(problems)))
    return Planned(checked, plan, needs=estimated, problems=tuple(problems))


def compared(planned: Planned, trial: Trial, no_check: bool) -> Planned:
    """With what the cluster has to say. Raises ConfigError for a request that can never run there."""
    config = planned.loaded.config
    if no_check or pick(config.launcher.type) != "slurm":
        return planned
    said = preflight.quick_check(
        config, planned.plan, SlurmScheduler(), list(bad_nodes.current(trial, time.time()))
    )
    loaded = dataclasses.replace(planned.loaded, notes=[*planned.loaded.notes, *said.notes])
    return dataclasses.replace(planned, loaded=loaded, plan=said.plan, avoid=said.avoid)


def checked_scripts(planned: Planned, trial: Trial) -> list[preflight.PreflightCheck]:
    """Everything that can be said before a submission."""
    config = planned.loaded.config
    where = pick(config.launcher.type)
    scripts = submission.render_scripts(planned.loaded, planned.plan, trial, where)
    return preflight.full_check(config, planned.plan, scripts, SlurmScheduler() if where == "slurm" else None)


def submitted(
    planned: Planned,
    args: Namespace,
    trial: Trial,
    recovery: Recovery | None = None,
    options: Sequence[str] = (),
) -> int:
    """Submit, and tell what was submitted; with --follow stay until it is over. Returns the exit code.

    `options` are sbatch's.
    """
    made = submission.submit(
        planned.loaded,
        planned.plan,
        command=["hpc-rl", *args.argv],
        trial=trial,
        recovery=recovery,
        avoid=planned.avoid,
        options=options,
    )
    if args.json:
        print_json(as_json(made, planned))
    elif args.parsable:
        print(made.job_id)
    else:
        if made.scheduler == "slurm" and is_inside(os.environ):
            job = f"job {os.environ['SLURM_JOB_ID']}"
            print(
                f"note: this asks for a job of its own; `hpc-rl run` uses the nodes of {job}, where you are."
            )
        see, *more = trial_index.commands(made.trial, "status", "logs --follow", "cancel")
        following = [f"next       {see}", *(f"           {command}" for command in more)]
        print("\n".join([*lines(made, planned), *following]))
    sys.stdout.flush()
    return follow(made.trial) if args.follow else 0


def changed_lines(changes: Sequence[Change]) -> list[str]:
    """Return one line for each option that differs from what the trial was started with."""
    return [f"changed    {change}" for change in changes]


def change_json(change: Change) -> dict[str, Any]:
    """Return a change for --json, where `renews` says that it needs new batches."""
    row = dataclasses.asdict(change)
    row["renews"] = row.pop("new_batches")
    return row


def lines(made: Submission, planned: Planned) -> list[str]:
    """Return what was changed, written and submitted."""
    found = [*planned.note_lines(), *changed_lines(made.start.changes)]
    if made.job_id:
        found += continuation_lines(made.continuation)
    if made.job_id and made.allocation_was not in ("", planned.plan.allocation):
        change = f"{made.allocation_was} -> {planned.plan.allocation}"
        found.append(f"changed    allocation: {change}  (safe: the state is resharded)")
    if made.dropped:  # no batch or checkpoint came of it
        names = ", ".join(path.name for path in made.dropped)
        found.append(f"dropped    what other options, rows or code made, in no batch ({names})")
    found += [f"trial      {made.trial}", f"directory  {made.trial.dir}"]
    found += [f"job        {made.job_id} ({made.scheduler})"] if made.job_id else []
    found += [f"servers    {made.server_job_id}"] if made.server_job_id else []
    start = made.start
    if start.step is not None:
        state = "which was read and is sound" if made.job_id else "if it verifies"
        unread = start.unread if made.job_id else ()
        state += f"; checked while it is loaded: {', '.join(unread)}" if unread else ""
        what = f"from checkpoint {start.step}, {state}"
        found.append(f"start      {what}; a fresh start needs another trial_name")
    return [*found, f"script     {made.script}"]


def as_json(made: Submission, planned: Planned) -> dict[str, Any]:
    return {
        "trial": str(made.trial),
        "dir": str(made.trial.dir),
        "job_id": made.job_id or None,
        "server_job_id": made.server_job_id or None,
        "scheduler": made.scheduler,
        "script": str(made.script),
        "output": str(made.trial.job_output(made.job_id)) if made.job_id else None,
        "allocation": planned.plan.allocation,
        "notes": planned.notes,
        "changes": [change_json(change) for change in made.start.changes],
        **continuation_json(made.continuation),
    }


def _dry_run(given: Loaded, json: bool) -> int:
    """Show what a submission would do. What refuses it comes last: it raises that ConfigError."""
    planned, refusal = plan_and_refusal(given, count_rows=True)
    if refusal is not None:
        return _refused(planned, refusal, json)
    trial, plan = submission.trial_of(planned.loaded.config), planned.plan
    where = pick(planned.loaded.config.launcher.type)
    check_writable(trial)
    check_unlocked(trial)
    start = submission.check_submittable(trial, planned.loaded, plan, where)
    checks = checked_scripts(planned, trial)
    if json:
        print_json(dry_json(planned) | {"checks": list(map(vars, checks))})
        return exit_code_of(checks)
    words = [
        *dry_lines(planned, [*changed_lines(start.changes), *continuation_lines(start.continuation())]),
        *(f"check      {check.line()}" for check in checks if check.state != "refused"),
        f"{NOTHING_WRITTEN}; `hpc-rl render` writes the scripts",
    ]
    print("\n".join(words), flush=True)
    preflight.raise_for(checks)
    return 0


def _refused(planned: Planned, refusal: ConfigError, json: bool) -> int:
    """Show a plan that files or memory refuse: for an estimate a model's config.json is enough."""
    if json:
        print_json(dry_json(planned) | {"refused": str(refusal)})
        return refusal.exit_code
    print("\n".join(dry_lines(planned)), flush=True)
    raise refusal


def dry_json(planned: Planned) -> dict[str, Any]:
    trial = submission.trial_of(planned.loaded.config)
    return {
        "trial": str(trial),
        "dir": str(trial.dir),
        "plan": planned.plan.to_json(),
        "notes": planned.notes,
        "estimate": needs.as_json(planned.needs) if planned.needs else None,
    }


def dry_lines(planned: Planned, changed: Sequence[str] = ()) -> list[str]:
    """Return the plan and what it needs."""
    trial, plan = submission.trial_of(planned.loaded.config), planned.plan
    config = planned.loaded.config
    nodes = "1 node" if plan.n_nodes == 1 else f"{plan.n_nodes} nodes"
    unknown = ["memory     not estimated: no config.json of a model that is known here"]
    return [
        *planned.note_lines(),
        f"trial      {trial}",
        f"directory  {trial.dir}",
        f"plan       {plan.trainer}, {plan.allocation}, {nodes}, {pick(config.launcher.type)}",
        *changed,
        *(f"           {line}" for line in plan_lines(plan)),
        *(needs.lines(planned.needs, config, plan) if planned.needs else unknown),
    ]


def exit_code_of(checks: list[preflight.PreflightCheck]) -> int:
    """Return the exit code of checks whose reasons are printed as JSON."""
    try:
        preflight.raise_for(checks)
    except HpcRlError as error:
        return error.exit_code
    return 0
