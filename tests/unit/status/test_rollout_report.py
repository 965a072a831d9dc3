"""What the rollout role leaves of itself, and what a person reads of it: rejections with reasons, exceptions,
hangs.
"""

import asyncio
import contextlib
import json
import time

import pytest

from hpc_rl.cli.status import describe_status
from hpc_rl.core.records import TrialState
from hpc_rl.core.trial import write_json
from hpc_rl.rollout import report
from hpc_rl.status.attempts import RoleStatus
from hpc_rl.status.rollout_report import (
    RolloutReport,
    describe_environments,
    describe_rollout,
    list_problems,
    load_rollout,
)
from hpc_rl.status.status_text import describe_role
from hpc_rl.status.trial_status import load_status

T0 = 1_790_000_000.0


def test_rejections_and_the_last_exception_are_in_status(fake_trial):
    fake_trial.run_to(3)
    words = {"rejected": {"reward_timeout": 60, "too_long": 4}, "rejected_in_a_row": 64}
    words |= {"last_reason": "reward_timeout", "running": 8, "time": time.time(), "servers": 1}
    words["last_error"] = "reward_timeout: the reward took more than 15 s"
    write_json(fake_trial.trial.attempt("7.0").rollout_report(0), words)
    said = "\n".join(describe_status(load_status(fake_trial.trial)))
    assert "8 prompts running" in said and "64 rejected" in said
    assert "rejected so far: reward_timeout 60, too_long 4" in said
    assert "the last 64 prompts were rejected: reward_timeout" in said
    assert "last exception: reward_timeout: the reward took more than 15 s" in said
    assert load_status(fake_trial.trial).to_json()["rollout"]["rejected_in_a_row"] == 64


@pytest.mark.parametrize(("role", "command"), [("rollout", "exp/t1 --role rollout"), ("", "exp/t1")])
def test_the_log_that_has_the_traceback_is_the_next_command(fake_trial, role, command):
    fake_trial.run_to(3)
    if role:
        fake_trial.event("7.0", "gave_up", role=role, index=0, reason="the last 64 prompts were rejected")
    fake_trial.job("7", command=["hpc-rl", "submit", "--config", "my sums.yaml"])
    write_json(fake_trial.trial.plan_json, {"recover_mode": "auto"})
    fake_trial.ended("7.0", 70, at=9)
    said = describe_status(load_status(fake_trial.trial))
    log, again = said[next(number for number, line in enumerate(said) if line.startswith("next")) :]
    assert log.endswith(command) and again.endswith("hpc-rl submit --config 'my sums.yaml'")


def test_a_batch_of_a_policy_that_is_far_away_is_told(fake_trial):
    fake_trial.row("7.0", {"step": 4, "time": time.time(), "behave_approx_kl": 7.03, "given_up": 128})
    said = "\n".join(describe_status(load_status(fake_trial.trial)))
    assert "trajectories of discarded weights 128" in said
    assert "KL 7.03: the policy is far from the one that generated this batch" in said


@pytest.mark.parametrize(
    ("fresh", "of_all", "words"),
    [
        (0.31, 0.5, "mean |log w| is 0.31 at tokens of the newest weights, more than 0.1"),
        (0.02, 0.5, ""),  # only the older tokens differ
        (None, 0.5, ""),  # there are only older tokens
    ],
)
def test_servers_that_sample_from_another_policy_are_told(fake_trial, fresh, of_all, words):
    numbers = {"mismatch_log_w_mean": of_all} | ({} if fresh is None else {"mismatch_log_w_fresh": fresh})
    fake_trial.row("7.0", {"step": 4, "time": time.time(), **numbers})
    said = "\n".join(describe_status(load_status(fake_trial.trial)))
    assert words in said and ("ANOTHER POLICY" in said) == bool(words)


def test_the_newest_incarnation_counts_and_junk_is_left_out(fake_trial):
    attempt = fake_trial.trial.attempt("7.0")
    attempt.make_dirs()
    assert load_rollout(attempt) is None
    write_json(attempt.rollout_report(0), {"accepted": 5})
    junk = {"accepted": "many", "rejected": [], "unheard_of": 1}
    write_json(attempt.rollout_report(10), {"running": 3, **junk})
    attempt.rollout_report(11).write_text('{"acce')
    assert load_rollout(attempt) == RolloutReport(running=3)


