"""`hpc-rl submit`: configuration -> check -> plan -> scripts -> one call of the scheduler."""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from hpc_rl.cli.config import print_resolved
from hpc_rl.cli.continuation import continuation_json, continuation_lines
from hpc_rl.cli.options import TRIAL_NAMES, CommandParser, Namespace, print_json
from hpc_rl.cli.status import follow
from hpc_rl.config.changes import Change
from hpc_rl.config.load.fields import names_in
from hpc_rl.config.load.load import Loaded, UnusableOptions, load
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError, HpcRlError
from hpc_rl.core.trial import Trial
from hpc_rl.render.steps import plan_lines
from hpc_rl.schedulers import pick
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.supervise import bad_nodes
from hpc_rl.trials import (
    dependency,
    needs,
    preflight,
    submission,
    trial_index,
)
from hpc_rl.trials.checklist import (
    ALL,
    WITHOUT_A_PLAN,
    Planned,
    Stage,
    Verdict,
    judge,
    judge_unreadable,
)
from hpc_rl.trials.first_start import Recovery
from hpc_rl.trials.refusal import CheckResult, CheckState
from hpc_rl.trials.submission import Submission
from hpc_rl.trials.surrounding_job import is_inside

T = TypeVar("T")


def run(args: Namespace) -> int:
    if args.print_config is not None:
        return print_config(args)
    if args.dry_run:
        return _dry_run(args)
    given = loaded(args)
    options = _dependency(args, given)
    without = {Stage.ACCEPTANCE, *([Stage.CLUSTER] if args.no_check else [])}
    planned = judge(given, ALL - without).require()
    trial = submission.trial_of(planned.loaded.config)
    return submitted(planned, args, trial, options=options, is_checked=True)


def _dependency(args: Namespace, given: Loaded) -> tuple[str, ...]:
    """Return the options of sbatch for --after and --after_ok. Raises ConfigError, SchedulerError."""
    if not (after := args.after_ok or args.after):
        return ()
    where = pick(given.config.launcher.type)
    return dependency.sbatch_options(after, bool(args.after_ok), given.config, where)


def parser() -> CommandParser:
    made = CommandParser("Check a configuration, plan it, and submit it as a job. Returns at once.", EPILOG)
    add_config_and_print(made)
    made.add_flag(
        "--dry_run",
        help="stop before anything is written; show the plan and what it needs, or all that is refused",
    )
    after = made.add_mutually_exclusive_group()
    text = "start once that job, or the newest job of that trial, has ended"
    only = "the same, and only if it succeeded"
    for name, help_text in (("--after", text), ("--after_ok", only)):
        action = after.add_argument(name, metavar="JOB|TRIAL", help=help_text)
        setattr(action, *TRIAL_NAMES)
    add_outcome(made, f"{NO_CHECK}; with --dry_run only plan, and check nothing of this machine")
    return made


NOTHING_WRITTEN = "nothing was written or submitted"
EPILOG = """examples:
  hpc-rl submit grpo.yaml --dry_run
  hpc-rl submit grpo.yaml -N 4 -p gpu -t 24:00:00 actor.optimizer.lr=1e-6
"""


NO_CHECK = "do not compare the request with the cluster (one sinfo)"


def add_outcome(made: CommandParser, no_check: str = NO_CHECK) -> None:
    """Add the options for what submit and recover print."""
    made.add_flag("--no_check", help=no_check)
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
    given = loaded(args)
    print_resolved(check(given, files=False), given.notes)
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
        lines = judge(error.rest, WITHOUT_A_PLAN).lines
        independent = (line for line in lines if not any(map(error.is_unknown, names_in(line))))
        raise ConfigError("\n".join([str(error), *independent])) from None


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


def checked_scripts(planned: Planned, trial: Trial) -> list[CheckResult]:
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
    is_checked: bool = False,
) -> int:
    """Submit, and tell what was submitted; with --follow stay until it is over. Returns the exit code.

    `options` are sbatch's; `is_checked` if it was checked a moment ago that the trial can be submitted.
    """
    made = submission.submit(
        planned.loaded,
        planned.plan,
        command=["hpc-rl", *args.argv],
        trial=trial,
        recovery=recovery,
        avoid=planned.avoid,
        options=options,
        is_checked=is_checked,
    )
    if args.json:
        print_json(as_json(made, planned))
    elif args.parsable:
        print(made.job_id)
    else:
        if made.scheduler == "slurm" and is_inside(os.environ):
            job = f"job {os.environ['SLURM_JOB_ID']}"
            print(f"note: this submits a new job. To use your current {job}, run `hpc-rl run`.")
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
    found = [*planned.note_lines(made.notes_before), *changed_lines(made.start.changes)]
    if made.job_id:
        found += continuation_lines(made.continuation)
    if made.job_id and made.allocation_was not in ("", planned.plan.allocation):
        change = f"{made.allocation_was} -> {planned.plan.allocation}"
        found.append(f"changed    allocation: {change}  (safe: the state is resharded)")
    if made.dropped:  # no batch or checkpoint came of it
        names = ", ".join(path.name for path in made.dropped)
        found.append(f"dropped    unused rollouts from an earlier configuration ({names})")
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


def verdict_on(args: Namespace, stages: frozenset[Stage] = ALL, counts_rows: bool = False) -> Verdict:
    """Return the verdict on what a command was given, also on what can't be read."""
    try:
        given = loaded(args)
    except ConfigError as error:
        return judge_unreadable(error)
    return judge(given, stages, counts_rows=counts_rows)


def _dry_run(args: Namespace) -> int:
    """Show what a submission would do. Raises the error of what would refuse it, with nothing shown before.

    With --no_check only the plan is made and what it needs: by options and config.json alone.
    """
    stages = frozenset({Stage.OPTIONS}) if args.no_check else ALL
    verdict = verdict_on(args, stages, counts_rows=True)
    if args.json:
        shown = dry_json(verdict.planned) if verdict.planned else {}
        print_json(shown | {"refusals": verdict.lines, "checks": verdict.rows()})
        return verdict.exit_code
    planned, start = verdict.require(), verdict.start
    _dependency(args, planned.loaded)
    changed = [*changed_lines(start.changes), *continuation_lines(start.continuation())] if start else []
    words = [
        *(f"note: {problem}" for problem in planned.problems),
        *dry_lines(planned, changed),
        *(f"check      {one.line()}" for one in verdict.of_scripts if one.state is not CheckState.NOTE),
        f"{NOTHING_WRITTEN}; `hpc-rl render` writes the scripts",
    ]
    print("\n".join(words), flush=True)
    return 0


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


def exit_code_of(checks: list[CheckResult]) -> int:
    """Return the exit code of checks whose reasons are printed as JSON."""
    try:
        preflight.raise_for(checks)
    except HpcRlError as error:
        return error.exit_code
    return 0
