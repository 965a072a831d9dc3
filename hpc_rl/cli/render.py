"""`hpc-rl render`: write the scripts of a trial, and submit nothing."""

from pathlib import Path

from hpc_rl.cli.config import print_config
from hpc_rl.cli.options import CommandParser, Namespace, print_json, print_result
from hpc_rl.cli.outcome import (
    EPILOG,
    add_config_and_print,
    collect_sources,
    describe_submission,
    format_submission_json,
)
from hpc_rl.core.errors import HpcRlError
from hpc_rl.trials import preflight, prepare, submission
from hpc_rl.trials.check_result import CheckResult
from hpc_rl.trials.checklist import make_planned


def make_parser() -> CommandParser:
    about = "Write the trial directory of a configuration with its job scripts; submit nothing."
    command = CommandParser(about, EPILOG)
    add_config_and_print(command)
    output = "write to this directory instead of the trial's own"
    command.add_argument("--output", type=Path, metavar="DIR", help=output)
    command.add_flag(
        "--check", help="check the scripts and the requested resources first; write nothing if a check fails"
    )
    command.add_json("paths, notes and checks")
    return command


def main(args: Namespace) -> int:
    if args.print_config is not None:
        return print_config(prepare.load_config(collect_sources(args)))
    planned = make_planned(prepare.load_config(collect_sources(args)), pythons=args.check)
    checks: list[CheckResult] = []
    if args.check:
        checks = prepare.check_scripts(planned, submission.make_trial(planned.loaded.config))
        try:
            preflight.raise_failures(checks)
        except HpcRlError as error:
            if not args.json:
                raise
            print_json({"checks": [check.to_json() for check in checks]})
            return error.exit_code
    done = submission.render_to(planned.loaded, planned.plan, args.output, command=["hpc-rl", *args.argv])
    value = format_submission_json(done, planned)
    value |= {"checks": [check.to_json() for check in checks]} if args.check else {}
    lines = describe_submission(done, planned)
    if args.output:
        lines.insert(0, f"note: with --output the trial has the name of the directory: {done.trial}")
    lines += [f"check      {check.line()}" for check in checks]
    by_hand = "sbatch" if done.scheduler == "slurm" else "bash"
    print_result(args.json, value, [*lines, f"next       {by_hand} {done.script}"])
    return 0
