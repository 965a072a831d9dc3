"""The rule that says which generations stay."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.checkpoint.retention import Policy, best, keep


@dataclass(frozen=True)
class Gen:
    step: int
    metrics: dict[str, float] = field(default_factory=dict)


def gens(**rewards: float) -> list[Gen]:
    return [Gen(int(name[1:]), {"eval_reward": value}) for name, value in rewards.items()]


STEPS = [Gen(step) for step in range(1, 11)]


def test_the_newest_stay_and_one_always():
    assert keep(STEPS, Policy(newest=3)) == {8, 9, 10}
    assert keep(STEPS, Policy(newest=0)) == {10}
    assert keep([], Policy()) == set()


def test_every_so_many_steps_one_stays_besides():
    assert keep(STEPS, Policy(newest=1, every_steps=4)) == {4, 8, 10}


def test_the_best_stay_besides_of_equal_ones_the_newer():
    some = [*gens(s1=0.5, s2=0.9, s3=0.9, s4=0.1), Gen(5), Gen(6)]
    assert keep(some, Policy(newest=1, best=1)) == {3, 6}
    assert keep(some, Policy(newest=1, best=2)) == {2, 3, 6}
    assert keep(some, Policy(newest=1, best=1, higher_is_better=False)) == {4, 6}
    assert keep(some, Policy(newest=1, best=3, metric="eval_loss")) == {6}
    assert best(some, "eval_reward") == [3, 2, 1, 4]


@given(
    steps=st.sets(st.integers(0, 60), max_size=12),
    policy=st.builds(Policy, st.integers(0, 5), st.none() | st.integers(1, 9), st.integers(0, 4)),
    values=st.lists(st.floats(allow_nan=False), min_size=61, max_size=61),
)
def test_what_stays_exists_and_holds_the_newest(steps, policy, values):
    made = [Gen(step, {"eval_reward": values[step]} if step % 2 else {}) for step in steps]
    staying = keep(made, policy)
    assert staying <= steps
    assert not steps or max(steps) in staying
    assert (
        keep([one for one in made if one.step in staying], policy) == staying
    )  # applied twice it takes no more
