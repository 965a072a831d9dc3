"""Trials from Python, read from their files."""

import pytest
from stored_trials import folder, trial_of  # noqa: F401

import hpc_rl
from hpc_rl.api import tables
from hpc_rl.core.trial import write_json
from hpc_rl.trials import trial_index

pytestmark = pytest.mark.usefixtures("state_home")


@pytest.fixture
def trial(fake_trial) -> hpc_rl.Trial:
    """exp/t1: done, with 5 steps and evaluations of steps 0 and 5."""
    fake_trial.run_to(5)
    fake_trial.evaluation("7.0", 5, 0.5)
    fake_trial.ended("7.0", 0)
    write_json(fake_trial.trial.done, {"job_id": "7"})
    trial_index.record_trial(fake_trial.trial)
    return hpc_rl.Trial("t1")


def test_metrics_have_a_record_per_step_with_its_evaluation(trial):
    records = trial.metrics()
    assert records.column("step") == [0, 1, 2, 3, 4, 5]
    assert records.column("eval_reward") == [0.31, None, None, None, None, 0.5]
    assert records.column("reward") == [None, 0.01, 0.02, 0.03, 0.04, 0.05]
    frame = records.frame()
    assert list(frame["step"]) == [0, 1, 2, 3, 4, 5] and frame["eval_reward"].count() == 2
    assert "<th>eval_reward</th>" in records._repr_html_()


def test_without_a_library_for_frames_the_error_names_one(trial, monkeypatch):
    monkeypatch.setattr(tables.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(hpc_rl.HpcRlError, match="pip install pandas"):
        trial.metrics().frame()
    monkeypatch.setitem(__import__("sys").modules, "polars", None)
    with pytest.raises(hpc_rl.HpcRlError, match="polars can't be imported"):
        trial.metrics().to_polars()


def test_a_result_is_of_a_trial_that_is_done(trial, fake_trial):
    assert (trial.state, trial.done(), trial.wait()) == ("done", True, "done")
    result = trial.result()
    assert (result.step, result.held_out, result.measure, result.model) == (5, 0.5, "reward", None)
    assert result.metrics["reward"] == 0.05
    fake_trial.trial.done.unlink()
    fake_trial.ended("7.0", 70, "trainer-0 exited")
    fake_trial.script_said("7", "ended", code=70, reason="failed")
    with pytest.raises(hpc_rl.TrialFailed, match="trainer-0 exited") as caught:
        trial.result()
    assert "trainer-0.0 line" in str(caught.value), "the end of its log"


def test_waiting_ends_at_its_limit(fake_trial):
    fake_trial.run_to(5)
    with pytest.raises(TimeoutError, match="after 0 s"):
        hpc_rl.Trial(fake_trial.trial.dir).wait(timeout_s=0)


def test_a_trial_has_names_logs_and_facts(trial, fake_trial):
    assert (trial.name, trial.experiment, trial.job_id, trial.step) == ("t1", "exp", "7", 5)
    assert trial.options == {"total_train_steps": 100}
    assert "trainer-0.0 line" in trial.logs() and "rollout-0.0 line" in trial.logs("rollout")
    with pytest.raises(hpc_rl.TrialStateError, match="has no log"):
        trial.logs("sglang")
    report = trial.report()
    assert report.facts["held-out reward"].startswith("0.31 (step 0) -> 0.5 (step 5)")
    assert "state: done" in str(report) and "<td>state</td>" in report._repr_html_()
    assert "Plotly" in report.html()
    assert "exp/t1" in trial._repr_html_() and "<svg" in trial._repr_html_()
    assert trial == hpc_rl.Trial(fake_trial.trial.dir) and len({trial, hpc_rl.Trial("exp/t1")}) == 1
    assert repr(trial) == f"Trial({str(fake_trial.trial.dir)!r})"
    with pytest.raises(hpc_rl.TrialNameError):
        hpc_rl.Trial("t2")


def test_trials_are_listed_and_filtered(trial, make_fake_trial, tmp_path):
    other = make_fake_trial(tmp_path / "runs", name="t2")
    other.run_to(3)
    trial_index.record_trial(other.trial)
    assert {one.name for one in hpc_rl.list_trials()} == {"t1", "t2"}
    done = hpc_rl.list_trials("t*", experiment="e*", state="done")
    assert [one.name for one in done] == ["t1"]
    (record,) = done.records()
    assert (record["step"], record["held_out"]) == (5, 0.5)
    assert "exp/t1" in done._repr_html_()
    with pytest.raises(hpc_rl.ConfigError, match="unknown"):
        hpc_rl.list_trials(state="finished")


def test_checkpoints_of_a_stored_trial(folder):  # noqa: F811
    found = hpc_rl.Trial(trial_of(folder, "stopped").dir).checkpoints()
    assert found.column("step") == sorted(found.column("step"), reverse=True) and found
    assert all(set(one) >= {"step", "path", "bytes", "time", "problem"} for one in found)


def test_a_long_table_is_shortened_and_escaped():
    records = tables.make_records({"a": f"<{number}>"} for number in range(300))
    shown = records._repr_html_()
    assert (
        "&lt;0&gt;" in shown and "<0>" not in shown and "200 of 300 rows" in shown and "&lt;299" not in shown
    )
