"""The median rule by hand-worked numbers, and its request to stop."""

import pytest

from hpc_rl.core.callbacks import Event
from hpc_rl.core.sweep import Sweep, SweepRecord, SweepTrial, find_sweep_of
from hpc_rl.core.trial import load_object, write_json
from hpc_rl.stats.median_rule import MedianRule, compute_bar, find_best


def test_the_bar_is_the_median_of_running_means():
    others = [[(1, 0.0), (2, 1.0)], [(1, 2.0), (2, 2.0), (3, 8.0)], [(1, 3.0), (2, 5.0)], [(1, 99.0)]]
    assert compute_bar(others, 2) == 2.0, "of 0.5, 2 and 4: the last one has not reached step 2"
    assert compute_bar(others, 1) == 2.5, "of 0, 2, 3 and 99"
    assert compute_bar(others, 3) is None, "only one has reached step 3"


def test_the_best_value_counts_up_to_the_step():
    curve = [(1, 0.3), (2, 0.1), (3, 0.9)]
    assert (find_best(curve, 2, False), find_best(curve, 2, True), find_best([], 2, True)) == (0.3, 0.1, None)


@pytest.fixture
def trials(make_fake_trial, tmp_path):
    """Five trials of the sweep exp/s; trial number n has the reward n / 10 at each of 4 steps."""
    made = [make_fake_trial(tmp_path / "runs", name=f"s-{number}") for number in range(5)]
    for number, one in enumerate(made):
        one.job("7")
        one.lineage(0, 0, "7.0")
        for step in range(1, 5):
            one.row("7.0", {"step": step, "reward": number / 10, "lineage": 0})
    sweep = Sweep(made[0].trial.dir.parent / "s.sweep")
    names = tuple(SweepTrial(name=one.trial.name) for one in made)
    sweep.dir.mkdir()
    record = SweepRecord(name="s", trials=names, metric="reward", stop_from=3)
    write_json(sweep.record_path, record.to_json())
    return [one.trial for one in made]


def judge(trial, step, **more) -> dict:
    MedianRule().on_step(Event(step=step, trial_dir=trial.dir, job_id="7", **more))
    return load_object(trial.cancel_intent("7"))


def test_a_trial_below_the_median_asks_to_stop(trials):
    assert find_sweep_of(trials[0])[1].metric == "reward"
    assert not judge(trials[0], 2), "not before stop_from"
    assert not judge(trials[0], 3, is_check=True)
    MedianRule().on_evaluation(Event(step=3, trial_dir=trials[0].dir, job_id="7"))
    assert not load_object(trials[0].cancel_intent("7")), "the metric is one of steps"
    assert "up to step 3 is 0, below 0.25, the median" in judge(trials[0], 3)["reason"]
    assert not judge(trials[4], 3) and not judge(trials[3], 3)
    assert judge(trials[1], 3)


def test_a_trial_of_no_sweep_is_left_alone(fake_trial):
    fake_trial.run_to(5)
    assert not judge(fake_trial.trial, 5)
