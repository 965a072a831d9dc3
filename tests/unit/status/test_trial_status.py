"""What status knows of a trial: from files alone, with the scheduler's word, and with half of the files
missing.
"""

import os
import time
from dataclasses import replace

import pytest

from hpc_rl.checkpoint.start_facts import find_fruitless_starts
from hpc_rl.cli.status import describe_status
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.trial import write_json
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.schedulers.shared_query import NOT_LISTED
from hpc_rl.status.trial_status import StatusReader, load_status
from hpc_rl.supervise.job_policy import AFTER_EXIT

T0 = 1_790_000_000.0  # of the fake trial
RUNNING = JobState("7", State.RUNNING, native="RUNNING")


@pytest.fixture
def five_steps(fake_trial):
    """A trial whose job 7 made steps 1 to 5 and runs."""
    fake_trial.run_to(5)
    return fake_trial


def cancelled_and_recovered(fake) -> None:
    fake.run_to(57)
    fake.exited("7.0", "trainer", 75, at=69)
    fake.cancel_wish("7")
    fake.ended("7.0", 75, at=70)
    fake.script_said("7", "ended", at=71, code=75, reason="cancelled by a person")
    fake.generation(57)
    fake.job("8", at=500, start_mode="resume")
    for role in ("server", "rollout", "trainer"):
        fake.started("8.0", role, at=501)
    fake.lineage(1, 57, "8.0", reason="loading checkpoint 57")
    fake.steps("8.0", 58, 72, lineage=1, at=510)
    fake.exited("8.0", "trainer", 137, at=530)
    fake.started("8.0", "trainer", incarnation=1, at=531)
    fake.generation(70)
    fake.lineage(2, 70, "8.0", incarnation=1)
    fake.steps("8.0", 71, 80, lineage=2, incarnation=1, at=540)


def test_the_story_of_cancel_and_recover_is_told_from_files_alone(fake_trial):
    cancelled_and_recovered(fake_trial)
    story = load_status(fake_trial.trial)
    assert (story.state, story.step, story.total_steps, story.generation) == ("running", 80, 100, 70)
    first, second = story.attempts
    assert (first.id, first.state, first.last_step) == ("7.0", "cancelled", 57)
    assert "cancelled" in first.cause and "state saved" in first.cause
    assert (second.id, second.state, second.last_step) == ("8.0", "running", 80)
    assert [(line.lineage, line.from_step) for line in second.lineages] == [(1, 57), (2, 70)]
    trainer = next(role for role in second.roles if role.role == "trainer")
    assert (trainer.incarnation, trainer.running, trainer.ends[0].code) == (1, True, 137)
    assert [job.start_mode for job in story.jobs] == ["", "resume"]
    assert [row["step"] for row in story.history.steps] == list(range(1, 81))


def test_rate_and_eta_count_the_steps_since_the_last_start(fake_trial):
    cancelled_and_recovered(fake_trial)
    story = load_status(fake_trial.trial)
    assert story.rate == pytest.approx(1.0)
    assert story.eta_s == pytest.approx(20.0)


def test_no_rate_is_told_while_nothing_trains(fake_trial):
    """From the death of the trainer, or of its supervisor, to the first step of the next one."""
    fake_trial.run_to(36)
    rates = [load_status(fake_trial.trial).rate]
    fake_trial.exited("7.0", "trainer", 137, at=60)
    rates.append(load_status(fake_trial.trial).rate)
    fake_trial.started("7.0", "trainer", incarnation=1, at=61)
    rates.append(load_status(fake_trial.trial).rate)
    fake_trial.lineage(1, 30, "7.0", incarnation=1)
    fake_trial.steps("7.0", 31, 36, lineage=1, incarnation=1, at=70)
    rates.append(load_status(fake_trial.trial).rate)
    fake_trial.event("7.0", "supervisor_started", at=80, role="supervisor", number=1)
    story = load_status(fake_trial.trial)
    rates.append(story.rate)
    assert rates == [pytest.approx(1.0), None, None, pytest.approx(1.0), None]
    assert (story.state, story.eta_s) == ("running", None)


def test_done(fake_trial):
    fake_trial.run_to(100)
    fake_trial.ended("7.0", 0, at=120)
    fake_trial.trial.done.write_text("{}")
    story = load_status(fake_trial.trial)
    assert (story.state, story.over, story.attempts[0].state) == ("done", True, "done")


