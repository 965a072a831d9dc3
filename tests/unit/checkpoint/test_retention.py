"""What retention keeps: by its rule, and because a living reader holds it."""

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.checkpoint import retention
from hpc_rl.checkpoint.retention import Holds, RetentionPolicy, hold, keep, rank_best, retain
from hpc_rl.core.errors import TrialStateError
from hpc_rl.core.trial import Trial, write_json
from tests.unit.checkpoint.test_generation import save, steps


@dataclass(frozen=True)
class Gen:
    step: int
    metrics: dict[str, float] = field(default_factory=dict)


def gens(**rewards: float) -> list[Gen]:
    return [Gen(int(name[1:]), {"eval_reward": value}) for name, value in rewards.items()]


STEPS = [Gen(step) for step in range(1, 11)]


def test_the_newest_stay_and_one_always():
    assert keep(STEPS, RetentionPolicy(newest=3)) == {8, 9, 10}
    assert keep(STEPS, RetentionPolicy(newest=0)) == {10}
    assert keep([], RetentionPolicy()) == set()


def test_every_so_many_steps_one_stays_besides():
    assert keep(STEPS, RetentionPolicy(newest=1, every_steps=4)) == {4, 8, 10}


def test_the_best_stay_besides_of_equal_ones_the_newer():
    some = [*gens(s1=0.5, s2=0.9, s3=0.9, s4=0.1), Gen(5), Gen(6)]
    assert keep(some, RetentionPolicy(newest=1, best=1)) == {3, 6}
    assert keep(some, RetentionPolicy(newest=1, best=2)) == {2, 3, 6}
    assert keep(some, RetentionPolicy(newest=1, best=1, higher_is_better=False)) == {4, 6}
    assert keep(some, RetentionPolicy(newest=1, best=3, metric="eval_loss")) == {6}
    assert rank_best(some, "eval_reward") == [3, 2, 1, 4]


@given(
    steps=st.sets(st.integers(0, 60), max_size=12),
    policy=st.builds(RetentionPolicy, st.integers(0, 5), st.none() | st.integers(1, 9), st.integers(0, 4)),
    values=st.lists(st.floats(allow_nan=False), min_size=61, max_size=61),
)
def test_what_stays_exists_and_holds_the_newest(steps, policy, values):
    made = [Gen(step, {"eval_reward": values[step]} if step % 2 else {}) for step in steps]
    staying = keep(made, policy)
    assert staying <= steps
    assert not steps or max(steps) in staying
    # applied twice it takes no more
    assert keep([one for one in made if one.step in staying], policy) == staying


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
        assert retain(trial, RetentionPolicy(1)) == 1
        assert steps(trial) == [3, 1]
    assert retain(trial, RetentionPolicy(1)) == 3
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
    retain(trial, RetentionPolicy(1))
    assert steps(trial) == [3, 2]


def test_a_generation_that_is_gone_is_told(trial, monkeypatch):
    monkeypatch.setattr(retention, "APPEAR_S", 0.0)
    with (
        pytest.raises(TrialStateError, match=r"checkpoint 9 of .* does not exist any more"),
        hold(trial, 9, "export"),
    ):
        pass
    assert not [name for name in os.listdir(trial.recover) if name.startswith(".")]


def test_a_hold_is_valid_while_its_count_changes_by_the_readers_clock(trial):
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
