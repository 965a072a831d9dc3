"""What a person types for a trial finds that trial, or says which there are."""

import shutil

import pytest

from hpc_rl.core.errors import ExitCode, TrialNameError
from hpc_rl.trials import trial_index

pytestmark = pytest.mark.usefixtures("state_home")


@pytest.fixture
def two(make_fake_trial, tmp_path):
    """sums/small and products/small, both indexed."""
    trials = [
        make_fake_trial(tmp_path / "runs", experiment, "small").trial for experiment in ("sums", "products")
    ]
    for trial in trials:
        trial_index.record_trial(trial)
    return trials


def test_a_name_that_only_one_trial_has(fake_trial):
    trial_index.record_trial(fake_trial.trial)
    for text in ("t1", "exp/t1", str(fake_trial.trial.dir), f"{fake_trial.trial.dir}/"):
        assert trial_index.resolve(text).dir == fake_trial.trial.dir, text


def test_a_relative_path(fake_trial, monkeypatch):
    monkeypatch.chdir(fake_trial.trial.dir.parent)
    assert trial_index.resolve("./t1").dir == fake_trial.trial.dir
    assert trial_index.resolve("t1").dir == fake_trial.trial.dir
    monkeypatch.chdir(fake_trial.trial.dir)
    assert str(trial_index.resolve(".")) == "exp/t1"


def test_an_ambiguous_name_lists_the_candidates(two):
    with pytest.raises(TrialNameError) as caught:
        trial_index.resolve("small")
    assert caught.value.exit_code == ExitCode.REFUSED
    for trial in two:
        assert str(trial.dir) in str(caught.value)
    assert trial_index.resolve("sums/small").dir == two[0].dir


def test_a_trial_here_and_another_of_that_name_in_the_index_are_ambiguous(
    fake_trial, make_fake_trial, tmp_path, monkeypatch
):
    trial_index.record_trial(make_fake_trial(tmp_path / "other").trial)
    monkeypatch.chdir(fake_trial.trial.dir.parent)
    with pytest.raises(TrialNameError, match="2 trials"):
        trial_index.resolve("t1")


def test_an_unknown_name_suggests_a_near_one(two):
    with pytest.raises(TrialNameError, match="Did you mean sums/small"):
        trial_index.resolve("sum/small")
    with pytest.raises(TrialNameError, match="hpc-rl list"):
        trial_index.resolve("zzz")


def test_a_path_that_is_no_trial_says_so(tmp_path):
    with pytest.raises(TrialNameError, match="not a trial directory"):
        trial_index.resolve(str(tmp_path))
    with pytest.raises(TrialNameError, match="does not exist"):
        trial_index.resolve(str(tmp_path / "nope"))


def test_gone_trials_are_named_as_such_and_pruned(two):
    shutil.rmtree(two[0].dir)
    assert trial_index.resolve("small").dir == two[1].dir
    with pytest.raises(TrialNameError, match="gone"):
        trial_index.resolve("sums/small")
    assert [entry.trial.dir for entry in trial_index.prune_index()] == [two[0].dir]
    assert [entry.trial.dir for entry in trial_index.list_entries()] == [two[1].dir]


def test_submitting_again_keeps_one_entry(fake_trial):
    assert trial_index.record_trial(fake_trial.trial)
    assert trial_index.record_trial(fake_trial.trial)
    assert len(trial_index.list_entries()) == 1


def test_junk_in_the_index_is_passed_over(fake_trial):
    trial_index.record_trial(fake_trial.trial)
    for name, text in (
        ("a.json", "{"),
        ("b.json", "[]"),
        ("c.json", '{"dir": "relative"}'),
        ("d.json", '{"dir": 3}'),
    ):
        (trial_index.find_directory() / name).write_text(text)
    assert len(trial_index.list_entries()) == 1


def test_an_index_that_cannot_be_written_costs_no_more_than_a_log_line(fake_trial, state_home, caplog):
    state_home.write_text("a file where the directory should be")
    assert trial_index.record_trial(fake_trial.trial) is False
    assert "name the trial by its path" in caplog.text
    assert trial_index.list_entries() == []


def test_the_handle_is_the_short_name_only_where_that_finds_the_trial(fake_trial, make_fake_trial, tmp_path):
    assert trial_index.format_name(fake_trial.trial) == str(fake_trial.trial.dir)
    trial_index.record_trial(fake_trial.trial)
    assert trial_index.format_name(fake_trial.trial) == "exp/t1"
    other = make_fake_trial(tmp_path / "with space").trial
    trial_index.record_trial(other)
    assert trial_index.format_name(other) == f"'{other.dir}'"
