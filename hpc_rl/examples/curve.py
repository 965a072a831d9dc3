"""A learning curve on a terminal."""

from statistics import fmean


def learning_curve(
    train: list[tuple[int, float]], heldout: list[tuple[int, float]], width: int = 72, height: int = 14
) -> str:
    """Return a text plot of (step, reward) pairs: `train` as a line, `heldout` as points."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.ylim(0, 1)
    plotext.plot(
        *zip(*_smoothed(train), strict=True), label="training prompts (mean of 10 steps)", marker="braille"
    )
    plotext.scatter(*zip(*heldout, strict=True), label="held-out prompts", marker="●")
    last = max(step for step, _ in (*train, *heldout))
    plotext.xticks(sorted({round(last * part / 5) for part in range(6)}))
    plotext.xlabel("step")
    plotext.ylabel("reward")
    return "\n".join(line.rstrip() for line in plotext.uncolorize(plotext.build()).rstrip().splitlines())


def _smoothed(points: list[tuple[int, float]], window: int = 10) -> list[tuple[int, float]]:
    values = [value for _, value in points]
    return [(step, fmean(values[max(0, i - window + 1) : i + 1])) for i, (step, _) in enumerate(points)]
