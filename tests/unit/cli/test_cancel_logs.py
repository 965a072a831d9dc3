"""cancel: the wish is on disk before the scheduler hears of it. logs: the right file, or the list of which
there are.
"""

import json
import threading
import time

import pytest

from hpc_rl.cli.__main__ import main
from hpc_rl.core.trial import write_json
from hpc_rl.schedulers.base import State
from hpc_rl.status.trial_status import load_status
from hpc_rl.trials import trial_index

pytestmark = pytest.mark.usefixtures("state_home")


@pytest.fixture
def trial(fake_trial, scheduler):
    fake_trial.run_to(5)
    trial_index.record_trial(fake_trial.trial)
    scheduler.answers["7"] = State.RUNNING
    return fake_trial.trial


@pytest.mark.parametrize(
    ("more", "was", "call", "words"),
    [
        ([], State.RUNNING, ("nudge", "7"), "saves its state"),
        (["--now"], State.RUNNING, ("cancel", "7"), "saves its state if"),
        ([], State.PENDING, ("cancel", "7"), "from the queue"),
    ],
)
def test_the_wish_is_written_before_the_scheduler_is_told(trial, scheduler, capsys, more, was, call, words):
    scheduler.answers["7"] = was
    seen = []
    scheduler.on_call = lambda: seen.append(trial.cancel_intent("7").exists())
    assert main(["cancel", "t1", *more]) == 0
    assert scheduler.calls == [call]
    assert seen == [True]
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("start_mode", ["disabled", "resume"])
@pytest.mark.parametrize("more", [[], ["--now"]])
def test_where_nothing_is_saved_nobody_says_that_it_is(
    trial, fake_trial, scheduler, capsys, start_mode, more
):
    fake_trial.job("7", start_mode=start_mode)
    write_json(trial.plan_json, {"recover_mode": "disabled"})
    assert main(["cancel", "t1", *more]) == 0
    fake_trial.event("7.0", "stopping", at=19)
    assert main(["status", "t1"]) == 0
    fake_trial.ended("7.0", 75, "cancelled by a person", at=20)
    fake_trial.script_said("7", "ended", code=75, reason="cancelled by a person")
    scheduler.answers["7"] = State.CANCELLED
    assert main(["status", "t1"]) == 0
    said = capsys.readouterr().out
    assert "state saved" not in said and "saves its state" not in said
    assert said.count("nothing is saved (recover.mode disabled)") >= 3


@pytest.mark.parametrize(
    ("purpose", "at_once", "later"),
    [
        ("serve", "ends its servers", "cancelled by the user, its servers have ended"),
        ("generate", "keeps its finished prompts", "cancelled by the user, finished prompts are saved"),
    ],
)
def test_a_trial_without_a_trainer_has_no_step_to_save(
    trial, fake_trial, scheduler, capsys, purpose, at_once, later
):
    write_json(trial.plan_json, {"purpose": purpose})
    assert main(["cancel", "t1"]) == 0
    said = capsys.readouterr().out
    assert at_once in said and "step" not in said
    fake_trial.ended("7.0", 75, "cancelled by the user", at=20)
    fake_trial.script_said("7", "ended", code=75)
    assert load_status(trial).attempts[0].cause == later


def test_cancelling_again_does_no_harm(trial, scheduler, capsys):
    assert main(["cancel", "t1"]) == main(["cancel", "t1"]) == 0
    scheduler.answers["7"] = State.CANCELLED
    capsys.readouterr()
    assert main(["cancel", "t1"]) == 0
    assert "is over already (cancelled)" in capsys.readouterr().out
    assert scheduler.calls == [("nudge", "7")] * 2


def test_a_scheduler_that_cannot_be_reached_leaves_the_wish(trial, scheduler, capsys):
    scheduler.refuses = "scancel: timed out"
    assert main(["cancel", "t1"]) == 69
    assert trial.cancel_intent("7").exists()
    assert "request to cancel is recorded" in capsys.readouterr().err


