"""A trial that Slurm took off its nodes and starts again waits meanwhile: its script could only say that a
signal ended it.
"""

import json
import time

import pytest

from hpc_rl.cli.__main__ import main
from hpc_rl.core.errors import SchedulerError, TrialBusy
from hpc_rl.schedulers.base import JobState, SchedulerAnswer, State
from hpc_rl.status import scheduler_view as asking
from hpc_rl.status.scheduler_view import TrialWatch
from hpc_rl.status.trial_status import load_status
from hpc_rl.trials import trial_index
from hpc_rl.trials.submission import check_idle

pytestmark = pytest.mark.usefixtures("state_home")


@pytest.fixture
def trial(fake_trial, scheduler):
    """Told to end by TERM, saved, and in the queue again; nobody has cancelled it."""
    fake_trial.run_to(5)
    fake_trial.generation(5)
    fake_trial.ended("7.0", 75, "SIGTERM of the scheduler", at=20)
    fake_trial.script_said("7", "ended", code=143, cancelled=True, reason="told to end by a signal")
    scheduler.answers["7"] = State.PENDING
    trial_index.record_trial(fake_trial.trial)
    return fake_trial.trial


def test_status_says_that_it_waits(trial, capsys):
    assert main(["status", "t1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["state"], said["reason"]) == ("pending", "waiting to be started again")


def test_submit_and_recover_are_refused_meanwhile(trial, scheduler, config):
    with pytest.raises(TrialBusy, match=r"is pending as job 7.*hpc-rl cancel"):
        check_idle(trial)
    trial.config_yaml.write_text(config.read_text())
    assert main(["recover", "t1"]) == 75
    scheduler.answers["7"] = State.CANCELLED
    check_idle(trial)


def test_cancel_takes_it_out_of_the_queue(trial, scheduler, fake_trial, capsys):
    fake_trial.job("8", at=500)  # whoever submitted beside it: both go
    scheduler.answers["8"] = State.RUNNING
    assert main(["cancel", "t1"]) == 0
    assert scheduler.calls == [("cancel", "7"), ("nudge", "8")]
    assert trial.cancel_intent("7").exists()
    assert "job 7 of exp/t1 was pending and has been removed from the queue" in capsys.readouterr().out


def test_another_clusters_job_hides_none_and_starts_no_second(trial, scheduler, fake_trial, monkeypatch):
    monkeypatch.setattr(asking, "find_cluster_name", lambda: "beta")
    fake_trial.job("6", at=-500, cluster="alpha")  # it may wait there: its id says nothing here
    fake_trial.job("8", at=500, cluster="beta")
    scheduler.answers["8"] = State.RUNNING
    with pytest.raises(SchedulerError, match="submitted to the cluster alpha"):
        check_idle(trial)
    assert main(["cancel", "t1"]) == 69
    assert ("nudge", "8") in scheduler.calls
    assert trial.cancel_intent("6").exists() and trial.cancel_intent("8").exists()


def test_while_slurm_cleans_up_cancel_asks_no_script_that_is_gone(trial, scheduler):
    story = load_status(trial, JobState("7", State.RUNNING, "COMPLETING"), asked_at=time.time())
    assert not story.over and "only the scheduler knows whether it starts the job again" in story.reason
    scheduler.answers["7"] = State.RUNNING
    assert main(["cancel", "t1"]) == 0
    assert scheduler.calls == [("cancel", "7")]


@pytest.mark.parametrize("dead", [State.CANCELLED, State.PREEMPTED])
def test_once_slurm_calls_it_dead_it_is_over(trial, dead):
    story = load_status(trial, JobState("7", dead, dead.value.upper()))
    assert (story.state, story.over) == ("stopped", True) and "only the scheduler" not in story.reason


def test_without_the_schedulers_word_the_doubt_is_told(trial):
    story = load_status(trial)
    assert story.state == "stopped" and story.reason.endswith(
        "only the scheduler knows whether it starts the job again"
    )


def test_a_wish_to_cancel_leaves_no_doubt(trial, fake_trial, scheduler):
    fake_trial.cancel_wish("7")
    check_idle(trial)
    assert (story := load_status(trial)).state == "cancelled" and "only the scheduler" not in story.reason


def test_a_follower_waits_for_the_schedulers_word(trial, monkeypatch):
    answers = [
        SchedulerAnswer(asked_at=1.0),
        SchedulerAnswer(newest=JobState("7", State.PENDING), asked_at=time.time() + 60),
    ]
    monkeypatch.setattr(asking, "query", lambda *_, **__: answers.pop(0))
    watch = TrialWatch(trial)
    assert watch.poll().state == "unknown"
    assert watch.poll().state == "pending"


def test_an_answer_about_an_older_job_is_none_about_the_newest(trial, fake_trial, scheduler):
    fake_trial.job("8", at=500)
    fake_trial.event("8.0", "started", at=501, role="trainer", index=0, incarnation=0)
    fake_trial.ended("8.0", 70, "gave up", at=510)
    fake_trial.script_said("8", "ended", code=70, reason="gave up")
    answer = asking.query(trial)
    assert answer.states["7"].state is State.PENDING and answer.newest is None
    assert load_status(trial, answer.newest, answer.asked_at).state == "failed"
