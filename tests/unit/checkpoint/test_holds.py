"""A generation that somebody reads stays; a reader that died holds nothing for ever."""

from __future__ import annotations

import os

import pytest

from hpc_rl.checkpoint import holds as module
from hpc_rl.checkpoint.holds import Holds, hold
from hpc_rl.checkpoint.retention import Policy, retain
from hpc_rl.errors import TrialStateError
from hpc_rl.trial import Trial, write_json
from tests.unit.checkpoint.test_generation import save, steps


@pytest.fixture
def trial(tmp_path):
    trial = Trial(tmp_path / "trial")
    trial.make_dirs()
    for step in (1, 2, 3):
        save(trial, step)
    return trial


def test_what_is_held_stays_until_it_is_let_go(trial):
    with hold(trial, 1, "export") as folder:
        assert folder == trial.generation(1)
        assert retain(trial, Policy(1)) == 1
        assert steps(trial) == [3, 1]
    assert retain(trial, Policy(1)) == 3
    assert steps(trial) == [3]
    assert sorted(os.listdir(trial.recover)) == ["gen-00000003"]


def test_one_taken_up_between_the_look_and_the_removal_is_put_back(trial, monkeypatch):
    real, taken = os.rename, []

    def rename(source, target):
        if not taken:
            taken.append(hold(trial, 2, "late"))
            write_json(trial.recover / ".hold-00000002.abc.json", {"count": 0})
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    retain(trial, Policy(1))
    assert steps(trial) == [3, 2]


def test_a_generation_that_is_gone_is_told(trial, monkeypatch):
    monkeypatch.setattr(module, "APPEAR_S", 0.0)
    with pytest.raises(TrialStateError, match=r"generation 9 of .* is gone"), hold(trial, 9, "export"):
        pass
    assert not [name for name in os.listdir(trial.recover) if name.startswith(".")]


def test_a_hold_counts_as_long_as_its_count_changes_by_the_readers_own_clock(trial):
    now = [1000.0]
    holds = Holds(trial, lambda: now[0])
    path = trial.recover / ".hold-00000002.abc.json"
    for count in range(4):
        write_json(path, {"count": count, "time": 0})
        now[0] += 50
        assert holds.steps() == {2}
    now[0] += 50
    assert holds.steps() == {2}
    now[0] += 50
    assert holds.steps() == set() and not path.exists()
