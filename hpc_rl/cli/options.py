"""What the parsers of all commands share. The standard argparse: options of a configuration are the loader's to read."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any


def new_parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """A parser for one command that refuses abbreviations and ends with exit code 2 on bad usage."""
    return argparse.ArgumentParser(
        prog=f"hpc-rl {command}",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_trial(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trial", help="a path, experiment/trial, or a trial name that only one trial has")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Where a configuration comes from."""
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file; several are laid over each other, left to right",
    )
    parser.add_argument(
        "--preset",
        action="append",
        default=[],
        metavar="NAME",
        help="atlas: its defaults, below the files; cpu: no GPU, over the files",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="profile of the cluster, below the files (hpc-rl templates list names them)",
    )


def add_json(parser: argparse._ActionsContainer, what: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def seconds(text: str) -> float:
    """Argument type: a time span that is not negative."""
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return float(text)


def count(text: str) -> int:
    """Argument type: a whole number from 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, sort_keys=True, default=str))
