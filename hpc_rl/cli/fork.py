"""`hpc-rl fork <trial> <name>`: a new trial that begins with a checkpoint of another one."""

from hpc_rl.cli.options import CommandParser, Namespace, parse_checkpoint_step, print_result
from hpc_rl.cli.outcome import add_outcome, submit_and_report
from hpc_rl.cli.plan_text import NOTHING_WRITTEN, describe_plan, format_plan_json
from hpc_rl.cli.start_text import format_change_json, list_changes
from hpc_rl.core.types import WeightVersion
from hpc_rl.trials import forking
from hpc_rl.trials.fork_submission import make_fork

DESCRIPTION = """Submit a new trial that begins with a checkpoint of another one: its weights, optimizer and
step. The other trial stays as it is, and may run."""
EPILOG = """Options may change, as --a.b VALUE or a.b=VALUE, all but trainer, model and kind of optimizer:
  hpc-rl fork first second --from 400 actor.optimizer.lr=1e-6
  hpc-rl fork first@137 second                               the same as --from 137
  hpc-rl fork first other/second total_train_steps=2000      in another experiment
Prompts of the steps before the checkpoint count as used.

A step without a checkpoint is forked from its published weights, if they are still there (`hpc-rl checkpoint
list`). Such a fork begins at step 0 with these weights and a new optimizer, and uses all prompts."""


def make_parser() -> CommandParser:
    made = CommandParser(DESCRIPTION, EPILOG)
    made.add_completed("trial", help="a path, experiment/trial, or a trial name; @STEP may follow it")
    made.add_argument("name", help="name of the new trial, or experiment/name")
    checkpoint = "checkpoint, or step with published weights (default: the newest sound checkpoint)"
    made.add_argument("--from", dest="from_step", type=parse_checkpoint_step, metavar="STEP", help=checkpoint)
    made.add_flag("--dry_run", help="write and submit nothing; show the differences, the plan and its needs")
    add_outcome(made)
    made.add_overrides()
    return made


def main(args: Namespace) -> int:
    fork = make_fork(
        args.trial,
        args.name,
        from_step=args.from_step,
        overrides=args.overrides,
        command=["hpc-rl", *args.argv],
        skip_cluster=args.no_check,
        dry_run=args.dry_run,
    )
    lines = [forking.describe_origin(fork.parent, fork.origin), *list_changes(fork.changes)]
    if args.dry_run:
        only_weights = isinstance(fork.origin, WeightVersion)
        lines += [*describe_plan(fork.planned), NOTHING_WRITTEN]
        value = format_plan_json(fork.planned) | {"checkpoint": None if only_weights else fork.origin.step}
        value["weights"] = str(fork.origin) if only_weights else None
        value["changes"] = [format_change_json(change) for change in fork.changes]
        print_result(args.json, value, lines)
        return 0
    if not (args.json or args.parsable):
        print("\n".join(lines))
    return submit_and_report(fork.planned, args, fork.trial, fork.recovery)
