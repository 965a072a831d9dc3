"""plot: metrics of trials in the terminal."""

import pytest

from hpc_rl.cli import plot
from hpc_rl.cli.__main__ import main
from hpc_rl.trials import trial_index


@pytest.fixture(autouse=True)
def trials(make_fake_trial, tmp_path, state_home):
    for name, last in (("short", 5), ("long", 50)):
        fake = make_fake_trial(tmp_path / "runs", name=name)
        fake.run_to(last)
        if name == "long":
            fake.row("7.0", {"step": 51, "time": 1_790_000_099.0, "lineage": 0, "accuracy": 0.5})
        trial_index.record_trial(fake.trial)


def test_a_chart_has_a_line_for_each_trial_and_its_scale(capsys):
    assert main(["plot", "short", "long", "--metric", "reward"]) == 0
    chart = capsys.readouterr().out
    assert "aa short" in chart and "without" not in chart
    assert "bb long" in chart
    assert chart.splitlines()[-1].split() == ["reward", "step"]
    assert "0.50" in chart  # the reward of step 50 is 0.5
    assert max(len(line) for line in chart.splitlines()) <= 120


def test_one_trial_has_its_evaluations_and_its_reward(capsys):
    assert main(["plot", "long"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert "held-out" in first
    assert main(["plot", "short", "long", "--metric", "accuracy"]) == 0
    assert capsys.readouterr().out.endswith("\nwithout accuracy: short\n")
    assert "reward" in second


def test_a_metric_that_no_trial_has_is_refused_with_the_nearest(capsys):
    assert main(["plot", "short", "--metric", "rewrd"]) != 0
    assert "did you mean reward?" in capsys.readouterr().err


def test_only_steps_are_smoothed(make_fake_trial, tmp_path, monkeypatch, capsys):
    fake = make_fake_trial(tmp_path / "runs", name="evaluated")
    fake.run_to(4)
    fake.evaluation("7.0", 4, 0.75)
    trial_index.record_trial(fake.trial)
    drawn = {}
    monkeypatch.setattr(
        plot, "draw_plot", lambda lines, _dots, metric, *_, **__: drawn.update({metric: lines}) or ""
    )
    assert main(["plot", "evaluated", "--metric", "held-out,eval_reward,reward", "--smooth", "10"]) == 0
    assert drawn["held-out"] == {"held-out": [(0, 0.31), (4, 0.75)]}
    assert drawn["eval_reward"] == {"eval_reward": [(0, 0.31), (4, 0.75)]}
    assert drawn["reward"]["reward"][-1] == (4, pytest.approx(0.025))


def test_curves_are_drawn_against_tokens_or_hours(make_fake_trial, tmp_path, monkeypatch, capsys):
    fake = make_fake_trial(tmp_path / "runs", name="counted")
    fake.run_to(0)
    for step in (1, 2):
        row = {"step": step, "time": 1_790_000_000.0 + 3600 * step, "lineage": 0}
        fake.row("7.0", row | {"num_tokens": 100, "reward": 0.5})
    trial_index.record_trial(fake.trial)
    drawn = {}
    monkeypatch.setattr(plot, "draw_plot", lambda lines, *_, x_title: drawn.update({x_title: lines}) or "")
    for axis in ("tokens", "hours"):
        assert main(["plot", "counted", "--metric", "reward", "--x", axis]) == 0
    assert drawn["tokens that were trained"] == {"reward": [(100, 0.5), (200, 0.5)]}
    (first, _), (second, _) = drawn["hours that nodes were held"]["reward"]
    assert second - first == pytest.approx(1.0)
    assert main(["plot", "counted", "--x", "days"]) == 2
    assert "gpu_hours" in capsys.readouterr().err
