"""`hpc-rl submit`: configuration -> check -> plan -> scripts -> one call of the scheduler."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_rl.cli.config import print_resolved
from hpc_rl.cli.options import ArgumentParser, Namespace, add_config, add_json, new_parser, print_json
from hpc_rl.config.loading.load import Loaded, load
from hpc_rl.config.rules.check import check
from hpc_rl.config.tables.changes import Change
from hpc_rl.errors import ConfigError, ExitCode, HpcRlError
from hpc_rl.plan.plan import make_plan
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.schedulers import pick
from hpc_rl.schedulers.sinfo import UNKNOWN_THREADS_PER_CORE
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.status.formatting import program_name
from hpc_rl.submit import preflight, trial_index
from hpc_rl.submit import submission as submission
from hpc_rl.submit.lock import check_unlocked
from hpc_rl.submit.submission import Submission
from hpc_rl.supervise import bad_nodes
from hpc_rl.trial import Trial


@dataclass(frozen=True)
class Planned:
    """A checked configuration and its plan."""

    loaded: Loaded
    plan: Plan
    avoid: tuple[str, ...] | None = (
        None  # nodes that failed the trial lately; None where the cluster was not asked
    )

    @property
    def notes(self) -> list[str]:
        refused = [f"submit refuses this trial: {self.plan.not_built}"] if self.plan.not_built else []
        return [*self.loaded.notes, *self.plan.notes, *refused]


def run(args: Namespace) -> int:
    if args.print_config is not None:
        return print_config(args)
    planned = plan_of(loaded(args))
    if args.dry_run:
        return _dry_run(planned, args.json)
    planned = compared(planned, submission.trial_of(planned.loaded.config), args.no_check)
    made = submission.submit(
        planned.loaded, planned.plan, command=["hpc-rl", *args.argv], avoid=planned.avoid
    )
    return announce(made, planned, args)


def parser() -> ArgumentParser:
    made = new_parser("Check a configuration, plan it, and submit it as a job. Returns at once.", EPILOG)
    add_config_and_print(made)
    made.add_argument(
        "--dry_run",
        action="store_true",
        help="stop before anything is written; show the plan, and all checks of render",
    )
    add_outcome(made)
    return made


EPILOG = """examples:
  hpc-rl submit grpo.yaml --dry_run
  hpc-rl submit grpo.yaml -N 4 -p gpu -t 24:00:00 actor.optimizer.lr=1e-6
