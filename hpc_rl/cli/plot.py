"""`hpc-rl plot <trial>…`: curves of metrics in the terminal, one line for each trial."""

import difflib
import shutil

from hpc_rl.cli.options import CommandParser, Count, Namespace
from hpc_rl.cli.report import find_named_trials, make_unique_names
from hpc_rl.core.errors import ConfigError, ExitCode
from hpc_rl.stats.read import HELD_OUT, History, is_held_out, load_history
from hpc_rl.status.curve import draw_plot, smooth

HEIGHT = 16  # lines of a chart
MAX_WIDTH = 120
DEFAULTS = ((HELD_OUT, "reward"), ("loss",))  # the first group with a metric that the trials have is drawn
EPILOG = """Metrics are the names in metrics.<incarnation>.jsonl, such as reward, loss, entropy, grad_norm,
seq_len, staleness_mean, step_s; held-out stands for evaluations. Separate several names by commas."""


def make_parser() -> CommandParser:
    made = CommandParser("Plot metrics of trials in the terminal, those of several in one chart.", EPILOG)
    made.add_trials("the one that runs, else the newest")
    made.add_argument("--metric", metavar="NAMES", help="what to plot (default: held-out,reward; else loss)")
    made.add_argument(
        "--smooth",
        type=Count,
        default=1,
        metavar="N",
        help="mean of N steps (default: 1); evaluations stay as they are",
    )
    return made


def main(args: Namespace) -> int:
    trials = find_named_trials(args.trial)
    histories = dict(zip(make_unique_names(trials), map(load_history, trials), strict=True))
    known = {name: None for history in histories.values() for name in history.metrics()}
    wanted = [name.strip() for name in args.metric.split(",")] if args.metric else []
    for name in wanted:
        check_metric(name, list(known))
    if not wanted:
        wanted = next(filter(None, ([name for name in names if name in known] for names in DEFAULTS)), [])
    if not wanted:
        print(f"{', '.join(histories)}: no metrics are written yet")
        return ExitCode.DONE
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    print("\n\n".join(draw_chart(histories, name, args.smooth, width) for name in wanted))
    return ExitCode.DONE


def check_metric(name: str, known: list[str]) -> None:
    """Raise ConfigError for a metric that no trial has."""
    if name not in known:
        near = [one for one in known if name in one][:5] or difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"these trials have {', '.join(known) or 'none yet'}."
        )
        raise ConfigError(f"--metric {name} is not a metric of these trials; {hint}")


def draw_chart(histories: dict[str, History], metric: str, num_smoothed: int, width: int) -> str:
    """Return one metric of all trials that have it."""
    curves = {name: history.curve(metric) for name, history in histories.items()}
    lines = {
        name if len(curves) > 1 else metric: smooth(
            points, 1 if is_held_out(metric) else max(1, num_smoothed)
        )
        for name, points in curves.items()
        if points
    }
    without = ", ".join(name for name, points in curves.items() if not points)
    return draw_plot(lines, {}, metric, width, HEIGHT) + (f"\nwithout {metric}: {without}" if without else "")
