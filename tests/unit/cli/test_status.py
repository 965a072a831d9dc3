"""status and list: the whole text of a trial's story, the same as JSON, and at most one question to the
scheduler.
"""

import json
import os
import re
import shutil
import time

import pytest

from hpc_rl.cli.__main__ import main
from hpc_rl.core.trial import write_json
from hpc_rl.schedulers.base import State
from hpc_rl.trials import trial_index

pytestmark = pytest.mark.usefixtures("state_home")

STORY = """\
exp/t1   running   step 80 of 100 (80 %)   1.0 steps/s, done in about 20 s
time        since 2026-09-21 14:21
directory   DIR
plan        grpo, embedded:d1+fsdp:d1, 1 node, recover.mode auto
job         8 (local), submitted 2026-09-21 14:21

attempts
  7.0           cancelled after 1 min 9 s   started 2026-09-21 14:13, fresh, reached step 57
                cancelled by the user, state saved
  8.0           running   started 2026-09-21 14:21, from checkpoint 57, reached step 80
                lineage 1 from checkpoint 57: loading checkpoint 57
                lineage 2 from checkpoint 70: loading checkpoint 70
                trainer-0 started again after incarnation 0: ended by SIGKILL

roles
  trainer-0   running, incarnation 1, started again 1 time
  rollout-0   running, incarnation 0
  server-0    running, incarnation 0

metrics     step 80: reward 0.8
batch       staleness 0.5
seconds     1 s  (newest 20 steps)
held-out    reward 0.31 (step 0) -> 0.55 (step 60)

checkpoint  newest 70
next        hpc-rl logs exp/t1 --follow
            hpc-rl cancel exp/t1
"""


