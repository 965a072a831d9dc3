"""Stops that always resume, on a real Slurm with the rendered script, the real supervisor and roles of a few lines."""

import sys
import time
from pathlib import Path

import pytest
from patience import extend

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from test_endings import Job, submit_to

from hpc_rl.core.files import JsonLines
from hpc_rl.schedulers.base import State

pytestmark = pytest.mark.timeout(400)
SAVE_S = extend(1.0)  # longer than a scancel takes to start, so that the second one meets the job too


def events(job: Job) -> list[str]:
    return [line["event"] for line in JsonLines(job.trial.job_state(job.id)).poll()]


def starts_and_ends(job: Job) -> list[str]:
    """The events but for the death of a supervisor whose Python was ending when a late signal came."""
    return [event for event in events(job) if event != "supervisor_killed"]


def wait_for_start(job: Job, restart: int, until) -> None:
    """Spare a requeued job Slurm's two minutes, and wait until all its roles run."""

    def is_up() -> bool:
        assert job.state is not State.FAILED, job.said()
        job.cluster.hurry(job.id)
        return job.is_up(restart)

    until(is_up, 240)


def signal_twice(job: Job, gap_s: float) -> None:
    for pause_s in (gap_s, 0.0):
        job.cluster.run("scancel", "--batch", "--signal=USR1", job.id)
        time.sleep(pause_s)


@pytest.mark.parametrize(
    "gaps_s",
    [
        pytest.param([0.4 * SAVE_S], id="once"),
        pytest.param(
            [0.1 + (SAVE_S - 0.1) * number / 19 for number in range(20)],
            id="20 times",
            marks=[pytest.mark.soak, pytest.mark.timeout(2400)],
        ),
    ],
)
def test_a_job_that_is_asked_twice_to_stop_comes_back(cluster, tmp_path, monkeypatch, until, gaps_s):
    script = {"trainer": [*[f"save {SAVE_S}"] * len(gaps_s), "train"]}
    job = submit_to(cluster, tmp_path, monkeypatch, script)
    for restart, gap_s in enumerate(gaps_s):
        wait_for_start(job, restart, until)
        signal_twice(job, gap_s)
        until(lambda: events(job)[-1] == "requeued" or not job.state.alive, 120)
        assert starts_and_ends(job) == ["started", "requeued"] * (restart + 1), job.said()
        assert job.ended(restart)["exit_code"] == 75
    wait_for_start(job, len(gaps_s), until)
    until(lambda: job.state is State.DONE)
    assert starts_and_ends(job) == [*["started", "requeued"] * len(gaps_s), "started", "ended"]
    assert f"Restarts={len(gaps_s)} " in job.shown()


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_a_trial_slower_than_the_notice_of_its_time_limit_continues_every_time(
    cluster, tmp_path, monkeypatch, until
):
    """The supervisor stops by its own clock before Slurm's notice of 24 s, which comes while the trainer saves."""
    script = {"total": 6, "trainer": [*["slow 20 40"] * 3, "train"]}
    job = submit_to(cluster, tmp_path, monkeypatch, script, slurm={"time": "0:02:00"})
    for restart in range(3):
        wait_for_start(job, restart, until)
        until(lambda: events(job)[-1] == "requeued" or not job.state.alive, 240)
        assert events(job) == ["started", "requeued"] * (restart + 1), job.said()
        ended = job.ended(restart)
        assert (ended["exit_code"], ended["cause"]) == (75, "time_limit"), job.said()
        assert job.trial.generation(restart + 1).exists(), "it saved"
    wait_for_start(job, 3, until)
    until(lambda: job.state is State.DONE)
    assert events(job) == [*["started", "requeued"] * 3, "started", "ended"]
    assert job.story.state == "done"
