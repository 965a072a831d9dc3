"""`hpc-rl render`: submit, stopped before the scheduler."""

from pathlib import Path

from hpc_rl.cli import submit
from hpc_rl.cli.options import CommandParser, Namespace, print_json, print_result
from hpc_rl.trials import (
    preflight,
    submission,
)
from hpc_rl.trials.checklist import plan_of
from hpc_rl.trials.refusal import CheckResult


def parser() -> CommandParser:
    about = "Write the trial directory of a configuration with its job scripts; submit nothing."
    made = CommandParser(about, submit.EPILOG)
    submit.add_config_and_print(made)
    output = "write there instead of where the trial belongs"
    made.add_argument("--output", type=Path, metavar="DIR", help=output)
    made.add_flag(
        "--check", help="check the scripts and the request first, and write nothing where they can't run"
    )
    made.add_json("paths, notes and checks")
    return made


def run(args: Namespace) -> int:
    if args.print_config is not None:
        return submit.print_config(args)
    planned = plan_of(submit.loaded(args), pythons=args.check)
    checks: list[CheckResult] = []
    if args.check:
        checks = submit.checked_scripts(planned, submission.trial_of(planned.loaded.config))
        if args.json and submit.exit_code_of(checks):
            print_json({"checks": list(map(vars, checks))})
            return submit.exit_code_of(checks)
        preflight.raise_for(checks)
    done = submission.render_to(planned.loaded, planned.plan, args.output, command=["hpc-rl", *args.argv])
    value = submit.as_json(done, planned) | ({"checks": list(map(vars, checks))} if args.check else {})
    words = submit.lines(done, planned)
    if args.output:
        words.insert(0, f"note: in a directory of its own the trial has that one's name: {done.trial}")
    words += [f"check      {check.line()}" for check in checks]
    by_hand = "sbatch" if done.scheduler == "slurm" else "bash"
    print_result(args.json, value, [*words, f"next       {by_hand} {done.script}"])
    return 0