@pytest.mark.parametrize(
    ("code", "reason", "state"),
    [
        (0, "", "done"),
        (3, "no generation", "failed"),
        (70, "server-0 gave up", "failed"),
        (78, "bad", "failed"),
        (143, "", "killed"),
    ],
)
def test_an_end_is_told_by_its_code_and_reason(five_steps, code, reason, state):
    five_steps.ended("7.0", code, reason, at=20)
    five_steps.script_said("7", "ended", code=code, reason="")
    story = load_status(five_steps.trial)
    assert (story.state, story.attempts[0].exit_code) == (state, code)
    assert reason in story.reason


def test_a_stop_is_pending_only_while_its_job_starts_again(five_steps):
    five_steps.ended("7.0", 75, "wall time", at=20)
    assert load_status(five_steps.trial).state == "pending"
    five_steps.script_said("7", "ended", code=75, reason="told to end by a signal")
    story = load_status(five_steps.trial)
    assert story.state == "stopped"
    assert "told to end by a signal" in story.reason


def test_a_later_attempt_means_that_the_silent_one_before_is_over(five_steps):
    five_steps.started("7.1", "trainer", at=900)
    story = load_status(five_steps.trial)
    first, second = story.attempts
    assert (first.id, first.state, second.id, second.state) == ("7.0", "killed", "7.1", "running")


def test_attempts_are_in_order_of_submission_then_of_restart(fake_trial):
    for number, job in enumerate(("10", "9")):
        fake_trial.job(job, at=number * 100)
    for attempt in ("9.0", "10.10", "10.9"):
        fake_trial.event(attempt, "started")
    assert [attempt.id for attempt in load_status(fake_trial.trial).attempts] == ["10.9", "10.10", "9.0"]


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (State.RUNNING, "running"),
        (State.PENDING, "pending"),
        (State.CANCELLED, "cancelled"),
        (State.TIMEOUT, "killed"),
        (State.NODE_FAIL, "killed"),
        (State.FAILED, "failed"),
    ],
)
def test_the_scheduler_decides_whether_a_silent_attempt_still_runs(five_steps, said, state):
    story = load_status(five_steps.trial, JobState("7", said, native="WORD"))
    assert story.state == state
    assert (story.attempts[0].state == "running") is (said is State.RUNNING)


def test_certain_files_outweigh_an_old_word_of_the_scheduler(five_steps):
    five_steps.ended("7.0", 70, "server-0 gave up")
    assert load_status(five_steps.trial, JobState("7", State.RUNNING)).state == "failed"


def test_without_a_scheduler_silence_is_called_unknown(five_steps):
    assert load_status(five_steps.trial).state == "running"
    past = time.time() - 3600
    for path in five_steps.trial.dir.rglob("*"):
        os.utime(path, (past, past))
    story = load_status(five_steps.trial)
    assert story.state == "unknown"
    assert "60 min" in story.reason


def test_before_anything_has_started(fake_trial):
    assert load_status(fake_trial.trial).state == "rendered"
    fake_trial.job("7")
    assert load_status(fake_trial.trial).state == "unknown"
    assert load_status(fake_trial.trial, JobState("7", State.PENDING, reason="Resources")).reason == (
        "waiting to be started (Resources: no nodes are free)"
    )
    assert load_status(fake_trial.trial, JobState("7", State.RUNNING)).state == "running"
    fake_trial.script_said("7", "ended", code=1, reason="python is not there")
    story = load_status(fake_trial.trial)
    assert story.state == "failed"
    assert "python is not there" in story.reason


def test_a_job_of_a_moment_ago_is_never_unknown(fake_trial):
    fake_trial.job("7", at=time.time() - T0 - 3)
    story = load_status(fake_trial.trial)
    assert (story.state, story.since) == ("pending", pytest.approx(time.time() - 3, abs=60))


def test_a_job_that_the_scheduler_does_not_list_any_more_was_killed(fake_trial):
    gone = JobState("7", State.UNKNOWN, NOT_LISTED, "does not list the job any more")
    fake_trial.job("7")
    assert load_status(fake_trial.trial, gone).state == "killed"
    fake_trial.run_to(5)
    story = load_status(fake_trial.trial, gone)
    words = "exited without recording a reason; the scheduler does not list the job any more"
    assert (story.state, story.reason) == ("killed", words)


