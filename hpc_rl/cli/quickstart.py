"""`hpc-rl quickstart`: hands over to `python -m hpc_rl.app.quickstart`, whose trials need torch, which nothing here imports."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

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
    args, rest = parser.parse_known_args(argv)
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("quickstart trains a model here, and torch is not installed: pip install 'hpc-rl[train]'")
    where = str(Path(args.dir).expanduser().absolute())
    command = [sys.executable, "-m", "hpc_rl.app.quickstart", "--dir", where, "--seed", str(args.seed), *rest]
    sys.stdout.flush()
    os.execv(sys.executable, command)
