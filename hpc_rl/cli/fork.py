"""`hpc-rl fork <trial> <name>`: a new trial that begins with a checkpoint of another one."""

from hpc_rl.cli.options import CommandParser, Namespace, parse_checkpoint_step, print_result
from hpc_rl.cli.outcome import add_outcome, submit_and_report
from hpc_rl.cli.plan_text import NOTHING_WRITTEN, describe_plan, format_plan_json
from hpc_rl.cli.start_text import format_change_json, list_changes
from hpc_rl.core.types import WeightVersion
from hpc_rl.trials import forking, prepare, submission
from hpc_rl.trials.checklist import make_planned
from hpc_rl.trials.first_start import Recovery

NAMES = ("experiment_name", "trial_name")  # which differ in each fork
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
    made.add_flag("--dry_run", help="show what differs, the plan and what it needs; write and submit nothing")
    add_outcome(made)
    made.add_overrides()
    return made


def main(args: Namespace) -> int:
    parent, step = forking.resolve_parent(args.trial, args.from_step)
    origin = forking.choose_origin(parent, step)
    only_weights = isinstance(origin, WeightVersion)
    experiment, _, name = args.name.rpartition("/")
    names = [f"trial_name={name}", *([f"experiment_name={experiment}"] if experiment else [])]
    overrides = [*args.overrides, *names]
    loaded = prepare.load_stored(parent, overrides)
    trial = submission.make_trial(loaded.config)
    command = ["hpc-rl", *args.argv]
    with forking.claim_trial(trial):
        planned = make_planned(loaded, count_rows=args.dry_run)
        planned = prepare.compare_with_cluster(planned, trial, args.no_check)
        config = planned.loaded.config
        changes = forking.find_changes(parent, origin, config)
        changes = [change for change in changes if change.name not in NAMES]
        forking.check_start(origin, config)
        lines = [forking.describe_origin(parent, origin), *list_changes(changes)]
        if args.dry_run:
            lines += [*describe_plan(planned), NOTHING_WRITTEN]
            value = format_plan_json(planned) | {"checkpoint": None if only_weights else origin.step}
            value["weights"] = str(origin) if only_weights else None
            value["changes"] = [format_change_json(change) for change in changes]
            print_result(args.json, value, lines)
            return 0
        if isinstance(origin, WeightVersion):
            folder = forking.write_weights(parent, origin, trial, config)
            of_weights = forking.list_weights_options(loaded.config, folder)
            planned = make_planned(prepare.load_stored(parent, [*overrides, *of_weights]))
            planned = prepare.compare_with_cluster(planned, trial, args.no_check)
            submission.render_to(planned.loaded, planned.plan, command=command)
            forking.record_weights(parent, origin, trial, command)
        else:
            submission.render_to(planned.loaded, planned.plan, command=command)
            forking.give_checkpoint(parent, origin, trial, command)
    if not (args.json or args.parsable):
        print("\n".join(lines))
    return submit_and_report(planned, args, trial, None if only_weights else Recovery())
