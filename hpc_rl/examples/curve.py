"""A learning curve on a terminal."""

from statistics import fmean


def learning_curve(
    train: list[tuple[int, float]], heldout: list[tuple[int, float]], measure: str = "reward"
) -> str:
    """Return a text plot of (step, measure) pairs: `train` as a line, `heldout` as points."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(72, 14)
    values = [value for _, value in train]
    smooth = [fmean(values[max(0, i - 9) : i + 1]) for i in range(len(values))]
    least = min(0, *smooth, *(value for _, value in heldout))
    plotext.ylim(least, 1 + 0.3 * (1 - least))  # the legend is above all values
    plotext.yticks([0, 0.25, 0.5, 0.75, 1])
    label = "training prompts (mean of 10 steps)"
    plotext.plot([step for step, _ in train], smooth, label=label, marker="braille")
    if heldout:
        plotext.scatter(*zip(*heldout, strict=True), label="held-out prompts", marker="●")
    last = max(step for step, _ in (*train, *heldout))
    plotext.xticks(sorted({round(last * part / 5) for part in range(6)}))
    plotext.xlabel("step")
    plotext.ylabel(measure)
    return "\n".join(line.rstrip() for line in plotext.uncolorize(plotext.build()).rstrip().splitlines())
