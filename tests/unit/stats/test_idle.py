"""Steps that taught the model nothing."""

import pytest

from hpc_rl.stats.idle import IdleReason, count_idle, count_skipped

LEARNS = {"grad_norm": 0.5, "zero_advantage_groups": 0.5, "reward": 0.25, "reward_std": 0.5}


def rows(*steps: dict) -> list[dict]:
    return [{"step": number, **LEARNS, **row} for number, row in enumerate(steps, 1)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"grad_norm": 0.0}, IdleReason.ZERO_GRADIENT),
        ({"zero_advantage_groups": 1.0}, IdleReason.ZERO_ADVANTAGE),
        ({"reward": 0.0, "reward_std": 0.0}, IdleReason.ZERO_REWARD),
        ({"grad_norm": None, "update_successful": 0.0}, IdleReason.NO_UPDATE),
    ],
)
def test_each_kind_of_step_without_learning_is_counted(row, reason):
    counted = count_idle(rows({}, row, row))
    assert (counted.num_steps, counted.total, counted.in_a_row, counted.since_step) == (3, 2, 2, 2)
    assert counted.reasons == (reason,)


def test_a_policy_learns_from_its_teacher_without_a_reward():
    distilled = {"reward": 0.0, "reward_std": 0.0, "zero_advantage_groups": 0.25, "teacher_kl": 2.5}
    assert not count_idle(rows(distilled, distilled)).total
    assert count_idle(rows(distilled | {"zero_advantage_groups": 1.0})).total == 1


def test_a_step_that_learns_ends_those_in_a_row():
    counted = count_idle(rows({"grad_norm": 0.0}, {}))
    assert (counted.total, counted.in_a_row, counted.since_step, counted.reasons) == (1, 0, None, ())


def test_a_mean_of_0_with_differing_rewards_is_learned_from():
    assert not count_idle(rows({"reward": 0.0, "reward_std": 1.0})).total


def test_a_few_steps_are_told_only_where_nothing_follows():
    idle = {"grad_norm": 0.0}
    few, many = count_idle(rows(idle, idle)), count_idle(rows({}, *[idle] * 10))
    assert few.is_notable(is_over=True) and not few.is_notable(is_over=False)
    assert many.is_notable(is_over=False)
    assert not count_idle(rows(idle, {})).is_notable(is_over=True)


def test_skipped_updates_are_counted_with_their_steps():
    found = count_skipped(rows({"updates_skipped": 2.0}, {}, {"updates_skipped": 1.0}, {}))
    assert (found.num_updates, found.num_steps, found.last_step) == (3, 2, 3)
    assert found.text.startswith("3 updates were skipped in 2 steps, the last one step 3")
    assert not count_skipped(rows({}, {})).num_updates
