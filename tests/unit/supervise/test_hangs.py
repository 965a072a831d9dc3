"""Which units count as hanging, after how long, and which one is to blame."""

import pytest

from hpc_rl.name_resolve.shared_fs import LeaseView
from hpc_rl.supervise.hangs import PLACED_S, HangDetector

TRAINER, ROLLOUT, SERVER = ("trainer", 0), ("rollout", 0), ("server", 0)
ALL = [TRAINER, ROLLOUT, SERVER]


@pytest.fixture
def life() -> HangDetector:
    one = HangDetector(factor=10, min_s=100, max_s=1000)
    for key in ALL:
        one.watch(key, 0)
    return one


def blamed(life: HangDetector, now: float, step_s: float = 0.0, running=ALL) -> list:
    return [key for key, _ in life.find_hung(now, step_s, running)]


def test_the_bound_is_a_multiple_of_a_step_between_floor_and_ceiling(life):
    assert [life.compute_bound_s(step_s) for step_s in (0, 1, 20, 500)] == [1000, 100, 200, 1000]


def test_a_trainer_that_does_nothing_hangs(life):
    life.observe(TRAINER, "a", 10, "train")
    life.observe(TRAINER, "a", 205, "train")
    assert not blamed(life, 209, 20)
    assert blamed(life, 211, 20) == [TRAINER]
    [(_, words)] = life.find_hung(211, 20, ALL)
    assert "trainer 0 hangs: nothing moved for 201 s in 'train'; the limit is 200 s" in words
    life.observe(TRAINER, "b", 211, "save")
    assert not blamed(life, 300, 20)


def test_a_waiting_trainer_blames_the_rollout_role(life):
    life.observe(TRAINER, "a", 10, "wait")
    assert blamed(life, 300, 1) == [ROLLOUT]
    assert blamed(life, 300, 1, running=[TRAINER]) == [TRAINER]


def test_a_restarted_rollout_role_gets_new_time(life):
    life.observe(TRAINER, "a", 10, "wait")
    life.watch(ROLLOUT, 300)
    assert not blamed(life, 399, 1)
    assert blamed(life, 401, 1) == [ROLLOUT]


def test_a_rollout_role_on_a_full_disk_is_not_blamed(life):
    life.observe(TRAINER, "a", 10, "wait")
    for now in range(15, 900, 5):
        lease = LeaseView("rollout/0", {"attempt": "9.0", "waits_for_room": now < 600}, 0, True, 0.0, now)
        life.observe_leases({"rollout/0": lease}, "9.0", now)
        assert blamed(life, now, 1) == ([ROLLOUT] if now - 595 > 100 else []), now


def test_a_trainer_is_not_blamed_while_the_rollout_role_restarts(life):
    life.observe(TRAINER, "a", 10, "wait")
    assert blamed(life, 300, 1) == [ROLLOUT]
    life.forget(ROLLOUT)
    assert not blamed(life, 302, 1, running=[TRAINER])
    life.watch(ROLLOUT, 303)
    assert not blamed(life, 400, 1)
    assert blamed(life, 404, 1) == [ROLLOUT]


@pytest.mark.parametrize(("doing", "to_blame"), [("train", TRAINER), ("wait", ROLLOUT)])
def test_a_server_that_comes_and_goes_hides_no_hang(life, doing, to_blame):
    life.observe(TRAINER, "a", 10, doing)
    for now in range(15, 111, 5):
        life.watch(SERVER, now)
        life.observe_pools({"rollout": servers(serving=1)}, now)
        assert not blamed(life, now, 1)
    assert blamed(life, 111, 1) == [to_blame]


def servers(**states: int) -> dict[str, LeaseView]:
    found = [state for state, count in states.items() for _ in range(count)]
    values = [{"state": state, "attempt": f"9_{i}.0", "incarnation": 2} for i, state in enumerate(found)]
    keys = [f"server/rollout/{i}" for i in range(len(found))]
    return {
        key: LeaseView(key, value, 0, value["state"] != "dead", 0.0)
        for key, value in zip(keys, values, strict=True)
    }


@pytest.mark.parametrize("doing", ["wait", "evaluate", "publish"])
@pytest.mark.parametrize("away", [{}, {"dead": 2}, {"loading": 1, "waiting": 1}])
def test_no_unit_is_blamed_for_waiting_while_no_server_serves(doing, away):
    life = HangDetector(factor=10, min_s=100, max_s=1000, away_s=3600)
    for key in (TRAINER, ROLLOUT):
        life.watch(key, 0)
    life.observe(TRAINER, "a", 10, doing)
    for now in range(10, 3611, 50):
        life.observe_pools({"rollout": servers(**away), "student": servers(serving=1)}, now)
        life.observe(ROLLOUT, now, now)
        assert not blamed(life, now, 1)
    life.observe_pools({"rollout": servers(serving=1, **away), "student": servers(serving=1)}, 3650)
    life.observe(ROLLOUT, 3711, 3711)
    assert not blamed(life, 3710, 1), "once one is back there is the usual time"
    assert blamed(life, 3711, 1) == [TRAINER if doing == "publish" else ROLLOUT]


def test_servers_that_stay_away_too_long_are_a_hang():
    for doing, until in (("wait", 500), ("train", 0)):
        life = HangDetector(factor=10, min_s=100, max_s=1000, away_s=500)
        life.watch(TRAINER, 0)
        life.observe(TRAINER, "a", 0, doing)
        for now in range(0, until + 100, 10):
            life.observe_pools({"rollout": {}}, now)
            assert not blamed(life, now, 1)
        [(key, words)] = life.find_hung(until + 110, 1, [TRAINER])
        blames_servers = "no server of pool rollout has served for 610 s" in words
        assert key == TRAINER and blames_servers is (doing == "wait")


def test_which_servers_of_an_attempt_serve(life):
    pool = servers(serving=1, dead=1, paused=1, loading=1)
    assert life.observe_leases(pool, "9_2.0", 1.0) == [(("server", 2), 2)]
    assert life.observe_leases(servers(dead=1, loading=1), "9_0.0", 1.0) == []


def test_a_server_hangs_once_its_lease_has_rested(life):
    assert not blamed(life, 999), "it may load a large model for long"
    life.observe(SERVER, 5, 5)
    assert blamed(life, 106) == [SERVER]
    assert blamed(life, 1001) == ALL, "those that never showed anything have the ceiling"


def test_no_unit_is_blamed_for_a_suspended_job(life):
    life.observe(TRAINER, "a", 10, "train")
    life.skip(5000)
    assert not blamed(life, 5050, 1)


def test_units_without_a_sign_of_life_are_found(life):
    life.observe(TRAINER, "a", 10, "train")
    assert life.find_unseen(PLACED_S) == [] and life.find_unseen(PLACED_S + 1) == [ROLLOUT, SERVER]
    life.forget(SERVER)
    life.watch(ROLLOUT, PLACED_S)
    assert life.find_unseen(PLACED_S + 2) == []


def test_one_that_ended_is_not_watched(life):
    life.forget(TRAINER)
    assert TRAINER not in blamed(life, 5000)
    life.observe(TRAINER, "a", 10)