@pytest.fixture
def trial(fake_trial, scheduler, monkeypatch):
    """exp/t1: cancelled at step 57, recovered, its trainer killed at 72, running at 80."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    fake_trial.run_to(57)
    fake_trial.cancel_wish("7")
    fake_trial.ended("7.0", 75, at=70)
    fake_trial.job("8", at=500, start_mode="resume")
    for role in ("server", "rollout", "trainer"):
        fake_trial.started("8.0", role, at=501)
    fake_trial.lineage(1, 57, "8.0", reason="loading checkpoint 57")
    fake_trial.steps("8.0", 58, 72, lineage=1, at=510)
    fake_trial.evaluation("8.0", 60, 0.55)
    fake_trial.event("8.0", "progress", at=525, step=70)
    fake_trial.exited("8.0", "trainer", 137, "ended by SIGKILL", at=530)
    fake_trial.started("8.0", "trainer", incarnation=1, at=531)
    fake_trial.generation(70)
    fake_trial.lineage(2, 70, "8.0", incarnation=1, reason="loading checkpoint 70")
    fake_trial.steps("8.0", 71, 80, lineage=2, incarnation=1, at=540)
    trial_index.record_trial(fake_trial.trial)
    scheduler.answers["8"] = State.RUNNING
    return fake_trial.trial


def test_status_tells_the_story_of_both_attempts(trial, scheduler, capsys):
    assert main(["status", "t1"]) == 0
    assert capsys.readouterr().out == STORY.replace("DIR", str(trial.dir))
    assert scheduler.num_questions == 1


def test_offline_asks_nobody(trial, scheduler, capsys):
    assert main(["status", "t1", "--offline"]) == 0
    assert capsys.readouterr().out == STORY.replace("DIR", str(trial.dir))
    assert scheduler.num_questions == 0


def test_a_scheduler_that_does_not_answer_costs_a_line(trial, scheduler, capsys):
    scheduler.refuses = "squeue: timed out"
    assert main(["status", "t1"]) == 0
    said = capsys.readouterr()
    assert said.out == STORY.replace("DIR", str(trial.dir))
    assert "squeue: timed out" in said.err


def test_a_job_that_died_without_a_word_can_be_recovered(trial, scheduler, capsys):
    scheduler.answers["8"] = State.NODE_FAIL
    main(["status", "t1"])
    out = capsys.readouterr().out
    assert out.startswith("exp/t1   killed   step 80")
    assert "the scheduler reports node_fail" in out
    assert "hpc-rl recover exp/t1" in out


def test_starts_that_led_nowhere_are_shown_with_what_ended_each(fake_trial, scheduler, capsys):
    """A job that was requeued again and again: what the loop guard counts, and its evidence."""
    fake_trial.run_to(3)
    fake_trial.event(
        "7.0", "exited", role="trainer", index=0, incarnation=0, code=70, reason="boom", failure=True
    )
    fake_trial.ended("7.0", 75)
    fake_trial.started("7.1", "trainer", at=50)
    fake_trial.lineage(1, 0, "7.1")
    fake_trial.event("7.1", "stopping", at=55, reason="the job's time is nearly over", cause="time_limit")
    fake_trial.exited("7.1", "trainer", 75, at=60)
    fake_trial.ended("7.1", 75, "the job's time is nearly over", at=61)
    scheduler.answers["7"] = State.PENDING
    trial_index.record_trial(fake_trial.trial)
    assert main(["status", "t1"]) == 0
    out = capsys.readouterr().out
    assert "no progress 2 starts in a row without a new checkpoint" in out
    assert "  trainer 0 of attempt 7.0 failed (boom)\n" in out
    assert "  trainer 0 of attempt 7.1 ran into its time limit (the job's time is nearly over)\n" in out
    main(["status", "t1", "--json"])
    assert [one["cause"] for one in json.loads(capsys.readouterr().out)["fruitless_starts"]] == [
        "failed",
        "ran into its time limit",
    ]


def test_what_a_step_measured_and_what_its_seconds_went_to(fake_trial, scheduler, capsys):
    """The evaluation, which few steps have, is no part of the mean of a step, and is named while it runs."""
    fake_trial.run_to(3)
    times = {"wait_s": 1.0, "train_s": 3.0, "evaluate_s": 36.0, "save_s": 0.0, "step_s": 37.0}
    row = {
        "step": 4,
        "time": 1_790_000_060.0,
        "lineage": 0,
        "reward": 0.4,
        "reward/format": 0.9,
        "agent/turns": 2.5,
        "accuracy": 0.75,
    }
    batch = {"completion_len": 12.5, "zero_advantage_groups": 0.25, "given_up": 0, "behave_approx_kl": 0.25}
    fake_trial.row("7.0", row | times | batch | {"eval_accuracy": 0.5, "eval_loss": 0.6})
    fake_trial.row("7.0", {"step": 4, "eval_reward": 0.5, "eval_pass@4": 0.75})
    attempt = fake_trial.trial.attempt("7.0")
    write_json(attempt.activity("trainer", 0, 0), {"doing": "evaluate", "step": 4})
    trial_index.record_trial(fake_trial.trial)
    main(["status", "t1", "--offline"])
    out = capsys.readouterr().out
    assert re.search(r"step 4 of 100 \(4 %\)   evaluating at step 4; then .* steps/min, done in about", out)
    assert "metrics     step 4: reward 0.4, reward/format 0.9, agent/turns 2.5, accuracy 0.75\n" in out
    assert (
        "batch       completion length 12.5, share of zero-advantage groups 0.25, KL to the policy that generated 0.25\n"
        in out
    )
    assert "seconds     1 s: wait 25%, train 75%; evaluate 36 s  (newest 4 steps)" in out
    held_out = out[out.index("held-out") :].splitlines()
    assert [line.removeprefix("held-out").strip() for line in held_out[:4]] == [
        "reward 0.31 (step 0) -> 0.5 (step 4)",
        "accuracy 0.5 (step 4)",
        "loss 0.6 (step 4)",
        "pass@4 0.75 (step 4)",
    ]


def test_an_exception_of_two_lines_takes_one(fake_trial, scheduler, capsys):
    fake_trial.run_to(3)
    fake_trial.event(
        "7.0", "exited", role="trainer", index=0, incarnation=0, code=70, reason="boom\nbang", failure=True
    )
    fake_trial.ended("7.0", 70, "trainer: boom\nbang")
    trial_index.record_trial(fake_trial.trial)
    main(["status", "t1"])
    out = capsys.readouterr().out
    assert "trainer: boom bang\n" in out and "\nbang" not in out
    assert "no progress" not in out  # the first lines say why the only start ended


def test_from_an_imported_generation_0_a_trial_is_not_fresh(fake_trial, scheduler, capsys):
    fake_trial.run_to(0)
    record = fake_trial.trial.lineages / "0000.json"
    record.write_text(
        json.dumps(json.loads(record.read_text()) | {"from_lineage": -1, "reason": "loading checkpoint 0"})
    )
    trial_index.record_trial(fake_trial.trial)
    main(["status", "t1"])
    out = capsys.readouterr().out
    assert "from checkpoint 0" in out and "lineage 0 from checkpoint 0: " in out and "fresh" not in out


def test_status_shows_the_rest_where_generations_are_no_folder(fake_trial, scheduler, capsys):
    fake_trial.run_to(3)
    fake_trial.trial.recover.rmdir()
    fake_trial.trial.recover.write_text("")
    trial_index.record_trial(fake_trial.trial)
    assert main(["status", "t1"]) == 0
    said = capsys.readouterr()
    assert "step 3" in said.out and "recover must be a folder" in said.err


def test_as_json(trial, capsys):
    assert main(["status", "t1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["step"], told["checkpoint"], told["eta_s"]) == ("running", 80, 70, 20.0)
    assert [attempt["state"] for attempt in told["attempts"]] == ["cancelled", "running"]
    assert told["metrics"]["reward"] == 0.8


def test_list_shows_every_trial_newest_first(trial, make_fake_trial, tmp_path, capsys):
    other = make_fake_trial(tmp_path / "runs", "exp", "t2").trial
    trial_index.record_trial(other)
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["trial", "state"],
        ["exp/t2", "rendered"],
        ["exp/t1", "running"],
    ]
    assert "80/100" in lines[2]
    shutil.rmtree(other.dir)
    main(["list", "--json"])
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["gone", "running"]
    main(["list", "--prune"])
    assert "exp/t2" in capsys.readouterr().out
    assert len(trial_index.list_entries()) == 1


def test_list_is_filtered_and_sorted_by_what_trials_reached(trial, make_fake_trial, tmp_path, capsys):
    def named(*options: str) -> list[str]:
        assert main(["list", "--json", *options]) == 0
        return [row["trial"] for row in json.loads(capsys.readouterr().out)]

    for experiment, name, last in (("exp", "t2", 90), ("other", "t3", 10)):
        fake = make_fake_trial(tmp_path / "runs", experiment, name)
        fake.run_to(last)
        fake.evaluation("7.0", last, last / 1000)
        trial_index.record_trial(fake.trial)
    assert named("t2", "other/*") == ["other/t3", "exp/t2"]
    assert named("--experiment", "exp", "--sort", "reward") == ["exp/t2", "exp/t1"]
    assert named("--sort", "held_out") == ["exp/t1", "exp/t2", "other/t3"]
    assert named("--state", "done,failed") == []
    assert main(["list", "--sort", "step"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:1] + lines[1].split()[3:6] == ["exp/t2", "90/100", "0.855", "0.09"]
    assert main(["list", "--state", "runing"]) != 0
    assert "allowed: rendered, pending, running" in capsys.readouterr().err


def test_list_asks_once_for_all_and_never_calls_a_new_job_unknown(
    make_fake_trial, tmp_path, scheduler, capsys
):
    for number in range(3):
        fake = make_fake_trial(tmp_path / "runs", "exp", f"t{number}")
        fake.job(str(number), at=time.time() - 1_790_000_000.0)
        trial_index.record_trial(fake.trial)
    scheduler.answers["1"] = State.PENDING
    assert main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["state"] for row in rows} == {"pending"}
    assert rows[0]["job_id"] == "2"
    scheduler.refuses = "no controller answers"
    assert main(["list"]) == 0
    assert (
        capsys.readouterr().err.count("only files are shown: no controller answers") == 1
    )  # of three trials


def test_following_a_trial_that_is_over_ends_with_its_code(fake_trial, scheduler, capsys):
    fake_trial.run_to(3)
    fake_trial.ended("7.0", 70, "rollout-0 gave up")
    assert main(["status", str(fake_trial.trial.dir), "--follow"]) == 70
    assert "rollout-0 gave up" in capsys.readouterr().out
    assert main(["status", str(fake_trial.trial.dir), "--follow", "--json"]) == 64


def test_many_attempts_fit_one_screen(fake_trial, scheduler, capsys):
    fake_trial.job("7")
    for restart in range(12):
        fake_trial.started(f"7.{restart}", "trainer", at=restart * 100)
    main(["status", str(fake_trial.trial.dir), "--offline"])
    out = capsys.readouterr().out
    assert "and 7 earlier: --all shows them" in out and "7.11" in out and "7.3 " not in out
    main(["status", str(fake_trial.trial.dir), "--offline", "--all"])
    assert "7.3 " in capsys.readouterr().out


def test_list_of_nothing_says_what_to_type(capsys):
    assert main(["list"]) == 0
    assert "hpc-rl quickstart" in capsys.readouterr().out


def test_control_characters_of_user_code_never_reach_the_terminal(fake_trial, scheduler, capsys):
    fake_trial.run_to(3)
    attempt = fake_trial.trial.attempt("7.0")
    write_json(attempt.rollout_report(0), {"last_error": "\x1b[31mred\x07\nforged line", "time": time.time()})
    attempt.log("trainer", 0, 0).write_text("\x1b]0;title\x07text\n")
    fake_trial.exited("7.0", "server", 1, "\x1b[2Jcleared")
    fake_trial.event("7.0", "gave_up", role="server", index=0, reason="\x9b31m")
    fake_trial.ended("7.0", 70, "\x1bcreset")
    for command in (["status"], ["status", "--follow"], ["logs"]):
        main([command[0], str(fake_trial.trial.dir), *command[1:]])
    said = capsys.readouterr()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said.out + said.err)
    assert "\\x1b[31mred\\x07 forged line" in said.out and "\\x1b]0;title\\x07text" in said.out


@pytest.fixture
def as_other_account(fake_trial):
    """Runs commands as an account that may not read the trial."""
    directory = str(fake_trial.trial.dir)
    fake_trial.run_to(3)
    for command in COMMANDS_OF_A_TRIAL:
        main([*command, directory])  # imports what a command needs, which this account may read

    def run(*command: str) -> int:
        fake_trial.trial.dir.chmod(0)
        os.seteuid(12345) if os.getuid() == 0 else None
        try:
            return main([*command, directory])
        finally:
            os.seteuid(os.getuid())
            fake_trial.trial.dir.chmod(0o700)

    return run


COMMANDS_OF_A_TRIAL = (
    ["status"],
    ["logs"],
    ["attach", "--list"],
    ["checkpoint", "list"],
    ["recover", "--explain"],
    ["cancel"],
)


def test_the_trial_of_another_account_is_refused_in_a_sentence(as_other_account, scheduler, capsys):
    capsys.readouterr()
    for command in COMMANDS_OF_A_TRIAL:
        code = as_other_account(*command)
        said = capsys.readouterr()
        assert code == 64, (command, said)
        assert "another account" in said.err and "internal error" not in said.err
