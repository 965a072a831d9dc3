"""Axes of curves: the amounts of tokens and hours at each step."""

import pytest

from hpc_rl.stats.read import History
from hpc_rl.status.goodput import AttemptUse, Bucket, Goodput, Span
from hpc_rl.status.progress import get_axis_title, measure_progress, move_to_axis

T0 = 1_790_000_000.0
HOUR_S = 3600
STEPS = [
    {"step": step, "time": T0 + when * HOUR_S, "num_tokens": 10 * step} for step, when in ((1, 1), (2, 4))
]


@pytest.fixture
def use():
    """Two attempts with 4 devices, each of 2 hours, an hour apart, and a server job of one device."""
    spans = [Span(T0, T0 + 1, Bucket.TRAIN)]
    first = AttemptUse("7.0", T0, T0 + 2 * HOUR_S, 4, spans=spans)
    second = AttemptUse("7.1", T0 + 3 * HOUR_S, T0 + 5 * HOUR_S, 4, waited_s=HOUR_S, spans=spans)
    return Goodput([first, second, AttemptUse("8.0", T0, T0 + HOUR_S, 1)], on_gpus=True, queued_s=HOUR_S)


@pytest.mark.parametrize(
    "axis, expected",
    [
        ("step", [(1, 1), (2, 2)]),
        ("tokens", [(1, 10), (2, 30)]),
        ("hours", [(1, 1), (2, 3)]),  # neither the queue nor the other job
        ("gpu_hours", [(1, 5), (2, 13)]),
    ],
)
def test_an_axis_sums_what_training_had_cost(use, axis, expected):
    assert measure_progress(axis, History(steps=STEPS), use) == [
        (step, pytest.approx(x)) for step, x in expected
    ]


def test_a_trial_without_token_counts_has_no_such_axis(use):
    assert measure_progress("tokens", History(steps=[{"step": 1, "time": T0}]), use) == []
    assert move_to_axis([(1, 0.5)], []) == []


def test_evaluations_between_and_beside_known_steps_are_placed():
    progress = [(1, 10.0), (3, 30.0)]
    curve = [(0, 0.1), (1, 0.2), (2, 0.3), (3, 0.4), (9, 0.5)]
    assert move_to_axis(curve, progress) == [(0.0, 0.1), (10.0, 0.2), (20.0, 0.3), (30.0, 0.4), (30.0, 0.5)]
    continued = [(6, 5.0), (7, 10.0)]  # a fork begins at a later step
    assert move_to_axis([(2, 0.0), (5, 0.1), (6, 0.2)], continued) == [(0.0, 0.0), (0.0, 0.1), (5.0, 0.2)]


def test_trials_without_gpus_have_process_hours():
    assert get_axis_title("gpu_hours", False) == "process-hours"
