"""Following a trial: each fact once, an end with its reason and the failing role's last lines, the trial's
exit code.
"""

import threading
import time
from functools import partial

import pytest

from hpc_rl.core.files import Tail, load_last_lines
from hpc_rl.core.trial import write_json
from hpc_rl.schedulers.base import SchedulerAnswer
from hpc_rl.status import follow as following
from hpc_rl.status import scheduler_view as asking
from hpc_rl.status.follow import ChangeReporter, describe_progress, find_exit_code, find_failing_role, follow
from hpc_rl.status.scheduler_view import TrialWatch
from hpc_rl.status.trial_status import load_status


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    """A scheduler that was asked and knows nothing."""
    monkeypatch.setattr(asking, "query", lambda *_, **__: SchedulerAnswer(asked_at=time.time()))


def test_news_are_told_once(fake_trial):
    narrator = ChangeReporter()
    fake_trial.run_to(3)
    first = narrator.news(load_status(fake_trial.trial))
    assert first == ["exp/t1: running", "attempt 7.0 started", "step 0: held-out reward 0.31"]
    assert narrator.news(load_status(fake_trial.trial)) == []
    fake_trial.exited("7.0", "trainer", 137)
    fake_trial.started("7.0", "trainer", incarnation=1)
    fake_trial.lineage(1, 2, "7.0", incarnation=1, reason="loading checkpoint 2")
    assert narrator.news(load_status(fake_trial.trial)) == [
        "trainer-0: killed by signal 9; started again (incarnation 1)",
        "training continues from checkpoint 2 in a later start of the trainer (lineage 1): "
        "loading checkpoint 2",
    ]


def test_progress_names_what_matters(fake_trial):
    fake_trial.run_to(50)
    assert describe_progress(load_status(fake_trial.trial)) == (
        "step 50/100  reward 0.5  staleness 0.5  held-out reward 0.31  1.0 steps/s, done in about 50 s"
    )


def test_the_end_of_an_evaluation_alone_shows_its_scores(fake_trial, capsys):
    fake_trial.run_to(3)
    trial = fake_trial.trial
    trial.results.mkdir(parents=True)
    write_json(trial.results / "scores.json", {"prompts": 40, "reward": 0.5, "left_out": {}})
    fake_trial.ended("7.0", 0)
    trial.done.write_text("{}")
    assert follow(trial, tick_s=0.02) == 0
    assert f"scores: prompts 40, reward 0.5; in {trial.results}" in capsys.readouterr().out


def test_it_ends_when_the_trial_is_done(fake_trial, capsys):
    fake_trial.run_to(3)

    def finish():
        fake_trial.steps("7.0", 4, 100, at=20)
        fake_trial.evaluation("7.0", 100, 0.92)
        fake_trial.ended("7.0", 0)
        fake_trial.trial.done.write_text("{}")

    timer = threading.Timer(0.2, finish)
    timer.start()
    assert follow(fake_trial.trial, tick_s=0.02) == 0
    timer.join()
    out = capsys.readouterr().out
    assert "step 3/100" in out
    assert "held-out reward 0.92" in out
    assert out.rstrip().endswith("exp/t1: done")


def test_the_last_status_has_what_was_written_before_the_end(fake_trial, monkeypatch):
    """Also if that file was read before the end was written."""
    fake_trial.run_to(3)
    fake_trial.ended("7.0", 0)
    fake_trial.trial.done.write_text("{}")
    watch = TrialWatch(fake_trial.trial)
    read = watch._reader.read

    def read_early(*args):
        monkeypatch.setattr(watch._reader, "read", read)
        status = read(*args)
        fake_trial.evaluation("7.0", 3, 0.92)
        return status

    monkeypatch.setattr(watch._reader, "read", read_early)
    assert watch.poll().history.held_out[1][-1] == (3, 0.92)


def test_a_failure_shows_its_reason_and_the_first_failed_roles_log(fake_trial, capsys):
    fake_trial.run_to(3)
    fake_trial.trial.attempt("7.0").log("rollout", 0, 0).write_text("fine\nValueError: bad reward\n")
    fake_trial.exited("7.0", "rollout", 70, "ValueError: bad reward", at=30)
    fake_trial.exited("7.0", "trainer", 143, at=31)
    fake_trial.exited("7.0", "server", 1, at=32)
    fake_trial.ended("7.0", 70, "rollout-0 gave up", at=33)
    assert find_failing_role(load_status(fake_trial.trial).attempts[-1]).name == "rollout-0"
    assert follow(fake_trial.trial, tick_s=0.01) == 70
    out = capsys.readouterr().out
    assert "exp/t1: failed: rollout-0 gave up" in out
    assert out.rstrip().endswith("ValueError: bad reward")


def test_a_job_that_failed_before_the_supervisor_shows_its_scripts_output(fake_trial, capsys):
    fake_trial.job("7")
    (fake_trial.trial.jobs / "7.out").write_text("No module named hpc_rl\n")
    fake_trial.script_said("7", "ended", code=1, reason="")
    assert follow(fake_trial.trial, tick_s=0.01) == 70
    assert "  No module named hpc_rl" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "wish", "expected"), [(75, True, 75), (3, False, 3), (78, False, 78)])
def test_its_exit_code_is_the_trials(fake_trial, code, wish, expected):
    fake_trial.run_to(3)
    if wish:
        fake_trial.cancel_wish("7")
    fake_trial.ended("7.0", code)
    assert find_exit_code(load_status(fake_trial.trial)) == expected


def test_tail_gives_the_last_lines_then_what_is_new(tmp_path):
    path = tmp_path / "a.log"
    assert load_last_lines(path, 5) == []
    path.write_text("".join(f"line {number}\n" for number in range(20000)) + "half")
    assert load_last_lines(path, 2) == ["line 19999", "half"]
    assert load_last_lines(path, 0) == []
    tail = Tail(path, 2)
    assert tail.poll(to_the_end=False) == ["line 19998", "line 19999"]
    with path.open("ab") as file:
        file.write(b" line\n\xff\xfe\nunfinished")
    assert tail.poll() == ["half line", "\\xff\\xfe"]
    path.write_text("new\n")
    assert tail.poll() == ["new"]


def test_on_a_terminal_it_shows_the_view_of_top_below_the_events(fake_trial, monkeypatch, capsys):
    monkeypatch.setattr(following, "Console", partial(following.Console, force_terminal=True))
    fake_trial.run_to(100)
    fake_trial.ended("7.0", 0)
    fake_trial.trial.done.write_text("{}")
    assert follow(fake_trial.trial, tick_s=0.02) == 0
    out = capsys.readouterr().out
    assert "attempt 7.0 started" in out and "exp/t1  done  step 100/100" in out and "▁" in out
