"""`hpc-rl quickstart`: hands over to `python -m hpc_rl.tools.quickstart_trial`, which needs torch."""

import os
import sys

from hpc_rl.cli.options import CommandParser, Count, Namespace
from hpc_rl.config.load.load import load
from hpc_rl.examples.methods import METHODS
from hpc_rl.render.jinja_environment import find_template_root
from hpc_rl.trials.conversion import require_torch


def make_parser() -> CommandParser:
    made = CommandParser(
        "Make a toy model and a task, train the model on this machine, and show its progress.",
        "What else is given goes to the GRPO trial, as to `hpc-rl submit`: total_train_steps=20",
    )
    of = "grpo: a model learns sums (the default); teacher: a model learns to give hints to another"
    made.add_argument("--method", choices=list(METHODS), default="grpo", help=of)
    folder = "directory for models, task and trials (default: ./quickstart)"
    made.add_argument("--dir", default="quickstart", help=folder)
    made.add_argument("--seed", type=Count, default=1, help="seed of models, task and training (default: 1)")
    made.add_flag("--only_prepare", help="make the models and the task, then stop")
    made.add_overrides()
    return made


def main(args: Namespace) -> int:
    require_torch("quickstart trains a model here")
    # What the GRPO trial would refuse after the preparation is refused before it.
    config = f"{METHODS[args.method].config}.yaml"
    load([find_template_root() / "configs" / "quickstart" / config], args.overrides)
    where = os.path.abspath(os.path.expanduser(args.dir))
    command = [sys.executable, "-m", "hpc_rl.tools.quickstart_trial", "--method", args.method]
    command += ["--dir", where, "--seed", str(args.seed)]
    sys.stdout.flush()
    os.execv(sys.executable, [*command, *(["--only_prepare"] if args.only_prepare else []), *args.overrides])