"""


def add_outcome(made: ArgumentParser) -> None:
    """Add the options for what submit and recover print."""
    made.add_argument(
        "--no_check",
        action="store_true",
        help="do not compare the request with the cluster (one sinfo)",
    )
    made.add_argument(
        "--follow",
        action="store_true",
        help="show the trial live until it is over, and end with its exit code",
    )
    how = made.add_mutually_exclusive_group()
    add_json(how, "job id, paths and notes")
    how.add_argument("--parsable", action="store_true", help="print the job id only")


def add_config_and_print(made: ArgumentParser) -> None:
    """Declare the configuration of submit and render, and --print_config."""
    add_config(made)
    made.add_argument(
        "--print_config",
        nargs="?",  # the library writes `--print_config=`
        const="",
        metavar="yaml",
        help="print the resolved configuration with the origin of each value, and stop",
    )


def print_config(args: Namespace) -> int:
    """Print the resolved configuration with the origin of each value."""
    print_resolved(check(loaded(args), files=False))
    return 0


def loaded(args: Namespace) -> Loaded:
    """Read the configuration that a command was given. Raises ConfigError."""
    if not args.config and not args.overrides:
        raise ConfigError(f"give a configuration: hpc-rl {args.argv[0]} FILE")
    return load(args.config, args.overrides, presets=args.preset, cluster=args.cluster)


def plan_of(loaded: Loaded, files: bool = True) -> Planned:
    """Check and plan; with `files` that data and model exist. Raises ConfigError."""
    checked = check(loaded, files=files)
    config = checked.config
    scheduler = pick(config.launcher.type)
    # The true number is known only by sinfo, which a submission asks later.
    threads = UNKNOWN_THREADS_PER_CORE if scheduler == "slurm" else 1
    plan = make_plan(
        config,
        checked.explicit,
        interpreter=sys.executable,
        scheduler=scheduler,  # type: ignore[arg-type]
        threads_per_core=threads,
    )
    return Planned(checked, plan)


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


def checked_scripts(planned: Planned, trial: Trial) -> preflight.PreflightReport:
    """Everything that can be said before a submission."""
    config = planned.loaded.config
    where = pick(config.launcher.type)
    scripts = submission.render_scripts(planned.loaded, planned.plan, trial, where)
    return preflight.full_check(config, planned.plan, scripts, SlurmScheduler() if where == "slurm" else None)


def announce(made: Submission, planned: Planned, args: Namespace) -> int:
    """Tell what was submitted; with --follow stay until it is over. Returns the exit code."""
    if args.json:
        print_json(as_json(made, planned))
    elif args.parsable:
        print(made.job_id)
    else:
        print(
            "\n".join(
                [
                    *notes(planned),
                    *changed_lines(made.changes),
                    *(new_batches_lines(made.batches_after) if made.new_batches else []),
                    *new_allocation(made, planned),
                    *lines(made),
                    *next_lines(made.trial),
                ]
            )
        )
    sys.stdout.flush()
    if not args.follow:
        return 0
    from hpc_rl.status.follow import follow  # rich takes its time to import

    try:
        return follow(made.trial)
    except KeyboardInterrupt:
        name, program = trial_index.cli_name(made.trial), program_name()
        print(
            f"\nhpc-rl: interrupted; the trial continues. Stop it with: {program} cancel {name}",
            file=sys.stderr,
        )
        return ExitCode.KILLED_BY_PERSON


def notes(planned: Planned) -> list[str]:
    return [f"note: {note}" for note in planned.notes]


def changed_lines(changes: Sequence[Change]) -> list[str]:
    """Return one line for each option that differs from what the trial was started with."""
    return [f"changed    {change}" for change in changes]


def new_batches_lines(batches: Sequence[int]) -> list[str]:
    """Return what becomes of the batches that a policy or options made which this start gives up."""
    what = "finished groups"
    if batches:
        many = len(batches) > 1
        what = f"batches {batches[0]} to {batches[-1]}" if many else f"batch {batches[0]}"
    of = "made by a policy or under options that this start gives up"
    return [f"batches    {what}, {of}, are set aside and their prompts issued again (--replay keeps them)"]


def dropped_lines(made: Submission) -> list[str]:
    """What was begun under other options or with other rows, and no batch or generation came of."""
    names = ", ".join(path.name for path in made.dropped)
    return [f"dropped    {names}: of other options or rows, in no batch"] if names else []


def new_allocation(made: Submission, planned: Planned) -> list[str]:
    """What follows from the changes: the state is divided among other processes than before."""
    was, now = made.allocation_was, planned.plan.allocation
    return (
        [f"changed    allocation: {was} -> {now}  (safe: the state is resharded)"]
        if was not in ("", now)
        else []
    )


def lines(made: Submission) -> list[str]:
    job = [f"job        {made.job_id} ({made.scheduler})"] if made.job_id else []
    job += [f"servers    {made.server_job_id}"] if made.server_job_id else []
    start = (
        []
        if made.step is None
        else [f"start      {start_words(made)}; a fresh start needs another trial_name"]
    )
    trial = [f"trial      {made.trial}", f"directory  {made.trial.dir}"]
    return [*dropped_lines(made), *trial, *job, *start, f"script     {made.script}"]


def start_words(made: Submission) -> str:
    """From which generation, and what is known of it."""
    if not made.job_id:
        return f"from checkpoint {made.step} if it verifies"
    unread = f"; checked while it is loaded: {', '.join(made.unread)}" if made.unread else ""
    return f"from checkpoint {made.step}, which was read and is sound{unread}"


def next_lines(trial: Trial) -> list[str]:
    name, program = trial_index.cli_name(trial), program_name()
    commands = [f"{program} status {name}", f"{program} logs {name} --follow", f"{program} cancel {name}"]
    return [f"{'next' if number == 0 else '':<11}{command}" for number, command in enumerate(commands)]


def as_json(made: Submission, planned: Planned) -> dict[str, Any]:
    return {
        "trial": str(made.trial),
        "dir": str(made.trial.dir),
        "job_id": made.job_id or None,
        "server_job_id": made.server_job_id or None,
        "scheduler": made.scheduler,
        "script": str(made.script),
        "output": str(made.output) if made.output else None,
        "allocation": planned.plan.allocation,
        "notes": planned.notes,
        "changes": [dataclasses.asdict(change) for change in made.changes],
        "new_batches": made.new_batches,
        "set_aside_batches": made.batches_after,
    }


def _dry_run(planned: Planned, json: bool) -> int:
    trial = submission.trial_of(planned.loaded.config)
    where = pick(planned.loaded.config.launcher.type)
    check_unlocked(trial)
    _, changes = submission.check_submittable(trial, planned.loaded, planned.plan, where)
    report = checked_scripts(planned, trial)
    if json:
        found = {
            "trial": str(trial),
            "dir": str(trial.dir),
            "plan": planned.plan.to_json(),
            "notes": planned.notes,
        }
        print_json(found | {"checks": report.to_json()})
        return exit_code_of(report)
    plan = planned.plan
    nodes = "1 node" if plan.n_nodes == 1 else f"{plan.n_nodes} nodes"
    summary = f"plan       {plan.trainer}, {plan.allocation}, {nodes}, {where}"
    words = [f"trial      {trial}", f"directory  {trial.dir}", summary]
    units = [f"           {unit_line(unit)}" for unit in plan.units]
    words += changed_lines(changes)
    checks = [f"check      {check.line()}" for check in report.checks if check.state != "refused"]
    end = "nothing was written or submitted; `hpc-rl render` writes the scripts"
    print("\n".join([*notes(planned), *words, *units, *checks, end]))
    sys.stdout.flush()
    report.raise_for()
    return 0


def exit_code_of(report: preflight.PreflightReport) -> int:
    """Return the exit code of a report whose reasons are printed as JSON."""
    try:
        report.raise_for()
    except HpcRlError as error:
        return error.exit_code
    return 0


def unit_line(unit: Unit) -> str:
    """Return one line about a unit of the plan."""
    nodes = f"node {unit.nodes[0]}" if len(unit.nodes) == 1 else f"nodes {unit.nodes[0]}-{unit.nodes[-1]}"
    gpus = f", {unit.gpus_per_task} GPUs" if unit.gpus_per_task else ""
    each = f"{unit.cpus_per_task} CPUs, {unit.mem_mb_per_task} MB{gpus}"
    processes = f"{unit.num_tasks} process{'es' if unit.num_tasks > 1 else ''}"
    return f"{unit.role}-{unit.index}: {processes} on {nodes}, each {each}"
