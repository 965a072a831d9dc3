"""The learning curve on a terminal."""

import pytest

from hpc_rl.status.curve import make_learning_curve


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_no_point_is_hidden(value):
    """The legend, which has two of these signs itself, covers no value."""
    train = [(step, value - 0.2) for step in range(1, 61)]
    heldout = [(step, value) for step in range(0, 61, 10)]
    assert make_learning_curve(train, heldout).count("●") == 2 + len(heldout)


def test_a_gain_may_be_negative():
    drawn = make_learning_curve([(1, -0.1), (2, 0.1)], [(0, -0.05), (2, 0.2)], "accuracy delta")
    assert drawn.count("●") == 2 + 2
    assert "accuracy delta" in drawn.splitlines()[-1]


def test_without_held_out_prompts_there_is_still_a_curve():
    drawn = make_learning_curve([(1, 0.1), (2, 0.3)], [])
    assert "training prompts" in drawn
    assert "held-out" not in drawn