def test_an_endpoint_that_fails_is_told_and_no_hang_is_guessed():
    rollout = RolloutReport(
        time=time.time(),
        servers=1,
        oldest_running_s=300,
        quiet_s=290,
        endpoints={"judge": "pool judge: refused"},
    )
    lines = list_problems(rollout, live=True)
    assert "pool judge: refused" in lines and any("nothing has finished" in line for line in lines)
    assert not any("hang?" in line for line in lines)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"oldest_running_s": 300, "quiet_s": 290},
            "nothing has finished for 4 min 50 s, and the oldest prompt has been running for 5 min",
        ),
        ({"oldest_running_s": 300, "quiet_s": None}, "does the reward function or the workflow hang?"),
        (
            {"blocked": {"own.py:7, in run": 12.0}},
            "own.py:7, in run has blocked the event loop of its worker",
        ),
        ({"servers": 0, "oldest_running_s": 30}, "no generation server is alive"),
        ({"time": 1_790_000_000.0}, "has not reported for"),
    ],
)
def test_what_hangs_is_told_while_it_is_live(given, words):
    rollout = RolloutReport(**{"time": time.time(), "servers": 1} | given)
    assert any(words in line for line in list_problems(rollout, live=True))
    assert list_problems(rollout, live=False) == []


def test_a_busy_rollout_is_no_trouble():
    busy = {"running": 9, "oldest_running_s": 300, "quiet_s": 2, "servers": 2, "rejected_in_a_row": 1}
    rollout = RolloutReport(time=time.time(), **busy)
    assert list_problems(rollout, live=True) == []
    assert describe_rollout(rollout, live=True).startswith("9 prompts running, 0 groups ready")
    assert "running" not in describe_rollout(rollout, live=False)


def test_servers_are_counted_by_pool(fake_trial):
    fake_trial.run_to(3)
    path = fake_trial.trial.attempt("7.0").rollout_report(0)
    report = {
        "time": time.time(),
        "servers": 2,
        "oldest_running_s": 30,
        "pools": {"teacher": 2, "student": 0},
    }
    write_json(path, report)
    said = "\n".join(describe_status(load_status(fake_trial.trial)))
    assert "2 servers alive (student 0, teacher 2)" in said
    assert "no server of pool student is alive" in said and "pool teacher" not in said
    write_json(path, {**report, "pools": {"rollout": 2}})
    assert "2 servers alive\n" in "\n".join(describe_status(load_status(fake_trial.trial)))


def test_each_environment_has_a_line(fake_trial):
    fake_trial.run_to(3)
    sums = {"name": "sums_0", "group_size": 4, "queued": 3, "accepted": 9, "silent_s": 1}
    game = {"name": "game_0", "group_size": 8, "rejected": 2, "last_reason": "scores[1] is nan"}
    words = {"accepted": 9, "ready": 3, "time": time.time(), "environments": [sums, game, {"name": "torn"}]}
    words |= {"takes_groups": True, "sealed": 2}
    path = fake_trial.trial.attempt("7.0").rollout_report(0)
    write_json(path, words)
    assert load_status(fake_trial.trial).rollout.environments == []  # what is not sound is left out
    words["environments"].pop()
    write_json(path, words)
    status = load_status(fake_trial.trial)
    said = "\n".join(describe_status(status))
    assert "3 groups ready, 2 batches cut, 0 rejected" in said and "prompts running" not in said
    assert "sums_0: groups of 4, 9 accepted, 3 queued, 0 rejected\n" in said
    assert (
        "game_0: groups of 8, 0 accepted, 0 queued, 2 rejected (the last: scores[1] is nan); disconn" in said
    )
    assert status.to_json()["rollout"]["environments"][0]["name"] == "sums_0"
    sums |= {"silent_s": 90, "too_old": 7}
    write_json(path, words)
    assert "no environment is connected" not in "\n".join(describe_status(load_status(fake_trial.trial)))
    assert "0 rejected, 7 too old; silent for 1 min 30 s" in "\n".join(
        describe_status(load_status(fake_trial.trial))
    )


def test_an_environment_role_is_shown_with_its_name():
    role = RoleStatus(role="environment", index=1, incarnation=0, running=True)
    names = {("environment", 0): "sums", ("environment", 1): "game"}
    assert describe_role(role, names).startswith("environment-1 (game) running")
    assert describe_role(role).startswith("environment-1 running")


def test_a_trial_that_waits_for_environments_says_so():
    rollout = RolloutReport(time=time.time(), servers=1, takes_groups=True)
    assert list_problems(rollout, live=True) == []  # environments wait for the trainer
    rollout.trainer_s = 5.0
    (line,) = list_problems(rollout, live=True)
    assert line == "no environment has connected yet; environments connect once the trainer has started"
    rollout.trainer_s = 90.0
    assert any("no environment is connected: look at" in line for line in list_problems(rollout, live=True))
    assert describe_rollout(rollout, live=True).startswith("0 groups ready, 0 batches cut, 0 rejected")


