"""The command line of a side: grpo_ours.py and grpo_trl.py have the same."""

import argparse
from pathlib import Path


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Return the arguments `model`, `rows`, `steps`, `lr`, `seed` and `until`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--until", type=float)
    return parser.parse_args()
