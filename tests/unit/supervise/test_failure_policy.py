"""Classes of exits, and the policy of each class, over the whole table."""

import pytest
from toy_plans import toy_unit

from hpc_rl.core.errors import FailureClass as F
from hpc_rl.core.records import Event, EventKind, ExitRecord
from hpc_rl.core.trial import write_json
from hpc_rl.supervise.failure_policy import (
    POLICIES,
    UnitExit,
    classify,
    classify_exit,
    combine_ranks,
    count_fruitless_attempts,
    decide_after_leader,
)

NODE_FAILURE = "srun: error: Node failure on n[2,5]"
LAUNCH_FAILED = "srun: error: Task launch for StepId=7.3 failed on node n2: Communication connection failure"
NO_STEP = "srun: error: Unable to create step for job 7"
OOM = "slurmstepd: error: Detected 1 oom_kill event"
CANCELLED = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00"


@pytest.mark.parametrize(
    ("said", "failure"),
    [
        ("slurmstepd: error: StepId=7.3 exceeded memory limit (2000 > 1000), being killed", F.OUT_OF_MEMORY),
        ("slurmstepd: error: Step 7.3 exceeded memory limit (5 > 4), being killed", F.OUT_OF_MEMORY),
        (f"{OOM} in StepId=7.3. Some of the step tasks have been OOM Killed.", F.OUT_OF_MEMORY),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in step 7.0 cgroup.", F.OUT_OF_MEMORY),
        ("srun: error: n1: task 0: Out Of Memory", F.OUT_OF_MEMORY),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", F.OUT_OF_MEMORY),
        (NODE_FAILURE, F.NODE),
        (f"{CANCELLED} DUE TO NODE FAILURE, SEE SLURMCTLD LOG", F.NODE),
        (LAUNCH_FAILED, F.NODE),
        (f"{NO_STEP}: Requested node configuration is not available", F.NODE),
        ("srun: error: n1: task 0: Killed", F.UNKNOWN),
        ("", F.UNKNOWN),
    ],
)
def test_the_class_by_what_the_launcher_said(said, failure):
    end = classify(UnitExit(137, "killed by SIGKILL"), ["something before", said], ["something before", said])
    assert end.failure is failure
    assert failure is F.UNKNOWN or said in end.reason, "the line itself is told"


@pytest.mark.parametrize(("line", "node"), [(NODE_FAILURE, "n[2,5]"), (LAUNCH_FAILED, "n2")])
def test_the_nodes_to_blame_are_named(line, node):
    assert classify(UnitExit(143, ""), [line], [line]).nodes == (node,)


@pytest.mark.parametrize(
    "line",
    [
        "[W1122] The node 'n1_0' has failed to shutdown the rendezvous '7' due to an error",
        "node 2: downloading tokenizer",
        "INFO (node 1) shutting down",
        "srun: node 2: downloading container image",
        "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)",
    ],
)
def test_ordinary_log_lines_are_not_taken_for_a_lost_node(line):
    assert classify(UnitExit(1, ""), [line], [line]).failure is F.UNKNOWN


def test_only_the_launcher_knows_of_a_lost_node(attempt):
    attempt.log("trainer", 0, 0, 0).write_text("srun: error: Node failure on n3\n")
    assert classify_exit(attempt, toy_unit(tasks_per_node=2), 0, 1).failure is F.UNKNOWN
    attempt.log("trainer", 0, 0).write_text("srun: error: Node failure on n3\n")
    assert classify_exit(attempt, toy_unit(tasks_per_node=2), 0, 1).nodes == ("n3",)


def test_ends_on_purpose_and_recorded_classes_are_left_alone():
    oom = ["error: StepId=7.3 exceeded memory limit"]
    for code in (75, 0):
        assert classify(UnitExit(code, ""), oom, oom).failure is F.UNKNOWN
    assert classify(UnitExit(70, "x", F.DATA), oom, oom).failure is F.DATA
    assert classify(UnitExit(78, "x"), oom, oom).failure is F.USER
    assert classify(UnitExit(73, "not even its exit record"), [], []).failure is F.DISK_FULL
    record = ExitRecord(code=70, reason="x", failure=F.OUT_OF_MEMORY)
    assert combine_ranks([record], 70).failure is F.OUT_OF_MEMORY


