"""`hpc-rl top [trial]…`: the current state of trials, redrawn until they are over."""

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_rl.cli.list import find_only_trial
from hpc_rl.cli.options import CommandParser, Namespace
from hpc_rl.core.errors import ConfigError, ExitCode
from hpc_rl.core.trial import Trial
from hpc_rl.trials import listing, trial_index

DESCRIPTION = """Watch trials until all are over, or until Ctrl-C: progress, wall time left, next save,
curves, parts of a step's time, staleness, queue, roles with their nodes and weights. Without a terminal it
prints a line for each change of a trial."""
PLAIN_EVERY_S = 5.0  # between lines if there is no terminal


def make_parser() -> CommandParser:
    made = CommandParser(DESCRIPTION)
    made.add_trials("all that run or wait, else the newest")
    every = "seconds between frames (default: 2)"
    made.add_argument("--every_s", type=float, default=2.0, metavar="S", help=every)
    made.add_flag("--once", help="show the trials once, and end")
    return made


def main(args: Namespace) -> int:
    if args.every_s <= 0:
        raise ConfigError(f"--every_s must be more than 0, got {args.every_s}")
    trials = [trial_index.resolve(name) for name in args.trial]
    if not trials:
        rows = listing.list_live_rows()
        trials = [Trial(Path(row["dir"])) for row in rows] or [find_only_trial(rows)]
    with contextlib.suppress(KeyboardInterrupt):  # the usual way to leave it
        draw(trials, args.every_s, args.once)
    return ExitCode.DONE


def draw(trials: Sequence[Trial], every_s: float, once: bool) -> None:
    """Show trials until all are over; with `once`, as they are now."""
    from rich.console import Console  # importing rich takes time
    from rich.live import Live
    from rich.text import Text

    from hpc_rl.status.follow import describe_progress, describe_trial_state
    from hpc_rl.status.top_view import TrialEye, describe_frame

    console = Console(file=getattr(sys.stdout, "stream", None), highlight=False, soft_wrap=True)
    eyes = [TrialEye(trial) for trial in trials]
    full = once or console.is_terminal
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop") if full and not once else None
    said: dict[Trial, str] = {}
    with live or contextlib.nullcontext():
        while True:
            views = [eye.look() for eye in eyes]
            if live is not None:
                live.update(Text(describe_frame(views)), refresh=True)
            elif once:
                print(describe_frame(views))
            else:
                for view in views:
                    line = f"{describe_trial_state(view.status)}  {describe_progress(view.status)}"
                    if said.get(view.status.trial) != line:
                        said[view.status.trial] = line
                        print(line, flush=True)
            if once or all(view.status.over for view in views):
                return
            time.sleep(every_s if full else max(every_s, PLAIN_EVERY_S))
