"""`hpc-rl quickstart`: hands over to `python -m hpc_rl.app.quickstart_trial`, which needs torch."""

import importlib.util
import os
import sys

from hpc_rl.cli.options import ArgumentParser, Count, Namespace, add_overrides, new_parser
from hpc_rl.errors import ConfigError


def parser() -> ArgumentParser:
    made = new_parser(
        "Make a toy model and an arithmetic task, train the model on this machine, and show what it learnt.",
        epilog="What else is given goes to the GRPO trial, as to `hpc-rl submit`: total_train_steps=20",
    )
    made.add_argument("--dir", default="quickstart", help="where everything goes (default: ./quickstart)")
    made.add_argument("--seed", type=Count, default=1, help="seed of everything (default: 1)")
    made.add_argument("--only_prepare", action="store_true", help="make the model and the task, then stop")
    add_overrides(made)
    return made


def run(args: Namespace) -> int:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "quickstart trains a model here, and torch is not installed: pip install 'hpc-rl[train]'"
        )
    refuse(args.overrides)
    where = os.path.abspath(os.path.expanduser(args.dir))
    command = [sys.executable, "-m", "hpc_rl.app.quickstart_trial", "--dir", where, "--seed", str(args.seed)]
    sys.stdout.flush()
    os.execv(sys.executable, [*command, *(["--only_prepare"] if args.only_prepare else []), *args.overrides])


def refuse(overrides: list[str]) -> None:
    """What the GRPO trial would refuse after the preparation is refused before it. Raises ConfigError."""
    from hpc_rl.config.loading.load import load
    from hpc_rl.render.jinja_environment import template_root

    load([template_root() / "configs" / "quickstart" / "grpo.yaml"], overrides)