def test_a_step_killed_for_memory_is_known_by_its_log(attempt):
    """jobacct_gather's kill: the step ends with 137, the job never says OUT_OF_MEMORY."""
    line = "slurmstepd-n1: error: StepId=7.1 exceeded memory limit (404226048 > 209715200), being killed"
    attempt.log("trainer", 0, 0).write_text(f"up\n{line}\nsrun: error: n1: task 0: Killed\n")
    end = classify_exit(attempt, toy_unit(), 0, 137)
    assert end.failure is F.OUT_OF_MEMORY and line in end.reason
    write_json(attempt.exit_record("trainer", 0, 0, 0), {"code": 70, "reason": "boom", "class": "user"})
    assert classify_exit(attempt, toy_unit(), 0, 70).failure is F.USER, "what it said of itself counts more"


@pytest.mark.parametrize(
    ("failure", "first", "second", "over"),
    [
        (F.USER, (False, 70), (False, 70), (False, 70)),
        (F.DATA, (False, 70), (False, 70), (False, 70)),
        (F.OUT_OF_MEMORY, (True, 70), (False, 70), (False, 70)),
        (F.NODE, (False, 75), (False, 75), (False, 70)),
        (F.INFRASTRUCTURE, (True, 70), (True, 70), (False, 70)),
        (F.DISK_FULL, (True, 70), (True, 70), (True, 70)),
        (F.PREEMPTION, (False, 75), (False, 75), (False, 75)),
        (F.WALL_TIME, (False, 75), (False, 75), (False, 75)),
        (F.UNKNOWN, (True, 70), (True, 70), (False, 70)),
    ],
)
def test_the_policy_of_each_class(failure, first, second, over):
    """The first and the second failure without a new checkpoint, and the one past `recover.retries` = 3."""
    assert set(POLICIES) == set(F)
    for failures, expected in ((1, first), (2, second), (4, over)):
        follows = decide_after_leader("trainer", UnitExit(137, "words", failure), "auto", failures, 3)
        assert (follows.restart, follows.exit_code) == expected, failures
        assert "words" in follows.reason
        needs_a_person = expected == (False, 70)
        assert (POLICIES[failure].advice in follows.reason) == needs_a_person, "a person is told what to do"


def test_other_modes_never_start_again():
    for failure in F:
        assert (
            decide_after_leader("trainer", UnitExit(137, "words", failure), "disabled", 1, 3).exit_code == 70
        )
        assert decide_after_leader("trainer", UnitExit(137, "words", failure), "resume", 1, 3).exit_code == 70


def test_attempts_that_bring_nothing_are_counted_until_one_does():
    progress, killed = [Event(kind=EventKind.PROGRESS, step=3)], [Event(kind=EventKind.STARTED)]
    by_user, by_time = (
        [Event(kind=EventKind.STOPPING, failure=failure)] for failure in (F.USER, F.WALL_TIME)
    )
    assert count_fruitless_attempts([]) == 0
    assert count_fruitless_attempts([killed, by_time, killed]) == 3
    assert count_fruitless_attempts([killed, progress, killed]) == 1
    assert count_fruitless_attempts([killed, by_user, killed]) == 2


def test_every_advice_names_recover_and_submit():
    submit = "`hpc-rl submit` to begin where there is none"
    for failure, policy in POLICIES.items():
        assert ("`hpc-rl recover`" in policy.advice) == (submit in policy.advice), failure


def test_the_nodes_that_a_rank_blames_are_those_of_the_exit():
    blamed = ExitRecord(code=70, reason="wrong sums", failure=F.NODE, nodes=["n3"])
    found = combine_ranks([blamed, ExitRecord.parse(blamed.to_json())], 0)
    assert found.nodes == ("n3",) and found.policy.exclude_nodes and found.policy.action == "requeue"
