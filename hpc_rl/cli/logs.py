"""`hpc-rl logs <trial>`: show the logs of one attempt's roles, or list the log files."""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_rl.cli import list as listing
from hpc_rl.cli.options import CommandParser, Count, Namespace, print_result
from hpc_rl.core.errors import ConfigError, TrialStateError
from hpc_rl.core.files import Tail, load_last_lines
from hpc_rl.core.trial import Trial
from hpc_rl.status.log_files import EVERY_RANK, choose, collect, describe_nothing
from hpc_rl.status.scheduler_view import TrialWatch
from hpc_rl.status.trial_status import load_status

ROLES = (
    "trainer",
    "rollout",
    "server",
    "serveragent",
    "sglang",
    "vllm",
    "environment",
    "environmentagent",
    "supervisor",
    "job",
)
ROLE_HELP = "role; `job` is the job script, `serveragent` the process that starts the servers of a node"
FILTERS = ("role", "index", "incarnation", "attempt", "rank")
WHOLE = 1 << 40  # lines
TICK_S = 0.5


def make_parser() -> CommandParser:
    made = CommandParser(
        "Show logs: by default of the newest attempt, its newest trainer and its supervisor."
    )
    made.add_trial("the one that runs, else the newest")
    made.add_argument("--role", choices=ROLES, help=ROLE_HELP)
    made.add_argument("--index", type=Count, help="replica of the role")
    incarnation = "start of the role within the attempt (default: the newest)"
    made.add_argument("--incarnation", type=Count, help=incarnation)
    attempt = "attempt, as status names it (default: the newest with a matching log)"
    made.add_argument("--attempt", help=attempt)
    rank = "rank, if ranks have separate files, or `all` (default: rank 0)"
    made.add_argument("--rank", type=_parse_rank, metavar="RANK", help=rank)
    lines = "number of lines from the end (default: 40)"
    made.add_argument("-n", "--lines", type=Count, default=40, help=lines)
    follow = "wait for the first line, and show new lines until the trial is over"
    made.add_flag("-f", "--follow", help=follow)
    made.add_flag("--list", help="list the files instead")
    made.add_json("the list")
    return made


def _parse_rank(text: str | int) -> str | int:
    """Return a rank, or EVERY_RANK."""
    text = str(text)  # jsonargparse may convert a value twice
    if text == EVERY_RANK:
        return EVERY_RANK
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid rank: give its number, or {EVERY_RANK}")
    return int(text)


def main(args: Namespace) -> int:
    if args.json and not args.list:
        raise ConfigError("--json requires --list: it lists the files; the logs themselves are text.")
    trial = listing.find_trial(args.trial)
    if args.follow and not args.list:
        return _follow(trial, args)
    found = collect(load_status(trial))
    if args.list:
        rows = [asdict(log) | {"bytes": log.path.stat().st_size} for log in found]
        lines = [
            f"  {row['bytes']:>12,}  {log.format_title(trial)}" for row, log in zip(rows, found, strict=True)
        ]
        print_result(args.json, rows, [f"in {trial.dir}", *lines])
        return 0
    if not found:
        print(describe_nothing(trial))
        return 0
    chosen = choose(trial, found, _list_filters(args))
    for number, log in enumerate(chosen):
        if len(chosen) > 1:
            print(f"{chr(10) if number else ''}==> {log.format_title(trial)} <==")
        print("\n".join(load_last_lines(log.path, args.lines) or ["(empty)"]))
    return 0


def _list_filters(args: Namespace) -> dict[str, Any]:
    return {key: getattr(args, key) for key in FILTERS if getattr(args, key) is not None}


def _follow(trial: Trial, args: Namespace) -> int:
    """Print new lines of the chosen logs, also of newer incarnations, until the trial is over."""
    tails: dict[Path, Tail] = {}
    watch, shown, reported = TrialWatch(trial), None, ""
    while True:
        status = watch.poll()
        try:
            chosen = choose(trial, collect(status), _list_filters(args))
        except TrialStateError as nothing:
            if status.over:
                raise
            chosen = []
            waiting = str(nothing) if not tails else ""
            if waiting and waiting != reported:
                print(f"hpc-rl: waiting: {waiting}", file=sys.stderr)
                reported = waiting
        newer = bool(tails)  # later files are shown from their beginning
        for log in chosen:
            tail = tails.setdefault(log.path, Tail(log.path, WHOLE if newer else args.lines))
            lines = tail.poll(to_the_end=status.over)
            if lines and shown != log.path:
                print(f"==> {log.format_title(trial)} <==")
                shown = log.path
            for line in lines:
                print(line)
        sys.stdout.flush()
        if status.over:
            return 0
        time.sleep(TICK_S)
