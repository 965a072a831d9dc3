"""Who is taken to hang, after how long, and who is to blame."""

from __future__ import annotations

import pytest

from hpc_rl.launch.liveness import Liveness

TRAINER, ROLLOUT, SERVER = ("trainer", 0), ("rollout", 0), ("server", 0)
ALL = [TRAINER, ROLLOUT, SERVER]


@pytest.fixture
def life() -> Liveness:
    one = Liveness(factor=10, min_s=100, max_s=1000)
    for key in ALL:
        one.started(key, 0)
    return one


def blamed(life: Liveness, now: float, step_s: float = 0.0, running=ALL) -> list:
    return [key for key, _ in life.hung(now, step_s, running)]


def test_the_bound_is_a_multiple_of_a_step_between_floor_and_ceiling(life):
    assert [life.bound_s(step_s) for step_s in (0, 1, 20, 500)] == [1000, 100, 200, 1000]


def test_a_trainer_that_does_nothing_hangs(life):
    life.observe(TRAINER, "a", 10, "train")
    life.observe(TRAINER, "a", 205, "train")
    assert not blamed(life, 209, 20)
    assert blamed(life, 211, 20) == [TRAINER]
    [(_, words)] = life.hung(211, 20, ALL)
    assert "trainer 0 hangs: nothing moved for 201 s while it did 'train'; allowed are 200 s" in words
    life.observe(TRAINER, "b", 211, "save")
    assert not blamed(life, 300, 20)


def test_a_trainer_that_waits_blames_the_rollout_role_where_there_is_one(life):
    life.observe(TRAINER, "a", 10, "wait")
    assert blamed(life, 300, 1) == [ROLLOUT]
    assert blamed(life, 300, 1, running=[TRAINER]) == [TRAINER]


def test_whoever_is_started_gives_everybody_new_time(life):
    life.observe(TRAINER, "a", 10, "wait")
    life.started(ROLLOUT, 300)
    assert not blamed(life, 399, 1)
    assert blamed(life, 401, 1) == [ROLLOUT]


def test_a_server_hangs_once_its_lease_has_rested(life):
    assert not blamed(life, 999), "it may load a large model for long"
    life.observe(SERVER, 5, 5)
    assert blamed(life, 106) == [SERVER]
    assert blamed(life, 1001) == [TRAINER, ROLLOUT, SERVER], "those that never showed anything have the ceiling"


def test_nobody_is_blamed_for_the_time_that_the_watcher_itself_was_stopped(life):
    life.observe(TRAINER, "a", 10, "train")
    life.skip(5000)
    assert not blamed(life, 5050, 1)


def test_one_that_ended_is_not_watched(life):
    life.ended(TRAINER)
    assert TRAINER not in blamed(life, 5000)
    life.observe(TRAINER, "a", 10)
