"""Goodput: what every second of a trial's devices was used for, from files alone."""

from pathlib import Path

import pytest

from hpc_rl.core.records import TrialState
from hpc_rl.core.trial import write_json
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.status.goodput import MEANINGS, Bucket, compute_goodput
from hpc_rl.status.trial_status import load_status

T0 = 1_790_000_000.0  # of the fake trial


def steps(fake, first: int, last: int, at: float, incarnation: int = 0, attempt: str = "7.0") -> None:
    """Steps of 10 s, which end at `at` + 10, + 20, …: 1 s of waiting, 6 of training, 2 of publishing."""
    for number, step in enumerate(range(first, last + 1)):
        when = T0 + at + 10 * (number + 1)
        split = {"wait_s": 1.0, "train_s": 6.0, "publish_s": 2.0, "save_s": 0.5, "step_s": 10.0}
        fake.row(attempt, {"step": step, "time": when, "lineage": incarnation, **split}, incarnation)


@pytest.fixture
def killed_and_cancelled(fake_trial):
    """Steps 1 to 5; the trainer is killed; steps 4 and 5 again, which a cancel ends; 30 s in the queue."""
    units = [
        {"role": "trainer", "nodes": [0], "tasks_per_node": 1, "gpus_per_task": 1},
        {"role": "server", "nodes": [0, 1], "tasks_per_node": 1, "gpus_per_task": 2},
        {"role": "rollout", "nodes": [0], "tasks_per_node": 1, "gpus_per_task": 0},
    ]
    plan = {"units": units, "n_nodes": 2, "n_gpus_per_node": 4, "layout": "allocation"}
    write_json(fake_trial.trial.plan_json, plan)
    fake_trial.job("7")
    fake_trial.script_said("7", "started", at=30, restart=0)
    fake_trial.started("7.0", "trainer", at=32)
    fake_trial.lineage(0, 0, "7.0")
    steps(fake_trial, 1, 5, at=40)
    fake_trial.exited("7.0", "trainer", 137, at=94)
    fake_trial.started("7.0", "trainer", incarnation=1, at=96)
    fake_trial.lineage(1, 3, "7.0", incarnation=1)
    steps(fake_trial, 4, 5, at=100, incarnation=1)
    fake_trial.event("7.0", "progress", at=123, step=5)
    fake_trial.exited("7.0", "trainer", 75, incarnation=1, at=125)
    fake_trial.cancel_wish("7")
    fake_trial.ended("7.0", 75, at=126)
    fake_trial.script_said("7", "ended", at=126, restart=0, code=75)
    return fake_trial


def test_the_trainer_s_seconds_are_in_their_buckets_and_servers_follow_it(killed_and_cancelled):
    found = compute_goodput(load_status(killed_and_cancelled.trial), now=T0 + 999)
    # the trainer: 8 GPUs are held, it has 1 and the servers 4, for 96 s
    lost = 20 + 4  # steps 4 and 5, and what came before the kill
    trainer = {Bucket.WAIT: 5, Bucket.TRAIN: 30, Bucket.PUBLISH: 10, Bucket.LOST: lost, Bucket.STOP: 3}
    spans = dict.fromkeys(Bucket, 0.0)
    for span in found.attempts[0].spans:
        spans[span.bucket] += span.end - span.start
    assert {bucket: spans[bucket] for bucket in trainer} == pytest.approx(trainer)
    assert sum(spans.values()) == pytest.approx(96)
    generating = 5 + 30 + lost + spans[Bucket.SAVE]  # publishing, starting and stopping are the servers', too
    assert found.buckets[Bucket.GENERATE] == pytest.approx(4 * generating)
    assert found.buckets[Bucket.UNUSED] == pytest.approx(3 * 96)
    assert found.queued_s == pytest.approx(30)