def test_a_job_taken_back_waits_and_its_attempt_says_why(five_steps):
    begins = JobState("7", State.PENDING, "PENDING", "BeginTime")
    story = load_status(five_steps.trial, begins, asked_at=time.time())
    assert story.state == "pending"
    assert "again (BeginTime: " in story.reason and "two minutes" in story.reason
    assert story.attempts[0].state == "killed"
    assert "its node failed" in story.attempts[0].cause
    assert story.last_end.startswith("attempt 7.0: killed: ended without a record")


@pytest.mark.parametrize(
    "said", [JobState("7", State.CANCELLED, "CANCELLED by 1000"), JobState("7", State.UNKNOWN, NOT_LISTED)]
)
def test_a_job_whose_first_node_died_was_cancelled_by_nobody(five_steps, said):
    five_steps.script_said("7", "started")
    five_steps.script_said("7", "first_node_lost", at=40)
    story = load_status(five_steps.trial, said)
    assert story.state == "killed" and story.attempts[-1].cause == story.reason
    assert "first node failed" in story.reason and "by the user" not in story.reason
    # where it may be requeued it goes on
    assert load_status(five_steps.trial, JobState("7", State.PENDING)).state == "pending"


def test_an_old_pending_does_not_hide_that_it_has_started(five_steps):
    pending = JobState("7", State.PENDING, "PENDING", "Resources")
    assert load_status(five_steps.trial, pending, asked_at=T0 - 10).state == "running"
    assert load_status(five_steps.trial, pending, asked_at=time.time()).state == "pending"


def test_when_it_will_be_ended_is_told_by_the_supervisor_or_the_scheduler(five_steps):
    assert load_status(five_steps.trial).ends_at is None
    for ends_at in (T0 + 100, T0 + 200):
        five_steps.event("7.0", "end_time", ends_at=ends_at)
    assert load_status(five_steps.trial).ends_at == T0 + 200
    assert load_status(five_steps.trial, JobState("7", State.RUNNING, end_time=5.0)).ends_at == 5.0


def test_epochs_alone_tell_how_far_it_is_once_a_step_is_logged(five_steps):
    five_steps.trial.config_json.write_text("{}")
    assert load_status(five_steps.trial).total_steps is None
    five_steps.row("7.0", {"step": 6, "time": T0 + 16, "total_steps": 60})
    story = load_status(five_steps.trial)
    assert (story.total_steps, story.eta_s) == (60, pytest.approx(54.0, rel=0.2))


def test_the_newest_submissions_length_counts_before_its_first_step(five_steps):
    five_steps.row("7.0", {"step": 6, "time": T0 + 16, "lineage": 0, "total_steps": 60})
    five_steps.job("8", 100, changed=["actor.optimizer.lr: 1e-05 -> 1e-06  (safe)"])
    assert load_status(five_steps.trial).total_steps == 60
    five_steps.job("9", 200, changed=["total_train_steps: 60 -> 100  (safe)"])
    assert load_status(five_steps.trial).total_steps == 100
    five_steps.trial.config_json.write_text("{}")  # by epochs: only the trainer knows
    assert load_status(five_steps.trial).total_steps is None
    five_steps.lineage(1, 6, "9.0")
    five_steps.row("9.0", {"step": 7, "time": T0 + 216, "lineage": 1, "total_steps": 90})
    assert load_status(five_steps.trial).total_steps == 90


def test_a_replica_that_is_given_up_and_one_that_waits_are_told(five_steps):
    five_steps.exited("7.0", "server", 1, "no memory")
    five_steps.event("7.0", "gave_up", role="server", index=0, reason="server 0 ended 5 times in a row")
    five_steps.exited("7.0", "rollout", 1, "a bad reward")
    five_steps.event("7.0", "restarting", role="rollout", index=0, pause_s=8, reason="a bad reward")
    roles = {role.role: role for role in load_status(five_steps.trial).attempts[0].roles}
    assert roles["server"].gave_up == "server 0 ended 5 times in a row"
    assert roles["rollout"].restarting == "a bad reward"
    five_steps.started("7.0", "rollout", incarnation=1)
    roles = {role.role: role for role in load_status(five_steps.trial).attempts[0].roles}
    assert roles["rollout"].restarting == ""


def test_a_cancelled_job_that_never_started(fake_trial):
    fake_trial.job("7")
    fake_trial.cancel_wish("7")
    assert load_status(fake_trial.trial).state == "cancelled"


