"""`hpc-rl submit`: check a configuration, plan it, and submit it as a job."""

from hpc_rl.cli.config import print_config
from hpc_rl.cli.options import TRIAL_NAMES, CommandParser, Namespace, print_json
from hpc_rl.cli.outcome import (
    EPILOG,
    NO_CHECK,
    add_config_and_print,
    add_fetch,
    add_outcome,
    collect_sources,
    submit_and_report,
)
from hpc_rl.cli.plan_text import NOTHING_WRITTEN, describe_plan, format_plan_json
from hpc_rl.cli.start_text import describe_continuation, list_changes
from hpc_rl.config.load.load import Loaded
from hpc_rl.schedulers import pick
from hpc_rl.trials import dependency, prepare, submission
from hpc_rl.trials.check_result import CheckState
from hpc_rl.trials.checklist import ALL, Stage


def make_parser() -> CommandParser:
    command = CommandParser(
        "Check a configuration, plan it, and submit it as a job. Returns at once.", EPILOG
    )
    add_config_and_print(command)
    add_fetch(command)
    command.add_flag(
        "--dry_run",
        help="write and submit nothing; show the plan and its resources, or all that is refused",
    )
    after = command.add_mutually_exclusive_group()
    text = "start once that job, or the newest job of that trial, has ended"
    only = "the same, and only if it succeeded"
    for name, help_text in (("--after", text), ("--after_ok", only)):
        action = after.add_argument(name, metavar="JOB|TRIAL", help=help_text)
        setattr(action, *TRIAL_NAMES)
    add_outcome(command, f"{NO_CHECK}; with --dry_run only plan, and check nothing of this machine")
    return command


def main(args: Namespace) -> int:
    if args.print_config is not None:
        return print_config(prepare.load_config(collect_sources(args)))
    if args.dry_run:
        return _dry_run(args)
    loaded = prepare.load_config(collect_sources(args))
    options = _find_dependency(args, loaded)
    planned = prepare.plan_submission(loaded, skip_cluster=args.no_check)
    trial = submission.make_trial(planned.loaded.config)
    return submit_and_report(planned, args, trial, options=options, is_checked=True)


def _find_dependency(args: Namespace, loaded: Loaded) -> tuple[str, ...]:
    """Return the options of sbatch for --after and --after_ok. Raises ConfigError, SchedulerError."""
    if not (after := args.after_ok or args.after):
        return ()
    scheduler = pick(loaded.config.launcher.type)
    return dependency.make_sbatch_options(after, bool(args.after_ok), loaded.config, scheduler)


def _dry_run(args: Namespace) -> int:
    """Print the plan. If anything is refused, raise the error and print nothing.

    With --no_check the plan and its needs come from the options and config.json alone.
    """
    stages = frozenset({Stage.OPTIONS}) if args.no_check else ALL
    verdict = prepare.judge_config(collect_sources(args), stages, counts_rows=True)
    if args.json:
        value = format_plan_json(verdict.planned) if verdict.planned else {}
        print_json(value | {"refusals": verdict.lines, "checks": verdict.rows()})
        return verdict.exit_code
    planned, start = verdict.require(), verdict.start
    _find_dependency(args, planned.loaded)
    changed = [*list_changes(start.changes), *describe_continuation(start.continuation())] if start else []
    lines = [
        *(f"note: {problem}" for problem in planned.problems),
        *describe_plan(planned, changed),
        *(
            f"check      {result.line()}"
            for result in verdict.of_scripts
            if result.state is not CheckState.NOTE
        ),
        f"{NOTHING_WRITTEN}; `hpc-rl render` writes the scripts",
    ]
    print("\n".join(lines), flush=True)
    return 0