def test_a_start_that_ended_before_a_step_is_lost(fake_trial):
    fake_trial.job("7")
    fake_trial.script_said("7", "started", at=0, restart=0)
    fake_trial.started("7.0", "trainer", at=2)
    fake_trial.exited("7.0", "trainer", 75, at=24)  # as it was asked to
    fake_trial.ended("7.0", 1, at=25)
    found = compute_goodput(load_status(fake_trial.trial), now=T0 + 999)
    assert found.buckets == pytest.approx({Bucket.START: 2, Bucket.LOST: 22, Bucket.STOP: 1})


def test_servers_wait_for_as_long_as_they_report_no_request(killed_and_cancelled):
    attempt = killed_and_cancelled.trial.attempt("7.0")
    before = compute_goodput(load_status(attempt.trial), now=T0 + 999).buckets
    (attempt.dir / "use").mkdir()
    for index, incarnation, busy_s in ((0, 0, 12.0), (0, 1, 18.0), (1, 0, 50.0)):  # 40 s for each of the two
        write_json(attempt.server_use(index, incarnation), {"busy_s": busy_s})
    after = compute_goodput(load_status(attempt.trial), now=T0 + 999).buckets
    assert after[Bucket.GENERATE] == pytest.approx(4 * (40 - 10))  # 10 s of them while weights were published
    moved = before[Bucket.GENERATE] - after[Bucket.GENERATE]
    assert after[Bucket.WAIT] == pytest.approx(before[Bucket.WAIT] + moved)
    assert sum(after.values()) == pytest.approx(sum(before.values()))


def test_buckets_sum_to_the_allocation(killed_and_cancelled):
    found = compute_goodput(load_status(killed_and_cancelled.trial), now=T0 + 999)
    assert found.allocation_s == pytest.approx(8 * 96)
    assert sum(found.buckets.values()) == pytest.approx(found.allocation_s)


def test_a_trial_that_runs_is_counted_until_now_and_a_killed_attempt_until_its_last_sign(fake_trial):
    fake_trial.run_to(3)  # steps at 10, 11 and 12 s; no end is recorded
    status = load_status(fake_trial.trial)
    assert compute_goodput(status, now=T0 + 52).allocation_s == pytest.approx(51)  # since the first event
    assert compute_goodput(status, now=T0 + 52).queued_s == pytest.approx(1)
    fake_trial.job("8", at=500)
    status = load_status(fake_trial.trial, JobState("8", State.PENDING))
    assert (status.state, status.attempts[0].state) == (TrialState.PENDING, TrialState.KILLED)
    later = compute_goodput(status, now=T0 + 560)
    assert later.allocation_s == pytest.approx(11)
    assert later.queued_s == pytest.approx(61)


def test_servers_of_jobs_of_their_own_have_allocations_of_their_own(killed_and_cancelled):
    trial = killed_and_cancelled.trial
    each = {"nodes": [0], "tasks_per_node": 1, "gpus_per_task": 2}
    units = [{"role": role, **each} for role in ("trainer", "server")]
    write_json(trial.plan_json, {"units": units, "n_nodes": 2, "n_gpus_per_node": 2, "layout": "jobs"})
    killed_and_cancelled.event("9_0.0", "started", at=60, role="server", index=0, incarnation=0)
    killed_and_cancelled.ended("9_0.0", 75, at=130)
    found = compute_goodput(load_status(trial), now=T0 + 999)
    assert [(use.id, use.allocation_s) for use in found.attempts] == [("7.0", 192), ("9_0.0", 140)]
    # the server outlives the trainer by 4 s
    assert found.buckets[Bucket.WAIT] == pytest.approx(2 * 5 + 2 * 4)
    assert sum(found.buckets.values()) == pytest.approx(found.allocation_s)


def test_the_page_lists_every_bucket():
    page = (Path(__file__).parents[3] / "docs" / "see.md").read_text()
    assert [row for row in page.splitlines() if row.startswith("| `")] == [
        f"| `{bucket}` | {text} |" for bucket, text in MEANINGS.items()
    ]