def test_a_wish_hides_that_the_scheduler_was_asked_before_it(five_steps):
    five_steps.cancel_wish("7")
    begins = JobState("7", State.PENDING, "PENDING", "BeginTime")
    story = load_status(five_steps.trial, begins, asked_at=time.time())
    assert story.state == "stopping" and "cancelled by the user" in story.reason
    story = load_status(five_steps.trial, JobState("7", State.CANCELLED, "CANCELLED", "BeginTime"))
    words = "cancelled by the user: the scheduler reports CANCELLED"
    assert (story.state, story.reason) == ("cancelled", words)
    assert story.attempts[0].state == "cancelled"


def test_a_wish_makes_a_running_trial_stopping(five_steps):
    five_steps.cancel_wish("7")
    assert load_status(five_steps.trial, JobState("7", State.RUNNING)).state == "stopping"


def test_every_file_may_be_missing_or_torn(five_steps):
    trial = five_steps.trial
    torn = [trial.plan_json, trial.config_json, trial.job("7"), trial.lineages / "0000.json"]
    for path in (*torn, trial.attempt("7.0").events):
        path.write_text('{"time": ')
    trial.attempt("7.0").ended.write_text('"not an object"')
    (trial.attempts / "junk").mkdir()
    (trial.recover / "gen-00000004").mkdir()
    story = load_status(trial)
    assert (story.step, story.generation, len(story.attempts)) == (5, None, 1)
    by_their_logs = {role.name for role in story.attempts[0].roles}
    assert by_their_logs == {"trainer-0", "rollout-0", "server-0"}


def test_names_that_look_like_numbers_and_are_none_are_passed_over(five_steps):
    """`²` is a digit to Python, and no number."""
    five_steps.generation(4)
    trial = five_steps.trial
    for folder in (trial.recover / "gen-²", trial.attempts / "7.²"):
        folder.mkdir()
        write_json(folder / "manifest.json", {})
    write_json(trial.jobs / "7.next-²", {"job_id": "8"})
    write_json(trial.attempt("7.0").dir / "rollout.².json", {})
    (trial.attempt("7.0").dir / "metrics.².jsonl").write_text("")
    story = load_status(trial)
    assert (story.step, story.generation, [attempt.id for attempt in story.attempts]) == (5, 4, ["7.0"])


def test_a_reader_follows_what_grows(fake_trial):
    reader = StatusReader(fake_trial.trial)
    assert reader.read().state == "rendered"
    fake_trial.run_to(3)
    assert reader.read().step == 3
    fake_trial.steps("7.0", 4, 6, at=20)
    assert reader.read().step == 6
    fake_trial.exited("7.0", "trainer", -9)
    assert not next(role for role in reader.read().attempts[0].roles if role.role == "trainer").running


def test_a_sentence_of_the_local_scheduler_is_set_off(fake_trial):
    fake_trial.run_to(3)
    said = JobState("7", State.FAILED, "FAILED", "the runner was killed")
    assert "the scheduler reports FAILED: the runner was killed" in load_status(fake_trial.trial, said).reason


@pytest.mark.parametrize(
    ("native", "state", "words"),
    [
        ("TIMEOUT", State.TIMEOUT, "TIMEOUT TimeLimit: it reached"),
        ("PREEMPTED", State.PREEMPTED, "PREEMPTED TimeLimit: it was"),
        ("NODE_FAIL", State.NODE_FAIL, "NODE_FAIL TimeLimit: it lost a node"),
    ],
)
def test_an_end_without_a_word_is_told_in_the_schedulers_words_and_in_ours(fake_trial, native, state, words):
    fake_trial.run_to(3)
    assert words in load_status(fake_trial.trial, JobState("7", state, native, "TimeLimit")).reason


@pytest.mark.parametrize("damage", ["deep", "infinite", "device", "pipe"])
@pytest.mark.parametrize(
    "name", ["jobs/7.json", "jobs/7.state", "lineages/0000.json", "attempts/7.0/events.jsonl"]
)
def test_no_damaged_file_keeps_status_from_the_rest(five_steps, damage, name):
    path = five_steps.trial.dir / name
    path.unlink(missing_ok=True)
    if damage == "deep":
        path.write_text("[" * 100_000 + "]" * 100_000 + "\n")
    elif damage == "infinite":
        path.write_text('{"time": 1e999, "event": "started", "role": "trainer", "incarnation": 0}\n')
    elif damage == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    status = load_status(five_steps.trial)
    assert status.step == 5
    assert describe_status(status)[0].startswith("exp/t1")


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [(None, "no checkpoint was saved"), (3, "steps after checkpoint 3 were not saved"), (5, "state saved")],
)
@pytest.mark.parametrize("cancelled", [True, False])
def test_a_stop_is_called_saved_only_where_its_last_step_was(five_steps, checkpoint, expected, cancelled):
    if cancelled:
        five_steps.cancel_wish("7")
    if checkpoint is not None:
        five_steps.generation(checkpoint)
    five_steps.ended("7.0", 75, "no space left")
    five_steps.script_said("7", "ended", code=75, cancelled=cancelled)
    reason = load_status(five_steps.trial).reason
    assert expected in reason and "no space left" in reason
    assert ("state saved" in reason) is (checkpoint == 5)


