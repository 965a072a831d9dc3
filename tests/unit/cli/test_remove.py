"""remove: what it frees, that it asks, and that a trial with a job is left alone."""

import json
import os
import re

import pytest

from hpc_rl.cli.__main__ import main
from hpc_rl.core.records import TrialState
from hpc_rl.schedulers.base import SchedulerAnswer, State
from hpc_rl.trials import (
    listing,
    removal,
    trial_index,
)

pytestmark = pytest.mark.usefixtures("state_home")


@pytest.fixture
def trial(fake_trial, scheduler):
    fake_trial.run_to(5)
    trial_index.record_trial(fake_trial.trial)
    scheduler.answers["7"] = State.DONE
    for name, size in (
        ("recover/gen-00000005/state", 3_000_000),
        ("exports/final/model.safetensors", 2_000_000),
    ):
        path = fake_trial.trial.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    return fake_trial.trial


def test_a_trial_is_removed_with_its_entry_in_the_index(trial, capsys):
    assert main(["remove", "t1", "--yes"]) == 0
    said = capsys.readouterr().out
    assert "checkpoints" in said and "3.0 MB" in said and "5.0 MB freed" in said
    assert not trial.dir.exists() and not list(trial.dir.parent.iterdir())
    assert trial_index.list_entries() == []


def test_exports_may_stay(trial, capsys):
    assert main(["remove", "t1", "--yes", "--keep_exports", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert 3_000_000 <= answer["freed_bytes"] < 3_200_000
    assert [path.name for path in trial.dir.iterdir()] == ["exports"]
    assert (trial.dir / "exports" / "final" / "model.safetensors").stat().st_size == 2_000_000


def test_du_shows_what_trials_hold_largest_first(trial, make_fake_trial, tmp_path, capsys):
    trial_index.record_trial(make_fake_trial(tmp_path / "runs", name="small").trial)
    assert main(["du"]) == 0
    head, *lines = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in lines] == ["exp/t1", "exp/small", "all"]
    assert lines[0][:2] == ["5.0 MB", "3.0 MB"]
    assert head[:2] == ["total", "checkpoints"]
    assert main(["du", "exp/s*"]) == 0
    assert "exp/small" in (said := capsys.readouterr().out) and "t1" not in said
    assert main(["du", "t1", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["by_kind"]["exports"] == 2_000_000


def test_filters_choose_trials_that_are_over(
    trial, make_fake_trial, tmp_path, scheduler, capsys, monkeypatch
):
    second, live = (make_fake_trial(tmp_path / "runs", name=name) for name in ("t2", "live"))
    for one in (second, live):
        one.run_to(5)
        trial_index.record_trial(one.trial)
    assert main(["remove"]) == 64 and "--older_than_days" in capsys.readouterr().err
    late = SchedulerAnswer(complaint="squeue: timed out")
    monkeypatch.setattr("hpc_rl.trials.listing.query_all", lambda trials: {one.dir: late for one in trials})
    states = {"t1": TrialState.FAILED, "t2": TrialState.DONE, "live": TrialState.RUNNING}
    row = listing.make_row
    monkeypatch.setattr(
        listing, "make_row", lambda entry, _: row(entry, _) | {"state": states[entry.trial.name]}
    )

    assert main(["list"]) == 0
    said = capsys.readouterr().err
    assert (
        "the scheduler of exp/live and 2 more does not answer, so only files are shown: squeue: timed out"
        in said
    )

    def chosen(*argv):
        assert main(["remove", *argv, "--dry_run", "--json"]) == 0
        return sorted(one["trial"] for one in json.loads(capsys.readouterr().out))

    assert chosen("t*") == chosen("t?") == chosen("--older_than_days", "0") == ["exp/t1", "exp/t2"]
    assert chosen("--state", "failed") == ["exp/t1"]
    assert chosen("--older_than_days", "1") == chosen("t1", "--state", "done") == []
    assert main(["remove", "--state", "done,running", "--yes"]) == 64
    assert "remove can't take trials that are running; allowed states: " in capsys.readouterr().err
    scheduler.answers["7"] = State.RUNNING  # as it turns out when it is asked
    assert main(["remove", "t*", "--yes"]) == 0
    assert "exp/t1 is not removed: trial exp/t1 is running" in capsys.readouterr().err
    scheduler.answers["7"] = State.DONE
    assert main(["remove", "t*", "--yes"]) == 0
    assert not trial.dir.exists() and not second.trial.dir.exists() and live.trial.dir.exists()


@pytest.mark.parametrize(("answer", "code"), [("", 64), ("n", 64), ("y", 0), ("Yes", 0)])
def test_it_asks_on_a_terminal(trial, monkeypatch, capsys, answer, code):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: print(question) or answer)
    assert main(["remove", "t1"]) == code
    assert trial.dir.exists() == bool(code)
    assert "Remove it, and free" in capsys.readouterr().out


def test_exports_that_are_kept_survive_a_kill_at_any_rename(trial, monkeypatch):
    rename, left = os.rename, 2

    def killed(source, target):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(removal.os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        removal.remove_trial(trial, keep_exports=True)
    monkeypatch.undo()
    assert (trial.dir / "exports" / "final" / "model.safetensors").stat().st_size == 2_000_000
    removal.remove_trial(trial, keep_exports=True)
    assert [path.name for path in trial.dir.iterdir()] == ["exports"]


def test_the_leftover_of_a_trial_with_a_longer_name_is_left_alone(trial):
    other = trial.dir.with_name(f".{trial.dir.name}.b.0123456789ab.removed")
    other.mkdir()
    removal.remove_trial(trial, keep_exports=False)
    assert other.is_dir()


def test_without_a_terminal_it_wants_yes(trial, capsys):
    assert main(["remove", "t1"]) == 64
    assert "add --yes" in capsys.readouterr().err
    assert trial.dir.exists()


def test_a_trial_that_runs_is_left_alone(trial, scheduler, capsys):
    scheduler.answers["7"] = State.RUNNING
    assert main(["remove", "t1", "--yes"]) == 75
    assert "cancel it with" in capsys.readouterr().err
    assert trial.dir.exists()


def test_a_removal_that_was_killed_is_finished_by_the_next(trial, monkeypatch):
    monkeypatch.setattr(removal.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        removal.remove_trial(trial, keep_exports=False)
    monkeypatch.undo()
    assert not trial.dir.exists() and len(list(trial.dir.parent.iterdir())) == 1
    trial.make_dirs()
    removal.remove_trial(trial, keep_exports=False)
    assert not list(trial.dir.parent.iterdir())
