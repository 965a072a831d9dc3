"""`hpc-rl check`: everything that submit does before the queue, and one episode."""

import shlex
from collections.abc import Sequence

from hpc_rl.cli import submit
from hpc_rl.cli.options import CommandParser, Namespace, print_json
from hpc_rl.errors import ConfigError, HpcRlError
from hpc_rl.schedulers import pick
from hpc_rl.submit import preflight, submission
from hpc_rl.submit.lock import check_unlocked

ABOUT = """Check a configuration as submit does, and tell all that is wrong; write and submit nothing.
Looked at are its options, the models, the first rows, rewards and workflow, the plan, the scripts, and what
the cluster says to the request. `submit --dry_run` checks the same and shows the plan with what it needs;
`render --check` checks the same and writes the scripts."""
EPILOG = """examples:
  hpc-rl check grpo.yaml

Exit codes are those of submit: 0 where it would submit, 64 where something is refused."""


def parser() -> CommandParser:
    made = CommandParser(ABOUT, EPILOG)
    made.add_config()
    made.add_json("refusals, notes and checks")
    return made


def run(args: Namespace) -> int:
    checks: list[preflight.PreflightCheck] = []
    notes: Sequence[str] = ()
    errors: list[HpcRlError] = []
    try:
        given = submit.loaded(args)
        planned, refusal = submit.plan_and_refusal(given)
        notes = planned.notes
        errors += [refusal] if refusal else []
        checks = _checks(planned, errors)
    except ConfigError as error:  # no plan can be made
        errors.append(error)
    if args.json:
        shown = [line for error in errors for line in str(error).splitlines()]
        print_json({"refusals": shown, "notes": notes, "checks": list(map(vars, checks))})
        return errors[0].exit_code if errors else 0
    said = [check.line() for check in checks if check.state is preflight.CheckState.NOTE]
    lines = [*(f"note: {note}" for note in notes), *(f"check      {line}" for line in said)]
    if not errors:
        command = " ".join(["hpc-rl submit", *map(shlex.quote, args.argv[1:])])
        lines += ["ok         nothing is refused; nothing was written or submitted", f"next       {command}"]
    print("\n".join(lines), flush=True)
    if errors:
        raise errors[0] if len(errors) == 1 else type(errors[0])("\n".join(map(str, errors)))
    return 0


def _checks(planned: submit.Planned, errors: list[HpcRlError]) -> list[preflight.PreflightCheck]:
    """Return the checks of the scripts; what refuses the submission is put to the errors."""
    trial = submission.trial_of(planned.loaded.config)
    where = pick(planned.loaded.config.launcher.type)
    try:
        check_unlocked(trial)
        submission.check_submittable(trial, planned.loaded, planned.plan, where)
    except HpcRlError as error:
        errors.append(error)
    checks = submit.checked_scripts(planned, trial)
    try:
        preflight.raise_for(checks)
    except HpcRlError as error:
        errors.append(error)
    return checks