@pytest.mark.parametrize("cause", ["cancelled", None])
def test_the_reason_of_a_cancel_is_given_once(five_steps, cause):
    five_steps.cancel_wish("7")
    five_steps.generation(5)
    record = {"exit_code": 75, "reason": "cancelled by the user", "cause": cause}
    write_json(five_steps.trial.attempt("7.0").ended, record)
    five_steps.script_said("7", "ended", code=75)
    told = load_status(five_steps.trial).attempts[0].cause
    assert told == "cancelled by the user, state saved"


def test_nodes_that_did_not_answer_are_told_with_their_times(five_steps):
    five_steps.event("7.0", "node_silent", at=30, node="n3", silent_s=12.0)
    five_steps.event("7.0", "node_silent", at=40, node="n2", silent_s=10.0)
    five_steps.event("7.0", "node_answers", at=60, node="n3", silent_s=42.0)
    [attempt] = load_status(five_steps.trial).attempts
    first, second = attempt.silences
    assert (first.node, first.until - first.since) == ("n3", 42.0)
    assert (second.node, second.until) == ("n2", None)
    assert "n3 did not answer for 42 s, from " in first.text(live=True)
    assert "so far" in second.text(live=True) and "so far" not in second.text(live=False)


def test_what_a_start_says_after_a_later_one_has_begun_does_not_count(five_steps):
    five_steps.script_said("7", "started", restart=0)
    five_steps.script_said("7", "first_node_lost", restart=0)
    five_steps.started("7.1", "trainer", at=900)
    five_steps.script_said("7", "started", restart=1)
    five_steps.script_said("7", "ended", restart=0, code=70, reason="another supervisor owns the trial")
    story = load_status(five_steps.trial)
    assert (story.state, story.reason) == ("running", "")
    assert "its first node was lost" in story.attempts[0].cause


def test_what_an_attempt_saved_does_not_depend_on_later_checkpoints(fake_trial):
    """Attempt 7.0 saved its last step 9, and a person went back to 5; 8.0 lost steps 7 and 8; 9.0 saved 20."""
    fake_trial.run_to(9)
    fake_trial.event("7.0", "progress", at=20, step=9)
    fake_trial.ended("7.0", 75, "asked", at=21)
    fake_trial.job("8", at=30, start_mode="resume")
    fake_trial.started("8.0", "trainer", at=31)
    line = {"from_lineage": 0, "submission": "8", "reason": "", "incarnation": 0}
    trial = fake_trial.trial
    write_json(trial.lineage(1), line | {"lineage": 1, "from_step": 5, "attempt": "8.0"})
    fake_trial.steps("8.0", 6, 8, lineage=1, at=32)
    fake_trial.event("8.0", "progress", at=33, step=6)
    fake_trial.ended("8.0", 75, "no space", at=40)
    fake_trial.job("9", at=50, start_mode="resume")
    fake_trial.started("9.0", "trainer", at=51)
    write_json(trial.lineage(2), line | {"lineage": 2, "from_step": 6, "from_lineage": 1, "attempt": "9.0"})
    fake_trial.steps("9.0", 7, 20, lineage=2, at=52)
    trial.generation(20).mkdir(parents=True)
    write_json(trial.generation(20) / "manifest.json", {"step": 20, "attempt": "9.0"})
    fake_trial.ended("9.0", 75, "asked", at=90)
    causes = [one.cause for one in load_status(trial).attempts]
    assert ["state saved" in cause for cause in causes] == [True, False, True]
    assert "steps after checkpoint 6 were not saved" in causes[1]


