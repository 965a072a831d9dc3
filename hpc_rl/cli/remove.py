"""`hpc-rl remove [trial]…`: remove the directories of trials, after asking."""

import sys
import time
from pathlib import Path

from hpc_rl.cli import du
from hpc_rl.cli.list import declare_filters, warn
from hpc_rl.cli.options import CommandParser, Namespace, Seconds, print_json
from hpc_rl.core.errors import ConfigError, ExitCode, SchedulerError, TrialBusy
from hpc_rl.core.records import TrialState
from hpc_rl.core.trial import Trial
from hpc_rl.status.formatting import format_size
from hpc_rl.trials import listing, trial_index
from hpc_rl.trials.removal import remove_trial
from hpc_rl.trials.submission import check_idle

EPILOG = """examples:
  hpc-rl remove first second
  hpc-rl remove --state failed,cancelled --older_than_days 30 --dry_run
A filter, or a name with * or ?, selects among your trials that are over."""
DAY_S = 86400.0


def make_parser() -> CommandParser:
    made = CommandParser(
        "Remove trials: their checkpoints, weights, logs and exports. Shows the freed space, and asks first.",
        EPILOG,
    )
    made.add_trials("the trials that the filters choose")
    declare_filters(made)
    age = "only those last submitted longer ago"
    made.add_argument("--older_than_days", type=Seconds, metavar="DAYS", help=age)
    made.add_flag("--keep_exports", help="leave the directory `exports/` of each trial where it is")
    made.add_flag("--dry_run", help="show the files, and remove nothing")
    made.add_flag("--yes", help="do not ask")
    made.add_json("what was removed; needs --yes, or --dry_run,")
    return made


def main(args: Namespace) -> int:
    if args.json and not (args.yes or args.dry_run):
        raise ConfigError("remove --json can't ask for your consent: add --yes")
    trials = _choose_trials(args)
    idle = [trial for trial in trials if _is_idle(trial, alone=len(trials) == 1)]
    rows = du.measure_sizes(idle, without=["exports"] if args.keep_exports else [])
    size = format_size(sum(row["bytes"] for row in rows))
    if not args.json:
        print(
            "\n".join(
                [*du.format_table(rows), *(f"  {row['dir']}" for row in rows)]
                if rows
                else ["no trial matches the names and options"]
            )
        )
    if args.dry_run or not rows:
        return _describe_trials(args, rows, f"{size} would be freed; nothing is removed" if rows else "")
    if not (args.yes or _ask(len(rows), size)):
        print("nothing is removed")
        return ExitCode.REFUSED
    for row in rows:
        remove_trial(Trial(Path(row["dir"])), args.keep_exports)
    kept = [str(one.dir / "exports") for one in idle if (one.dir / "exports").is_dir()]
    return _describe_trials(
        args, rows, "\n".join([f"removed, {size} freed", *(f"kept {one}" for one in kept)])
    )


def _describe_trials(args: Namespace, rows: list[dict], text: str) -> int:
    if args.json:
        print_json([{"trial": row["trial"], "dir": row["dir"], "freed_bytes": row["bytes"]} for row in rows])
    elif text:
        print(text)
    return ExitCode.DONE


def _choose_trials(args: Namespace) -> list[Trial]:
    """Return the trials with the names, or the trials that match the filters. Raises ConfigError."""
    filters = (
        args.experiment,
        args.state,
        args.older_than_days is not None,
        *map(trial_index.is_pattern, args.trial),
    )
    if not any(filters):
        if not args.trial:
            raise ConfigError("name trials, or choose them by --experiment, --state or --older_than_days")
        return [trial_index.resolve(name) for name in dict.fromkeys(args.trial)]
    over = [state for state in TrialState if state.is_over]
    wanted = listing.parse_states(args.state) if args.state else over
    if live := [state for state in wanted if state not in over]:
        raise ConfigError(
            f"remove can't take trials that are {', '.join(live)}; allowed states: {', '.join(over)}"
        )
    rows = listing.list_rows(args.trial, args.experiment, wanted, warn=warn)
    newest = time.time() - DAY_S * (args.older_than_days or 0.0)
    return [Trial(Path(row["dir"])) for row in rows if row["state"] != listing.GONE and row["time"] <= newest]


def _is_idle(trial: Trial, alone: bool) -> bool:
    """Return whether no job of a trial lives. If one lives, print a line, or raise for a single trial."""
    try:
        check_idle(trial)
    except (TrialBusy, SchedulerError) as error:
        if alone:
            raise
        print(f"hpc-rl: {trial} is not removed: {error}", file=sys.stderr)
        return False
    return True


def _ask(number: int, size: str) -> bool:
    """Ask on the terminal. Raises ConfigError without a terminal."""
    if not sys.stdin.isatty():
        raise ConfigError("the input is not a terminal, so remove can't ask: add --yes")
    what = "it" if number == 1 else f"these {number} trials"
    return input(f"Remove {what}, and free {size}? [y/N] ").strip().lower() in ("y", "yes")
