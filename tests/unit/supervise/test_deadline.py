"""When to stop before the end of the job: times on our own clock; the end is queried again before a stop."""

import json
from types import SimpleNamespace

import pytest

from hpc_rl.core.errors import StopCause
from hpc_rl.stats.tracker import compute_p95
from hpc_rl.supervise.deadline import (
    MARGIN_S,
    QUERY_EVERY_S,
    SITE_END,
    WARNING_S,
    JobDeadline,
    JobEndTime,
    StepTimes,
)

LEAD_S = 60 + 15 + MARGIN_S  # of the steps and saves below


class World:
    """A job that began at 0 of the own clock; Unix time is a million later."""

    def __init__(self, ends_at: float | None, step_s: float = 60, save_s: float = 10) -> None:
        self.now, self.ends_at, self.num_queries = 0.0, ends_at, 0
        times = SimpleNamespace(step_s=step_s, save_s=save_s, poll=lambda: None)
        self.time = JobDeadline(self.query, times, clock=lambda: self.now, wall_clock=lambda: 1e6 + self.now)

    def query(self) -> float | None:
        self.num_queries += 1
        return None if self.ends_at is None else 1e6 + self.ends_at


def test_the_lead_is_a_step_and_a_save_and_a_margin():
    assert World(None, 100, 20).time.lead_s == 100 + 30 + MARGIN_S
    assert (
        World(None, 1, 1).time.compute_grace_s(120) == 120
        and World(None, 300, 60).time.compute_grace_s(120) == 720
    )


def test_draining_begins_early_enough_but_not_in_the_first_half():
    for ends_at, step_s, save_s, drain_at in ((7200, 20, 6, 7200 - 20 - 9 - MARGIN_S), (100, 20, 5, 50)):
        world = World(ends_at, step_s, save_s)
        world.time.update()
        assert world.time.until_drain_s == drain_at


def test_it_stops_in_time_and_asks_once_more_before():
    world = World(ends_at=3600)
    assert world.time.update()
    assert world.time.until_drain_s == 3600 - LEAD_S
    world.now = 3600 - LEAD_S - 1
    assert not world.time.is_reached() and world.num_queries == 1
    world.now += 2
    assert world.time.is_reached() and world.num_queries == 2


def test_an_extension_is_seen_before_anything_is_stopped():
    world = World(ends_at=3600)
    world.time.update()
    world.ends_at, world.now = 7200, 3599
    assert not world.time.is_reached()
    assert world.time.until_drain_s > 3000


def test_the_scheduler_is_asked_rarely():
    world = World(ends_at=36_000, step_s=1, save_s=1)
    for _ in range(360):
        world.now += 10
        world.time.update()
    assert 5 <= world.num_queries <= 1 + 3600 // QUERY_EVERY_S


def test_without_an_end_nothing_stops():
    world = World(ends_at=None)
    assert not world.time.update() and not world.time.is_reached()
    assert world.time.left_s == float("inf")


def test_a_site_may_know_an_earlier_end(monkeypatch):
    monkeypatch.setenv(SITE_END, str(int(1e6 + 500)))
    world = World(ends_at=3600, step_s=0, save_s=0)
    world.time.update()
    assert world.time.left_s == 500


def test_the_first_answer_is_the_environments(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1234")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    ask = JobEndTime()
    assert ask() == ask() == 1234.0
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert JobEndTime()() is None


def test_a_task_of_an_array_asks_for_itself(monkeypatch):
    """Slurm lists a task as `<array>_<task>`, whatever its SLURM_JOB_ID is."""
    ends = {"12_0": 1000.0, "12_1": 2000.0}
    scheduler = SimpleNamespace(end_time=ends.get)
    monkeypatch.setattr("hpc_rl.supervise.deadline.SlurmScheduler", lambda: scheduler)
    for name, value in {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert JobEndTime()() == 2000.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], 0), ([3], 3), (list(range(1, 101)), 95), ([1] * 19 + [50], 1), ([1] * 9 + [50], 50)],
)
def test_percentiles(values, expected):
    assert compute_p95(values) == expected


def test_times_are_read_from_the_metrics_as_they_grow(attempt):
    times = StepTimes(attempt)
    times.poll()
    assert times.step_s == times.save_s == 0
    for incarnation, seconds in ((0, 2.0), (1, 4.0)):
        first, last = {"step_s": seconds, "save_s": 0.0}, {"step_s": 1, "save_s": 0.5}
        rows = [{"step": 1, **first}, {"step": 1, "eval_reward": 1.0}, {"step": 2, **last}]
        attempt.metrics(incarnation).write_text("".join(json.dumps(row) + "\n" for row in rows))
        times.poll()
        assert (times.step_s, times.save_s) == (seconds, 0.5), "a step without a save is no fast save"


def test_a_warning_minutes_early_is_not_obeyed_where_the_end_is_known():
    world = World(ends_at=3600)
    world.time.update()
    assert not world.time.is_early_warning(StopCause.USER_SIGNAL), "a request of the user"
    world.now = 3600 - WARNING_S + 1
    assert world.time.is_early_warning(StopCause.USER_SIGNAL)
    assert not world.time.is_early_warning(StopCause.CANCELLED)
    world.now = 3600 - LEAD_S + 1
    assert not world.time.is_early_warning(StopCause.USER_SIGNAL), "it is time"


def test_the_grace_of_a_drain_ends_with_the_job():
    world = World(ends_at=3600, step_s=300)
    world.time.update()
    assert world.time.compute_grace_s(120) == 620
    world.now = 3500
    assert world.time.compute_grace_s(120) == 100
