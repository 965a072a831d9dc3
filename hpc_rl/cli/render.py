"""`hpc-rl render`: submit, stopped before the scheduler."""

from pathlib import Path

from hpc_rl.cli import submit
from hpc_rl.cli.options import ArgumentParser, Namespace, add_json, new_parser, print_json
from hpc_rl.submit import preflight, submission


def parser() -> ArgumentParser:
    """Return the parser of the command."""
    made = new_parser(
        "Write the trial directory of a configuration with its job scripts; submit nothing.",
        submit.EPILOG,
    )
    submit.add_config_and_print(made)
    made.add_argument(
        "--output", type=Path, metavar="DIR", help="write there instead of where the trial belongs"
    )
    made.add_argument(
        "--check",
        action="store_true",
        help="check the scripts and the request first, and write nothing where they can't run",
    )
    add_json(made, "paths, notes and checks")
    return made


def run(args: Namespace) -> int:
    """Write the scripts; return the exit code."""
    if args.print_config is not None:
        return submit.print_config(args)
    planned = submit.plan_of(submit.loaded(args))
    report = preflight.PreflightReport()
    if args.check:
        report = submit.checked_scripts(planned, submission.trial_of(planned.loaded.config))
        if args.json and submit.exit_code_of(report):
            print_json({"checks": report.to_json()})
            return submit.exit_code_of(report)
        report.raise_for()
    done = submission.render_to(planned.loaded, planned.plan, args.output, command=["hpc-rl", *args.argv])
    if args.json:
        print_json(submit.as_json(done, planned) | ({"checks": report.to_json()} if args.check else {}))
        return 0
    by_hand = "sbatch" if done.scheduler == "slurm" else "bash"
    checks = [f"check      {check.line()}" for check in report.checks]
    print(
        "\n".join(
            [
                *submit.notes(planned),
                *submit.changed_lines(done.changes),
                *submit.lines(done),
                *checks,
                f"next       {by_hand} {done.script}",
            ]
        )
    )
    return 0
