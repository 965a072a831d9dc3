"""`hpc-rl fork <trial> <name>`: a new trial that begins with a checkpoint of another one."""

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.generation import Found
from hpc_rl.cli import recover, submit
from hpc_rl.cli.options import CommandParser, Namespace, print_result
from hpc_rl.config.options.experiment import Config, last_step
from hpc_rl.core.errors import ConfigError, NothingToResume
from hpc_rl.core.trial import Trial
from hpc_rl.datasets.rows import fingerprint_in_passing
from hpc_rl.trials import (
    submission,
    trial_index,
)
from hpc_rl.trials.checklist import plan_of
from hpc_rl.trials.first_start import Recovery, sound_steps
from hpc_rl.trials.forking import changes_of_fork, give_checkpoint, new_trial

NAMES = ("experiment_name", "trial_name")  # which differ in each fork
DESCRIPTION = """Submit a new trial that begins with a checkpoint of another one: its weights, optimizer and
step. The other trial stays as it is, and may run."""
EPILOG = """Options may change, as --a.b VALUE or a.b=VALUE, all but trainer, model and kind of optimizer:
  hpc-rl fork first second --from 400 actor.optimizer.lr=1e-6
  hpc-rl fork first other/second total_train_steps=2000      in another experiment
Prompts of the steps before the checkpoint count as used."""


def parser() -> CommandParser:
    made = CommandParser(DESCRIPTION, EPILOG)
    made.add_trial()
    made.add_argument("name", help="name of the new trial, or experiment/name")
    checkpoint = "checkpoint (default: the newest sound one)"
    made.add_argument(
        "--from", dest="from_step", type=recover.checkpoint_step, metavar="STEP", help=checkpoint
    )
    made.add_flag("--dry_run", help="show what differs, the plan and what it needs; write and submit nothing")
    submit.add_outcome(made)
    made.add_overrides()
    return made


def run(args: Namespace) -> int:
    parent = trial_index.resolve(args.trial)
    found = _chosen(parent, args.from_step)
    experiment, _, name = args.name.rpartition("/")
    names = [f"trial_name={name}", *([f"experiment_name={experiment}"] if experiment else [])]
    loaded = recover.stored(parent, [*args.overrides, *names])
    trial = submission.trial_of(loaded.config)
    command = ["hpc-rl", *args.argv]
    with new_trial(trial):
        planned = submit.compared(plan_of(loaded, count_rows=args.dry_run), trial, args.no_check)
        config = planned.loaded.config
        differing = [one for one in changes_of_fork(parent, found, config) if one.name not in NAMES]
        _check_end(found.step, config)
        lines = [f"fork       of {parent} at checkpoint {found.step}", *submit.changed_lines(differing)]
        if args.dry_run:
            lines += [*submit.dry_lines(planned), submit.NOTHING_WRITTEN]
            changed = {"changes": [submit.change_json(change) for change in differing]}
            print_result(args.json, submit.dry_json(planned) | {"checkpoint": found.step} | changed, lines)
            return 0
        submission.render_to(planned.loaded, planned.plan, command=command)
        give_checkpoint(parent, found, trial, command)
    if not (args.json or args.parsable):
        print("\n".join(lines))
    return submit.submitted(planned, args, trial, Recovery())


def _check_end(step: int, config: Config) -> None:
    """Raise ConfigError where the fork would have nothing to train."""
    end = last_step(config, fingerprint_in_passing(config.train_dataset.path).get("rows"))
    if end is not None and end <= step:
        raise ConfigError(
            f"the fork would end at step {end}, and checkpoint {step} is there already: "
            f"add total_train_steps=N above {step}, or --from an earlier checkpoint."
        )


def _chosen(parent: Trial, step: int | None) -> Found:
    """Return the checkpoint of a step, or the newest sound one. Raises NothingToResume."""
    steps = sound_steps(parent)
    if not steps or step not in (None, *steps):
        what = "sound checkpoint" if step is None else f"sound checkpoint {step}"
        known = f"Allowed: {', '.join(map(str, steps))}." if steps else "It has none."
        raise NothingToResume(f"{parent} has no {what}. {known}")
    return generation.check(parent.generation(steps[0] if step is None else step))
