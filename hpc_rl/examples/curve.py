"""A learning curve on a terminal."""

from statistics import fmean


def learning_curve(train: list[tuple[int, float]], heldout: list[tuple[int, float]]) -> str:
    """Return a text plot of (step, reward) pairs: `train` as a line, `heldout` as points."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(72, 14)
    plotext.ylim(0, 1)
    rewards = [reward for _, reward in train]
    smooth = [fmean(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))]
    label = "training prompts (mean of 10 steps)"
    plotext.plot([step for step, _ in train], smooth, label=label, marker="braille")
    plotext.scatter(*zip(*heldout, strict=True), label="held-out prompts", marker="●")
    last = max(step for step, _ in (*train, *heldout))
    plotext.xticks(sorted({round(last * part / 5) for part in range(6)}))
    plotext.xlabel("step")
    plotext.ylabel("reward")
    return "\n".join(line.rstrip() for line in plotext.uncolorize(plotext.build()).rstrip().splitlines())
