"""`hpc-rl fork <trial> <name>`: a new trial that begins with a checkpoint of another one."""

from hpc_rl.cli.options import CommandParser, Namespace, parse_checkpoint_step, print_result
from hpc_rl.cli.outcome import add_outcome, submit_and_report
from hpc_rl.cli.plan_text import NOTHING_WRITTEN, describe_plan, format_plan_json
from hpc_rl.cli.start_text import format_change_json, list_changes
from hpc_rl.trials import forking, prepare, submission, trial_index
from hpc_rl.trials.checklist import make_planned
from hpc_rl.trials.first_start import Recovery

NAMES = ("experiment_name", "trial_name")  # which differ in each fork
DESCRIPTION = """Submit a new trial that begins with a checkpoint of another one: its weights, optimizer and
step. The other trial stays as it is, and may run."""
EPILOG = """Options may change, as --a.b VALUE or a.b=VALUE, all but trainer, model and kind of optimizer:
  hpc-rl fork first second --from 400 actor.optimizer.lr=1e-6
  hpc-rl fork first other/second total_train_steps=2000      in another experiment
Prompts of the steps before the checkpoint count as used."""


def make_parser() -> CommandParser:
    made = CommandParser(DESCRIPTION, EPILOG)
    made.add_trial()
    made.add_argument("name", help="name of the new trial, or experiment/name")
    checkpoint = "checkpoint (default: the newest sound one)"
    made.add_argument("--from", dest="from_step", type=parse_checkpoint_step, metavar="STEP", help=checkpoint)
    made.add_flag("--dry_run", help="show what differs, the plan and what it needs; write and submit nothing")
    add_outcome(made)
    made.add_overrides()
    return made


def main(args: Namespace) -> int:
    parent = trial_index.resolve(args.trial)
    checkpoint = forking.choose_checkpoint(parent, args.from_step)
    experiment, _, name = args.name.rpartition("/")
    names = [f"trial_name={name}", *([f"experiment_name={experiment}"] if experiment else [])]
    loaded = prepare.load_stored(parent, [*args.overrides, *names])
    trial = submission.make_trial(loaded.config)
    command = ["hpc-rl", *args.argv]
    with forking.claim_trial(trial):
        planned = make_planned(loaded, count_rows=args.dry_run)
        planned = prepare.compare_with_cluster(planned, trial, args.no_check)
        config = planned.loaded.config
        changes = forking.find_changes(parent, checkpoint, config)
        changes = [change for change in changes if change.name not in NAMES]
        forking.check_end(checkpoint.step, config)
        lines = [f"fork       of {parent} at checkpoint {checkpoint.step}", *list_changes(changes)]
        if args.dry_run:
            lines += [*describe_plan(planned), NOTHING_WRITTEN]
            value = format_plan_json(planned) | {"checkpoint": checkpoint.step}
            value["changes"] = [format_change_json(change) for change in changes]
            print_result(args.json, value, lines)
            return 0
        submission.render_to(planned.loaded, planned.plan, command=command)
        forking.give_checkpoint(parent, checkpoint, trial, command)
    if not (args.json or args.parsable):
        print("\n".join(lines))
    return submit_and_report(planned, args, trial, Recovery())