@pytest.mark.parametrize(
    ("wait", "said"),
    [
        (
            {"kind": "sequences", "parts": 3},
            "12 of 16 sequences are ready; 3 more sequences are of incomplete groups",
        ),
        ({"kind": "combination"}, "the groups of 4 and 6 that are ready do not add up to 16 sequences yet"),
        ({"kind": "sizes"}, "groups of 4 and 6 never add up to the 16 sequences of a batch: connect"),
        (
            {"kind": "share", "environment": "sums_0"},
            "12 of the 16 sequences reserved for sums_0 are ready",
        ),
    ],
)
def test_what_the_next_batch_waits_for_is_shown(wait, said):
    given = {"ready": 12, "needed": 16, "sizes": [4, 6], **wait}
    rollout = RolloutReport.parse({"takes_groups": True, "waits_for": given})
    assert describe_environments(rollout, live=True)[0].startswith(f"next batch: {said}")
    assert describe_environments(rollout, live=False) == []


async def test_the_report_is_written_while_it_changes_and_at_the_end(tmp_path):
    path, state = tmp_path / "rollout.0.json", {"accepted": 0, "blocked": {"mine.py:3, in run": 9.0}}
    task = asyncio.create_task(
        report.keep_reporting(path, lambda: dict(state), lambda: {"servers": 2}, every_s=0.01)
    )
    while not path.exists():
        await asyncio.sleep(0.01)
    assert json.loads(path.read_text())["servers"] == 2
    state["accepted"] = 7
    while json.loads(path.read_text())["accepted"] != 7:
        await asyncio.sleep(0.01)
    state["accepted"] = 8
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    last = json.loads(path.read_text())
    assert last["accepted"] == 8 and not last["blocked"], "the workers ended with the role"


async def test_a_file_system_that_fails_does_not_end_the_role(tmp_path, caplog):
    task = asyncio.create_task(report.keep_reporting(tmp_path / "no" / "x", dict, every_s=0.01))
    while "can't write its report" not in caplog.text:
        await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_a_trial_that_is_done_tells_what_was_rejected_and_left_out(fake_trial):
    fake_trial.run_to(3)
    counts = {"accepted": 192, "rejected": {"too_long": 4, "reward_failed": 60}}
    write_json(fake_trial.trial.attempt("7.0").rollout_report(0), counts)
    fake_trial.ended("7.0", 75, at=20)
    fake_trial.job("8", at=30)
    fake_trial.started("8.0", "trainer", at=31)  # its rollout role left no report
    fake_trial.row("8.0", {"step": 4, "time": 1_790_000_060.0, "lineage": 0})
    evaluation = {"step": 4, "eval_reward": 0.15, "eval_num_prompts": 84, "eval_left_out": 16.0}
    fake_trial.row("8.0", evaluation)
    fake_trial.ended("8.0", 0, at=60)
    write_json(fake_trial.trial.done, {"job_id": "8"})
    status = load_status(fake_trial.trial)
    assert status.state is TrialState.DONE
    said = "\n".join(describe_status(status))
    assert "64 rejected" in said and "rejected: reward_failed 60, too_long 4" in said
    assert "held-out    reward 0.31 (step 0) -> 0.15 (step 4, over 84 of 100 rows)" in said
    told = status.to_json()
    assert told["rejected_prompts"] == {"total": 64, "reasons": {"reward_failed": 60, "too_long": 4}}
    assert told["held_out_rows"] == {"scored": 84, "left_out": 16}


def test_skipped_updates_are_told(fake_trial):
    for step in range(1, 4):
        row = {"step": step, "time": T0 + step, "reward": 0.5, "reward_std": 0.1, "grad_norm": 1.0}
        fake_trial.row("7.0", row | ({"updates_skipped": 2.0} if step == 2 else {}))
    status = load_status(fake_trial.trial)
    assert status.to_json()["skipped_updates"] == {"num_updates": 2, "num_steps": 1, "last_step": 2}
    said = "\n".join(describe_status(status))
    assert "2 updates were skipped in 1 step, the last one step 2: the loss or its gradient" in said


def test_steps_that_teach_nothing_and_clipped_rewards_are_told(fake_trial):
    for step in range(1, 13):
        idle = {"grad_norm": 0.0, "zero_advantage_groups": 1.0, "reward": 45.0, "reward_std": 4.0}
        fake_trial.row("7.0", {"step": step, "time": T0 + step, "reward_clipped": 1.0, **idle})
    status = load_status(fake_trial.trial)
    told = status.to_json()["idle_steps"]
    assert (told["in_a_row"], told["since_step"], told["notable"]) == (12, 1, True)
    assert told["reasons"] == ("zero_gradient", "zero_advantage")
    said = "\n".join(describe_status(status))
    assert (
        "NOTHING IS LEARNED" in said
        and "a share of 1 of the newest rewards is beyond actor.reward_clip" in said
    )
