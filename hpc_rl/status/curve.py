"""Curves on a terminal, by plotext."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from hpc_rl.core.errors import ConfigError

Points = Sequence[tuple[int, float]]
Places = Sequence[tuple[float, float]]  # points on any axis


def smooth(points: Points, num_steps: int) -> list[tuple[int, float]]:
    """Return each value as the mean of the newest `num_steps` values up to it."""
    values = [value for _, value in points]
    return [(step, fmean(values[max(0, i + 1 - num_steps) : i + 1])) for i, (step, _) in enumerate(points)]


def make_learning_curve(train: Points, heldout: Points, measure: str = "reward") -> str:
    """Return a text plot of (step, measure) pairs: `train` as a line, `heldout` as points."""
    lines = {"training prompts (mean of 10 steps)": smooth(train, 10)}
    drawn = [value for points in (*lines.values(), heldout) for _, value in points]
    least = min(0, *drawn)
    scale = (least, 1 + 0.3 * (1 - least))  # the legend is above all values
    return draw_plot(lines, {"held-out prompts": heldout}, measure, 72, 14, scale, [0, 0.25, 0.5, 0.75, 1])


def draw_plot(
    lines: Mapping[str, Places],
    dots: Mapping[str, Places],
    title: str,
    width: int,
    height: int,
    scale: tuple[float, float] | None = None,
    ticks: list[float] | None = None,
    x_title: str = "step",
) -> str:
    """Return a text plot of named series of (step, value), `width` columns wide and `height` lines high.

    `x_title`: what stands in place of the steps, if not steps.

    Raises ConfigError if plotext is not installed.
    """
    plot = _load_plotext()
    plot.clear_figure()
    plot.theme("clear")
    plot.plot_size(width, height)
    if scale:
        plot.ylim(*scale)
        plot.yticks(ticks)
    for label, points in lines.items():
        if points:
            plot.plot(
                *zip(*points, strict=True), label=label, marker=pick_next_marker(len(lines), label, lines)
            )
    for label, points in dots.items():
        if points:
            plot.scatter(*zip(*points, strict=True), label=label, marker="●")
    steps = [step for points in (*lines.values(), *dots.values()) for step, _ in points]
    last = max(steps, default=1)
    fifths = [last * part / 5 for part in range(6)]
    plot.xticks(sorted({round(tick) if last >= 5 else float(f"{tick:.3g}") for tick in fifths}))
    plot.xlabel(x_title)
    plot.ylabel(title)
    return "\n".join(line.rstrip() for line in plot.uncolorize(plot.build()).rstrip().splitlines())


def pick_next_marker(count: int, label: str, lines: Mapping[str, Places]) -> str:
    """Return the next sign for one of several lines without colour; a single line is drawn finer."""
    return "braille" if count == 1 else "abcdefgh"[list(lines).index(label) % 8]


def _load_plotext() -> Any:
    try:
        import plotext
    except ImportError as error:
        raise ConfigError(f"curves need plotext ({error}): pip install 'hpc-rl[report]'") from error
    return plotext
