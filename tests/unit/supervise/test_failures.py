"""What an end comes of, and what the policy of its class does, over the whole table."""

from __future__ import annotations

import pytest

from hpc_rl.errors import FailureClass as F
from hpc_rl.plan.schema import Unit
from hpc_rl.supervise.ends import end_of
from hpc_rl.supervise.exit_policy import after_trainer, barren, unit_end
from hpc_rl.supervise.failures import POLICIES, End, class_of, classify
from hpc_rl.trial import Trial, write_json


@pytest.mark.parametrize(
    ("said", "failure"),
    [
        ("slurmstepd: error: StepId=7.3 exceeded memory limit (2000 > 1000), being killed", F.OUT_OF_MEMORY),
        ("slurmstepd: error: Step 7.3 exceeded memory limit (5 > 4), being killed", F.OUT_OF_MEMORY),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=7.3. Some of the step tasks have been OOM Killed.",
            F.OUT_OF_MEMORY,
        ),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in step 7.0 cgroup.", F.OUT_OF_MEMORY),
        ("srun: error: n1: task 0: Out Of Memory", F.OUT_OF_MEMORY),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", F.OUT_OF_MEMORY),
        ("srun: error: Node failure on n3", F.NODE),
        (
            "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG",
            F.NODE,
        ),
        (
            "srun: error: Task launch for StepId=7.3 failed on node n2: Communication connection failure",
            F.NODE,
        ),
        (
            "srun: error: Unable to create step for job 7: Requested node configuration is not available",
            F.NODE,
        ),
        ("srun: error: n1: task 0: Killed", F.UNKNOWN),
        ("", F.UNKNOWN),
    ],
)
def test_the_class_by_what_the_launcher_said(said, failure):
    end = classify(End(137, "ended by SIGKILL"), ["something before", said])
    assert end.failure is failure
    assert failure is F.UNKNOWN or said in end.reason, "the line itself is told"


def test_the_nodes_to_blame_are_named():
    assert classify(End(143, ""), ["srun: error: Node failure on n[2,5]"]).nodes == ("n[2,5]",)
    assert classify(
        End(1, ""), ["srun: error: Task launch for StepId=7.3 failed on node n2: gone"]
    ).nodes == ("n2",)


def test_ends_on_purpose_and_recorded_classes_are_left_alone():
    oom = ["error: StepId=7.3 exceeded memory limit"]
    assert classify(End(75, ""), oom).failure is F.UNKNOWN and classify(End(0, ""), oom).failure is F.UNKNOWN
    assert classify(End(70, "x", F.DATA), oom).failure is F.DATA
    assert classify(End(78, "x"), oom).failure is F.USER
    assert classify(End(73, "not even its exit record"), []).failure is F.DISK_FULL
    assert class_of({"class": "data"}) is F.DATA and class_of({"class": "of a later version"}) is F.UNKNOWN
    assert unit_end([{"code": 70, "reason": "x", "class": "out of memory"}], 70).failure is F.OUT_OF_MEMORY


def test_a_step_that_was_killed_for_memory_says_so_though_its_job_does_not(tmp_path):
    """jobacct_gather's kill: the step ends with 137, the job never says OUT_OF_MEMORY."""
    attempt = Trial(tmp_path / "u" / "e" / "t").attempt("7.0")
    attempt.make_dirs()
    line = "slurmstepd-n1: error: StepId=7.1 exceeded memory limit (404226048 > 209715200), being killed"
    attempt.log("trainer", 0, 0).write_text(f"up\n{line}\nsrun: error: n1: task 0: Killed\n")
    unit = Unit(
        role="trainer",
        index=0,
        nodes=[0],
        tasks_per_node=1,
        cpus_per_task=1,
        mem_mb_per_task=1,
        gpus_per_task=0,
        module="m",
    )
    end = end_of(attempt, unit, 0, 137)
    assert end.failure is F.OUT_OF_MEMORY and line in end.reason
    write_json(attempt.exit_record("trainer", 0, 0), {"code": 70, "reason": "boom", "class": "user"})
    assert end_of(attempt, unit, 0, 70).failure is F.USER, (
        "what the process said of itself counts more than its log"
    )


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
    """The first and the second failure without a new generation, and the one past `recover.retries` = 3."""
    assert set(POLICIES) == set(F)
    for failures, expected in ((1, first), (2, second), (4, over)):
        verdict = after_trainer(End(137, "words", failure), "auto", failures, 3)
        assert (verdict.restart, verdict.exit_code) == expected, failures
        assert "words" in verdict.reason
        needs_a_person = expected == (False, 70)
        assert (POLICIES[failure].advice in verdict.reason) == needs_a_person, "a person is told what to do"


def test_other_modes_never_start_again():
    for failure in F:
        assert after_trainer(End(137, "words", failure), "disabled", 1, 3).exit_code == 70
        assert after_trainer(End(137, "words", failure), "resume", 1, 3).exit_code == 70


def test_attempts_that_bring_nothing_are_counted_until_one_does():
    progress, killed = [{"event": "progress", "step": 3}], [{"event": "started"}]
    by_person, by_time = ([{"event": "stopping", "class": failure}] for failure in ("user", "wall time"))
    assert barren([]) == 0
    assert barren([killed, by_time, killed]) == 3
    assert barren([killed, progress, killed]) == 1
    assert barren([killed, by_person, killed]) == 2


def test_a_trial_that_ends_before_its_first_generation_is_not_only_told_to_recover():
    for failure, policy in POLICIES.items():
        assert ("`hpc-rl recover`" in policy.advice) == (
            "`hpc-rl submit` begins where there is none" in policy.advice
        ), failure
