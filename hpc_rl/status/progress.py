"""What training had cost at each step: tokens, hours, device-hours. Curves are drawn against it."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from hpc_rl.stats.read import Curve, History, is_number
from hpc_rl.status.goodput import Goodput

STEP = "step"
AXES = (STEP, "tokens", "hours", "gpu_hours")
HOUR_S = 3600.0


def get_axis_title(axis: str, on_gpus: bool) -> str:
    """Return the title of an axis. Trials without GPUs have process-hours."""
    titles = {
        STEP: "step",
        "tokens": "tokens that were trained",
        "hours": "hours that nodes were held",
        "gpu_hours": "GPU-hours" if on_gpus else "process-hours",
    }
    return titles[axis]


def measure_progress(axis: str, history: History, use: Goodput) -> Curve:
    """Return the amount of an axis after each step, sorted by step.

    `tokens` counts the batches that led to the final weights. Hours and device-hours also count what was
    lost, and start-up, but no time in the queue.
    """
    if axis == STEP:
        return [(row["step"], float(row["step"])) for row in history.steps]
    if axis == "tokens":
        found = [(row["step"], row.get("num_tokens")) for row in history.steps]
        known = [(step, float(value)) for step, value in found if is_number(value)]
        sums = accumulate(value for _, value in known)
        return [(step, total) for (step, _), total in zip(known, sums, strict=True)]
    times = [(row["step"], row["time"]) for row in history.steps if is_number(row.get("time"))]
    if axis == "hours":
        held = [(one, 1) for one in use.attempts if one.spans]  # attempts of a job of servers have none
    else:
        held = [(one, one.num_devices) for one in use.attempts]
    return [
        (step, sum(weight * max(0.0, min(time, one.end) - one.start) for one, weight in held) / HOUR_S)
        for step, time in times
    ]


def move_to_axis(curve: Curve, progress: Curve) -> list[tuple[float, float]]:
    """Return the points of a curve with amounts of an axis in place of steps.

    Amounts between known steps are interpolated; before the first they grow from 0 at the step before it.
    """
    if not progress:
        return []
    known = [(progress[0][0] - 1, 0.0), *progress]
    steps = [step for step, _ in known]
    return [(_interpolate(step, steps, known), value) for step, value in curve]


def _interpolate(step: int, steps: Sequence[int], known: Sequence[tuple[int, float]]) -> float:
    after = bisect_right(steps, step)
    if after == 0:
        return 0.0
    if after == len(known):
        return known[-1][1]
    (left, low), (right, high) = known[after - 1], known[after]
    return low + (high - low) * (step - left) / (right - left)