def test_on_another_cluster_no_job_of_that_number_is_touched(
    trial, fake_trial, scheduler, capsys, tmp_path, monkeypatch
):
    (tmp_path / "slurm.conf").write_text("# x\nClusterName=East\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    fake_trial.job("7", cluster="west")
    assert main(["cancel", "t1"]) == 69
    assert scheduler.calls == [] and scheduler.num_questions == 0 and trial.cancel_intent("7").exists()
    err = capsys.readouterr().err
    assert "submitted to the cluster west" in err and "configured for east" in err
    assert main(["status", "t1"]) == 0 and scheduler.num_questions == 0
    fake_trial.job("7", cluster="east")
    assert main(["cancel", "t1"]) == 0 and scheduler.calls == [("nudge", "7")]


def test_a_finished_job_gets_no_wish(trial, fake_trial, scheduler):
    fake_trial.script_said("7", "ended", code=0)
    scheduler.answers["7"] = State.DONE
    assert main(["cancel", "t1", "--json"]) == 0
    assert not trial.cancel_intent("7").exists()
    assert scheduler.calls == []


def test_waiting_is_bounded_and_tells(trial, scheduler, capsys):
    assert main(["cancel", "t1", "--wait_s", "0.1"]) == 75
    assert "still shutting down" in capsys.readouterr().out
    scheduler.on_call = lambda: scheduler.answers.update({"7": State.CANCELLED})
    assert main(["cancel", "t1", "--wait_s", "5"]) == 0
    assert "is over" in capsys.readouterr().out


def test_servers_that_were_preempted_are_taken_out_of_the_queue_too(trial, scheduler):
    write_json(trial.job("150"), {"kind": "servers", "serves": "7", "num_tasks": 2, "time": 1.0})
    for task, signalled in ((0, False), (1, True)):
        line = {"event": "ended", "code": 143, "cancelled": signalled, "reason": "told to end by a signal"}
        (trial.jobs / f"150_{task}.state").write_text(json.dumps(line) + "\n")
    assert main(["cancel", "t1"]) == 0
    assert scheduler.calls == [("nudge", "7"), ("cancel", "150")]
    (trial.jobs / "150_1.state").write_text(json.dumps(line | {"cancelled": False}) + "\n")
    assert main(["cancel", "t1"]) == 0
    assert scheduler.calls[2:] == [("nudge", "7")]


def test_cancel_of_what_was_never_submitted(fake_trial, scheduler, capsys):
    assert main(["cancel", str(fake_trial.trial.dir)]) == 0
    assert "never submitted" in capsys.readouterr().out


# -- logs


def test_by_default_the_newest_trainer(trial, fake_trial, capsys):
    fake_trial.started("7.0", "trainer", incarnation=1)
    assert main(["logs", "t1"]) == 0
    assert capsys.readouterr().out == "trainer-0.1 line\n"


def test_the_supervisor_stands_beside_the_trainer(trial, fake_trial, capsys):
    trial.attempt("7.0").log("supervisor", 0, 0).write_text("started trainer-0\n")
    assert main(["logs", "t1"]) == 0
    out = capsys.readouterr().out
    assert "==> attempts/7.0/logs/trainer-0.0.log <==\ntrainer-0.0 line" in out
    assert "==> attempts/7.0/logs/supervisor-0.0.log <==\nstarted trainer-0" in out


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--role", "server", "--index", "1"], "server-1.0 line\n"),
        (["--role", "trainer", "--incarnation", "0"], "trainer-0.0 line\n"),
        (["--role", "rollout", "-n", "1", "--attempt", "7.0"], "rollout-0.0 line\n"),
        (["--role", "rollout", "--attempt", "7"], "rollout-0.0 line\n"),
        (["--role", "job"], "the script's own words\n"),
        (["--role", "supervisor"], "the script's own words\n"),  # which writes there
        (
            [],
            "==> attempts/7.0/logs/trainer-0.1.log <==\ntrainer-0.1 line\n\n==> jobs/7.out <==\nthe script's own words\n",
        ),
    ],
)
def test_what_is_asked_for(trial, fake_trial, capsys, more, text):
    fake_trial.started("7.0", "server", index=1)
    fake_trial.started("7.0", "trainer", incarnation=1)
    (trial.jobs / "7.out").write_text("the script's own words\n")
    assert main(["logs", "t1", *more]) == 0
    assert capsys.readouterr().out == text


@pytest.fixture
def with_servers(trial, fake_trial):
    """Two tasks of a server array, one started twice; the trial goes on as job 30, the second task as task 1
    of array 31.
    """
    write_json(trial.job("8"), {"job_id": "8", "kind": "servers", "serves": "7", "num_tasks": 2, "time": 1.0})
    for attempt, number in (("8_0.0", 3), ("8_1.0", 4), ("8_1.1", 4)):
        fake_trial.started(attempt, "server", index=number)
        trial.attempt(attempt).log("server", number, 0).write_text(f"{attempt} of server {number}\n")
    for name in ("7", "8_0", "8_1", "30", "31_1"):
        (trial.jobs / f"{name}.out").write_text(f"words of {name}\n")
    write_json(trial.successor("7", 1), {"job_id": "30"})
    write_json(trial.successor("8_1", 1), {"job_id": "31"})
    for role in ("server", "supervisor"):  # those of layout allocation come with the trial's attempt
        for path in trial.attempt("7.0").dir.glob(f"logs/{role}-*"):
            path.unlink()
    return trial


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--role", "server", "--index", "4"], "8_1.1 of server 4\n"),
        (["--role", "server", "--attempt", "8_1.0"], "8_1.0 of server 4\n"),
        (["--role", "job"], "words of 30\n"),
        (["--role", "job", "--attempt", "7.1"], "words of 30\n"),
        (["--role", "job", "--attempt", "7.0"], "words of 7\n"),
        (["--role", "job", "--attempt", "8_0"], "words of 8_0\n"),
        (["--role", "job", "--attempt", "8_1.1"], "words of 31_1\n"),
        (
            [],
            "==> attempts/7.0/logs/trainer-0.0.log <==\ntrainer-0.0 line\n\n==> jobs/30.out <==\nwords of 30\n",
        ),
    ],
)
def test_servers_of_their_own_and_successors(with_servers, capsys, more, text):
    assert main(["logs", "t1", *more]) == 0
    assert capsys.readouterr().out == text


