"""Results of a sweep: means and deviations over seeds by hand, and the best."""

import pytest

from hpc_rl.core.sweep import Sweep, SweepRecord, SweepTrial
from hpc_rl.core.trial import write_json
from hpc_rl.status.sweep_report import make_sweep_report
from hpc_rl.status.trial_status import load_status

VALUES = {"a-1": 0.2, "a-2": 0.4, "b-1": 0.5, "b-2": 0.5}


@pytest.fixture
def sweep(make_fake_trial, tmp_path):
    """exp/s: two rates with two seeds each; a third rate has no value yet."""
    trials = []
    for name in (*VALUES, "c-1"):
        one = make_fake_trial(tmp_path / "runs", name=name)
        trials.append(SweepTrial(name=name, options={"lr": name[0], "seed": name[-1]}))
        if name in VALUES:
            one.job("7")
            one.lineage(0, 0, "7.0")
            one.evaluation("7.0", 0, 0.9)
            one.evaluation("7.0", 5, VALUES[name])
            write_json(one.trial.done, {"job_id": "7"})
    record = SweepRecord(name="s", trials=tuple(trials), metric="held-out")
    return Sweep(tmp_path / "runs" / "user" / "exp" / "s.sweep"), record


def report_of(sweep):
    where, record = sweep
    return make_sweep_report(
        where, record, {one.name: load_status(where.trial(one.name)) for one in record.trials}
    )


def test_means_and_deviations_are_over_seeds(sweep):
    report = report_of(sweep)
    groups = {group.options["lr"]: group for group in report.groups}
    assert [*groups] == ["b", "a", "c"], "the best first"
    assert (groups["b"].mean, groups["b"].deviation) == (0.5, 0.0)
    assert groups["a"].mean == pytest.approx(0.3)
    assert groups["a"].deviation == pytest.approx(0.1414214)
    assert (groups["c"].mean, groups["c"].values) == (None, ())
    assert (report.best_trial.value, report.best_group.options) == (0.5, {"lr": "b"})
    assert report.num_over == 4
    told = report.to_json()
    assert (told["best_trial"], told["best_options"]) == ("b-1", {"lr": "b"})


def test_a_lower_loss_is_better(sweep, make_fake_trial, tmp_path):
    where, record = sweep
    for name, loss in zip(VALUES, (3.0, 1.0, 2.0, 4.0), strict=True):
        trial = where.trial(name)
        with trial.attempt("7.0").metrics(0).open("a") as file:
            file.write(f'{{"step": 6, "loss": {loss}, "lineage": 0}}\n')
    report = report_of((where, SweepRecord(name="s", trials=record.trials, metric="loss")))
    assert report.lower_is_better
    assert (report.best_trial.name, report.best_group.options) == ("a-2", {"lr": "a"})
