"""`hpc-rl plot <trial>…`: curves of metrics in the terminal, one line for each trial."""

import difflib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_rl.cli.options import CommandParser, Count, Namespace
from hpc_rl.cli.report import find_named_trials, make_unique_names
from hpc_rl.core.errors import ConfigError, ExitCode
from hpc_rl.stats.read import HELD_OUT, Curve, History, is_held_out, load_history
from hpc_rl.status.curve import draw_plot, smooth
from hpc_rl.status.goodput import compute_goodput
from hpc_rl.status.progress import AXES, STEP, get_axis_title, measure_progress, move_to_axis
from hpc_rl.status.trial_status import load_status

HEIGHT = 16  # lines of a chart
MAX_WIDTH = 120
DEFAULTS = ((HELD_OUT, "reward"), ("loss",))  # the first group with a metric that the trials have is drawn
EPILOG = """Metrics are the names in metrics.<incarnation>.jsonl, such as reward, loss, entropy, grad_norm,
seq_len, staleness_mean, step_s; held-out stands for evaluations. Separate several names by commas."""


@dataclass
class Axis:
    """The horizontal axis of the charts."""

    name: str
    on_gpus: bool = False
    progress: dict[str, Curve] = field(default_factory=dict)  # by the name of the trial

    @property
    def title(self) -> str:
        return get_axis_title(self.name, self.on_gpus)

    def move(self, trial: str, curve: Curve) -> Sequence[tuple[float, float]]:
        return curve if self.name == STEP else move_to_axis(curve, self.progress[trial])


def make_parser() -> CommandParser:
    made = CommandParser("Plot metrics of trials in the terminal, several trials in one chart.", EPILOG)
    made.add_trials("the one that runs, else the newest")
    what = "what to plot (default: held-out,reward; else loss)"
    made.add_metrics("--metric", metavar="NAMES", help=what)
    axis = "horizontal axis (default: step); hours count while nodes were held"
    made.add_argument("--x", choices=AXES, default=STEP, help=axis)
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
    names = make_unique_names(trials)
    histories = dict(zip(names, map(load_history, trials), strict=True))
    axis = Axis(args.x)
    if args.x != STEP:
        now = time.time()
        uses = [compute_goodput(load_status(trial), now) for trial in trials]
        axis.on_gpus = any(use.on_gpus for use in uses)
        for name, use in zip(names, uses, strict=True):
            axis.progress[name] = measure_progress(args.x, histories[name], use)
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
    print("\n\n".join(draw_chart(histories, name, args.smooth, width, axis) for name in wanted))
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


def draw_chart(histories: dict[str, History], metric: str, num_smoothed: int, width: int, axis: Axis) -> str:
    """Return one metric of all trials that have it."""
    num_steps = 1 if is_held_out(metric) else max(1, num_smoothed)
    curves = {
        name: axis.move(name, smooth(history.curve(metric), num_steps)) for name, history in histories.items()
    }
    lines = {name if len(curves) > 1 else metric: points for name, points in curves.items() if points}
    without = ", ".join(name for name, points in curves.items() if not points)
    chart = draw_plot(lines, {}, metric, width, HEIGHT, x_title=axis.title)
    return chart + (f"\nwithout {metric}: {without}" if without else "")