def test_the_newest_start_of_every_server_task(with_servers, capsys):
    assert main(["logs", "t1", "--role", "server"]) == 0
    out = capsys.readouterr().out
    assert "8_0.0 of server 3" in out and "8_1.1 of server 4" in out and "8_1.0 of" not in out


def test_ranks_with_files_of_their_own(trial, capsys):
    for rank in (0, 1):
        trial.attempt("7.0").log("trainer", 0, 2, rank).write_text(f"rank {rank}\n")
    assert main(["logs", "t1", "--role", "trainer", "--rank", "1"]) == 0
    assert capsys.readouterr().out == "rank 1\n"


def test_servers_that_never_started_have_the_log_of_their_agent(trial, capsys):
    trial.attempt("7.0").log("serveragent", 0, 0).write_text("srun: error: no such GPU\n")
    assert main(["logs", "t1", "--role", "server", "--index", "1"]) == 0
    assert capsys.readouterr().out == "srun: error: no such GPU\n"
    assert main(["logs", "t1", "--role", "serveragent"]) == 0


def test_what_is_not_there_is_said(trial, capsys):
    assert main(["logs", "t1", "--role", "server", "--index", "9"]) == 70
    assert "no log for --role server --index 9" in capsys.readouterr().err


def test_before_any_log_it_is_said_what_the_trial_waits_for(fake_trial, scheduler, capsys):
    fake_trial.job("7", at=time.time() - 1_790_000_000.0)
    scheduler.answers["7"] = State.PENDING
    assert main(["logs", str(fake_trial.trial.dir)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no log yet: exp/t1 is pending since ")
    assert "waiting to be started" in out


def test_following_waits_for_the_first_log(fake_trial, scheduler, capsys):
    fake_trial.job("7", at=time.time() - 1_790_000_000.0)
    scheduler.answers["7"] = State.PENDING

    def begin():
        scheduler.answers["7"] = State.RUNNING
        fake_trial.run_to(2)
        time.sleep(1)
        fake_trial.ended("7.0", 0)
        fake_trial.trial.done.write_text("{}")

    timer = threading.Timer(1.0, begin)
    timer.start()
    assert main(["logs", str(fake_trial.trial.dir), "--follow", "--role", "server"]) == 0
    timer.join()
    said = capsys.readouterr()
    assert "server-0.0 line" in said.out
    assert "waiting: no log yet: exp/t1 is pending" in said.err


def test_of_many_ranks_the_first_is_shown_and_all_where_asked(trial, capsys):
    attempt = trial.attempt("7.0")
    attempt.log("trainer", 0, 1).write_text("")
    for rank in range(3):
        attempt.log("trainer", 0, 1, rank).write_text(f"rank {rank}\n")
    assert main(["logs", "t1", "--role", "trainer"]) == 0
    assert capsys.readouterr().out == "rank 0\n"
    assert main(["logs", "t1", "--role", "trainer", "--rank", "all"]) == 0
    out = capsys.readouterr().out
    assert all(f"rank {rank}\n" in out for rank in range(3))


def test_the_list_of_files(trial, capsys):
    assert main(["logs", "t1", "--list"]) == 0
    assert "attempts/7.0/logs/server-0.0.log" in capsys.readouterr().out
    assert main(["logs", "t1", "--list", "--json"]) == 0
    assert {row["role"] for row in json.loads(capsys.readouterr().out)} == {"trainer", "rollout", "server"}


def test_following_ends_with_the_trial(trial, fake_trial, scheduler, capsys):
    fake_trial.ended("7.0", 0)
    fake_trial.trial.done.write_text("{}")
    assert main(["logs", "t1", "--follow"]) == 0
    assert "trainer-0.0 line" in capsys.readouterr().out