def test_steps_that_a_restart_made_again_are_not_called_lost(fake_trial):
    """Incarnation 0 reached 9 and crashed; incarnation 1 continued from 6 and stopped, saved, after 7."""
    fake_trial.run_to(9)
    fake_trial.event("7.0", "progress", at=20, step=6)
    fake_trial.started("7.0", "trainer", incarnation=1, at=30)
    fake_trial.lineage(1, 6, "7.0", incarnation=1)
    fake_trial.steps("7.0", 7, 7, lineage=1, incarnation=1, at=31)
    fake_trial.event("7.0", "progress", at=33, step=7)
    fake_trial.ended("7.0", 75, "asked", at=40)
    (attempt,) = load_status(fake_trial.trial).attempts
    assert (attempt.last_step, attempt.final_step, attempt.saved_step) == (9, 7, 7)
    assert "state saved" in attempt.cause


def test_a_job_that_saves_nothing_is_nowhere_called_saved(fake_trial):
    fake_trial.run_to(3)
    fake_trial.job("7", start_mode="disabled")
    fake_trial.ended("7.0", 75, "SIGUSR1: asked to save and stop")
    why = f"{AFTER_EXIT[ExitCode.STOPPED].reason}, and recover.mode is disabled"  # as supervise/job_policy.py
    fake_trial.script_said("7", "ended", code=75, reason=why)
    reason = load_status(fake_trial.trial).reason
    assert "nothing is saved" in reason and "state saved" not in reason


@pytest.mark.parametrize(
    ("ends_at", "cause"), [(None, "was stopped"), (5000.0, "was stopped"), (300.0, "ran into its time limit")]
)
def test_a_signal_sent_by_hand_is_not_called_the_time_limit(fake_trial, ends_at, cause):
    """Slurm sends the same signal some minutes before the job ends."""
    fake_trial.run_to(3)
    if ends_at is not None:
        fake_trial.event("7.0", "end_time", at=5, ends_at=T0 + ends_at)
    fake_trial.event("7.0", "stopping", at=20, cause="user_signal", reason="SIGUSR1")
    fake_trial.exited("7.0", "trainer", 75, at=21)
    fake_trial.ended("7.0", 75, "SIGUSR1", at=22)
    (start,) = find_fruitless_starts(fake_trial.trial, "7")
    assert start.cause == cause


def test_silent_hosts_come_first_and_no_rate_is_told(fake_trial):
    fake_trial.run_to(36)
    lease = NameResolve(fake_trial.trial.names).lease("owner", {"attempt": "7.0", "host": "n1"})
    NameResolve(fake_trial.trial.names).lease("server/default/0", {})
    assert load_status(fake_trial.trial, RUNNING).rate == pytest.approx(1.0)
    os.utime(lease.path, (time.time() - 40,) * 2)
    fake_trial.event("7.0", "node_silent", at=60, node="n3", silent_s=12)
    told = load_status(fake_trial.trial, RUNNING)
    assert (told.state, told.rate, told.eta_s) == ("running", None, None)
    headline, first, second, *others = "\n".join(describe_status(told)).splitlines()
    assert headline.endswith("step 36 of 100 (36 %)")
    assert "the supervisor on n1 has sent no heartbeat for 40 s" in first
    assert "n3 has not answered since" in second
    assert not any("n3" in line for line in others)
    assert told.to_json()["silent_hosts"] == [first.strip(), second.strip()]
    fake_trial.event("7.0", "node_answers", at=80, node="n3", silent_s=20)
    lease.renew()
    told = load_status(fake_trial.trial, RUNNING)
    assert told.silent_hosts == [] and told.rate == pytest.approx(1.0)
    assert any("n3 did not answer for" in line for line in describe_status(told))


def test_a_supervisor_that_is_suspended_with_its_job_is_not_called_silent(fake_trial):
    fake_trial.run_to(36)
    lease = NameResolve(fake_trial.trial.names).lease("owner", {"attempt": "7.0", "host": "n1"})
    os.utime(lease.path, (time.time() - 4000,) * 2)
    assert load_status(fake_trial.trial, replace(RUNNING, native="SUSPENDED")).silent_hosts == []


def test_the_node_that_is_cut_off_is_named_and_not_those_that_it_does_not_reach(fake_trial):
    fake_trial.run_to(36)
    fake_trial.event("7.0", "node_cut_off", at=60, node="n1", silent_s=12)
    told = load_status(fake_trial.trial, RUNNING)
    [line] = told.silent_hosts
    assert line.startswith("n1 has been cut off from the other nodes since ") and told.rate is None
