"""`hpc-rl list`: the trials of the index, newest first, from their files and at most one scheduler query."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_rl.cli.options import CommandParser, Namespace, align_columns, print_result
from hpc_rl.core.errors import TrialNameError
from hpc_rl.core.trial import Trial
from hpc_rl.status.formatting import flatten_line, format_duration, format_number
from hpc_rl.trials import trial_index
from hpc_rl.trials.listing import GONE, REWARD_STEPS, list_live_rows, list_rows, parse_states

EPILOG = f"""The mean reward is over the newest {REWARD_STEPS} steps; held-out is the newest evaluation (its
loss, if the trainer has no reward)."""
SORTED_BY: dict[str, Any] = {
    "name": lambda row: row["trial"],
    "state": lambda row: row["state"],
    **{key: lambda row, key=key: -_sort_key(row[key]) for key in ("time", "step", "reward", "held_out")},
}
NO_TRIALS = "no trials yet: `hpc-rl quickstart`, or `hpc-rl submit FILE`"


def make_parser() -> CommandParser:
    made = CommandParser("List the trials that this account submitted, newest first.", EPILOG)
    made.add_completed("name", nargs="*", help="only trials of this name, or experiment/name; * and ? match")
    declare_filters(made)
    order = "column to sort by: largest first, names from a to z"
    made.add_argument("--sort", choices=list(SORTED_BY), help=order)
    made.add_flag("--prune", help="remove trials whose directory is gone from the list")
    made.add_flag("--offline", help="do not query the scheduler")
    made.add_json("the list")
    return made


def declare_filters(made: CommandParser) -> None:
    """Declare the options that choose trials of the index."""
    experiment = "only trials of this experiment; * and ? match"
    made.add_argument("--experiment", metavar="NAME", help=experiment)
    made.add_argument("--state", metavar="NAMES", help="only trials in these states, such as done,failed")


def main(args: Namespace) -> int:
    pruned = trial_index.prune_index() if args.prune else []
    rows = list_rows(args.name, args.experiment, parse_states(args.state), args.offline, warn)
    if args.sort:
        rows.sort(key=SORTED_BY[args.sort])
    lines = [f"removed from the list: {entry.trial}  {entry.trial.dir}" for entry in pruned]
    filters = args.name or args.experiment or args.state
    lines += format_table(rows) if rows else ["no trial matches" if filters else NO_TRIALS]
    if any(row["state"] == GONE for row in rows):
        lines.append("`hpc-rl list --prune` removes trials whose directory is gone from the list.")
    print_result(args.json, rows, lines)
    return 0


def warn(text: str) -> None:
    """Print a sentence about an incomplete answer."""
    print(f"hpc-rl: {text}", file=sys.stderr)


def _sort_key(value: float | None) -> float:
    return float("-inf") if value is None else value


def find_trial(name: str | None) -> Trial:
    """Return the trial with a name, or, if that is empty, the one that a command without a name is about.

    Raises TrialNameError.
    """
    return trial_index.resolve(name) if name else find_only_trial(list_live_rows())


def find_only_trial(rows: Sequence[dict[str, Any]]) -> Trial:
    """Return the trial that a command without a name is about, and say which: the live one, else the newest.

    Raises TrialNameError if several are live, or there is none.
    """
    if len(rows) > 1:
        names = ", ".join(row["trial"] for row in rows)
        raise TrialNameError(f"{len(rows)} trials run or wait: name one of {names}.")
    found = [Trial(Path(row["dir"])) for row in rows]
    found += [entry.trial for entry in trial_index.list_entries() if not entry.gone]
    if not found:
        raise TrialNameError(NO_TRIALS)
    which = "which runs or waits" if rows else "the newest trial"
    print(f"hpc-rl: no trial is named; this is {found[0]}, {which} ({found[0].dir})", file=sys.stderr)
    trial_index.check_readable(found[0])
    return found[0]


def format_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return rows of trials as lines for people."""
    return list(map(flatten_line, _format_cells(rows)))


def _format_cells(rows: list[dict[str, Any]]) -> list[str]:
    now = time.time()
    cells = [["trial", "state", "job", "step", "mean reward", "held-out", "left", "submitted", "directory"]]
    for row in rows:
        total = f"/{row['total_steps']}" if row["total_steps"] else ""
        step = "" if row["step"] is None else f"{row['step']}{total}"
        left = "" if row["eta_s"] is None else format_duration(row["eta_s"])
        age = f"{format_duration(now - row['time'])} ago" if row["time"] else ""
        measured = ["" if row[key] is None else format_number(row[key]) for key in ("reward", "held_out")]
        job = row["job_id"] or ""
        cells.append([row["trial"], row["state"], job, step, *measured, left, age, row["dir"]])
    return align_columns(cells)
