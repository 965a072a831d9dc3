"""`hpc-rl quickstart`: hands over to `python -m hpc_rl.app.quickstart_trial`, whose trials need torch, which nothing here imports."""

from __future__ import annotations

import importlib.util
import os
import sys

from hpc_rl.cli.options import count, new_parser
from hpc_rl.errors import ConfigError


def run(argv: list[str]) -> int:
    parser = new_parser(
        "quickstart",
        "Make a toy model and an arithmetic task, train the model on this machine, and show what it learnt.",
        epilog="What else is given goes to the GRPO trial, as to `hpc-rl submit`: total_train_steps=20",
    )
    parser.add_argument("--dir", default="quickstart", help="where everything goes (default: ./quickstart)")
    parser.add_argument("--seed", type=count, default=1, help="seed of everything (default: 1)")
    parser.add_argument(
        "--only_prepare", "--only-prepare", action="store_true", help="make the model and the task, then stop"
    )
    args, rest = parser.parse_known_args(argv)
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "quickstart trains a model here, and torch is not installed: pip install 'hpc-rl[train]'"
        )
    refuse(rest)
    where = os.path.abspath(os.path.expanduser(args.dir))
    command = [sys.executable, "-m", "hpc_rl.app.quickstart_trial", "--dir", where, "--seed", str(args.seed)]
    sys.stdout.flush()
    os.execv(sys.executable, [*command, *(["--only_prepare"] if args.only_prepare else []), *rest])


def refuse(overrides: list[str]) -> None:
    """What the GRPO trial would refuse after the preparation is refused before it. Raises ConfigError."""
    from hpc_rl.config.loading.load import load
    from hpc_rl.render.roots import template_root

    load([template_root() / "configs" / "quickstart" / "grpo.yaml"], overrides)
