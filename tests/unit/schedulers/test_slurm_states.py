"""Every state of Slurm has a text and a class, in each of its forms; other words are unknown, not an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.core.errors import FailureClass
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.schedulers.slurm_states import (
    REASONS,
    SLURM_STATES,
    classify_state,
    explain_pending,
    find_state,
    find_whole_job,
    has_waiting_task,
    summarize_parts,
)

# Of job_state_string and job_state_string_compact, and the flags of slurm/slurm.h; 22.05 to 25.11.
ENDS = {
    "COMPLETED CD": (State.DONE, None),
    "CANCELLED CA": (State.CANCELLED, FailureClass.USER),
    "FAILED F": (State.FAILED, None),
    "TIMEOUT TO": (State.TIMEOUT, FailureClass.WALL_TIME),
    "NODE_FAIL NF": (State.NODE_FAIL, FailureClass.NODE),
    "PREEMPTED PR": (State.PREEMPTED, FailureClass.PREEMPTION),
    "BOOT_FAIL BF": (State.NODE_FAIL, FailureClass.NODE),
    "DEADLINE DL": (State.TIMEOUT, FailureClass.WALL_TIME),
    "OUT_OF_MEMORY OOM": (State.OUT_OF_MEMORY, FailureClass.OUT_OF_MEMORY),
    "RECONFIG_FAIL": (State.NODE_FAIL, FailureClass.NODE),
    "REVOKED RV": (State.UNKNOWN, FailureClass.INFRASTRUCTURE),
}
ALIVE = {
    State.PENDING: "PENDING PD CONFIGURING CF REQUEUED RQ REQUEUE_HOLD RH SPECIAL_EXIT SE REQUEUE_FED RF RESV_DEL_HOLD RD "
    "POWER_UP_NODE LAUNCH_FAILED EXPEDITING",
    State.RUNNING: "RUNNING R SUSPENDED S COMPLETING CG RESIZING RS SIGNALING SI STAGE_OUT SO STOPPED ST UPDATE_DB",
}
HELD = ("REQUEUE_HOLD", "SPECIAL_EXIT", "REQUEUE_FED", "RESV_DEL_HOLD", "LAUNCH_FAILED")


@pytest.mark.parametrize(("words", "expected"), ENDS.items(), ids=list(ENDS))
def test_ends_and_their_classes(words, expected):
    for word in words.split():
        assert (classify_state(word), find_state(word).failure) == expected
        assert classify_state(word.lower()) is expected[0]


@pytest.mark.parametrize("word", " ".join(ALIVE.values()).split())
def test_what_waits_or_still_holds_nodes_is_alive(word):
    assert word in ALIVE[classify_state(word)].split() and classify_state(word).alive
    is_held = find_state(word).name in HELD
    assert find_state(word).failure is (FailureClass.INFRASTRUCTURE if is_held else None)


def test_the_table_has_these_words_and_no_others():
    known = {name for words in (*ENDS, *ALIVE.values()) for name in words.split()}
    assert {name for word in SLURM_STATES for name in (word.name, word.short) if name} == known
    assert sum(not word.is_flag for word in SLURM_STATES) == 12 and all(word.meaning for word in SLURM_STATES)


@pytest.mark.parametrize(
    ("native", "state"),
    [
        ("CANCELLED by 1000", State.CANCELLED),
        ("CANCELLED+", State.CANCELLED),  # cut by sacct's column
        ("OUT_OF_ME+", State.OUT_OF_MEMORY),
        ("REQUEUE_H+", State.PENDING),
        ("COMPLETED+", State.DONE),
        ("COMP+", State.UNKNOWN),  # COMPLETED or COMPLETING
        ("PENDING,REQUEUED", State.PENDING),
        ("NODE_FAIL|REQUEUED", State.PENDING),  # the flag says that it comes back
        ("TIMEOUT COMPLETING", State.RUNNING),
        ("BRAND_NEW", State.UNKNOWN),
        ("?", State.UNKNOWN),
        ("", State.UNKNOWN),
        ("RUNNING,BRAND_NEW", State.RUNNING),
    ],
)
def test_the_forms_in_which_words_come(native, state):
    assert classify_state(native) is state


@given(st.text(max_size=30))
def test_no_text_is_an_exception(text):
    assert classify_state(text) in State
    assert explain_pending(text)[1] is not None


def test_why_a_job_waits():
    assert explain_pending("(BeginTime)")[0] is None and "two minutes" in explain_pending("BeginTime")[1]
    failure, words = explain_pending("AssocGrpCpuLimit")
    assert failure is FailureClass.USER and "AssocGrpCpuLimit" in words
    assert explain_pending("ReqNodeNotAvail, UnavailableNodes:n[1-2]")[0] is FailureClass.INFRASTRUCTURE
    assert explain_pending("SomethingNew") == (None, "SomethingNew")
    assert REASONS["DependencyNeverSatisfied"][0] is FailureClass.USER


@pytest.mark.parametrize(
    ("job_id", "expected"),
    [("12", "12"), ("12_0", "12"), ("12_[1-3%2]", "12"), ("12+1", "12"), ("local-7", "local-7")],
)
def test_a_part_belongs_to_its_job(job_id, expected):
    assert find_whole_job(job_id) == expected


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([State.RUNNING, State.PENDING], State.RUNNING),
        ([State.DONE, State.PENDING], State.PENDING),
        ([State.DONE, State.FAILED], State.FAILED),
        ([State.DONE, State.DONE], State.DONE),
        ([State.CANCELLED, State.RUNNING], State.RUNNING),
    ],
)
def test_a_job_lives_while_any_part_may(states, expected):
    parts = [JobState(f"12_{number}", state, nodes=f"n{number}") for number, state in enumerate(states)]
    found = summarize_parts([*parts, JobState("9", State.RUNNING)])
    assert found["12"].state is expected
    assert found["9"].state is State.RUNNING
    assert found["12_1"].state is states[1]


@pytest.mark.parametrize("reason", ["launch failed requeued held", "(launch_failed_requeued_held)"])
def test_a_job_that_slurm_holds_after_a_failed_launch_says_what_to_do(reason):
    assert "scontrol release" in explain_pending(reason)[1]


@pytest.mark.parametrize(
    ("listed", "job_id", "is_there"),
    [
        ("7_[2-11%4]", "7_3", True),
        ("7_[2-11%4]", "7_12", False),
        ("7_[0,2-3,9]", "7_9", True),
        ("7_[0,2-3,9]", "7_4", False),
        ("7_[2-3]", "8_2", False),
        ("7_[2-3]", "7", False),
        ("7_2", "7_2", False),
        ("7+0", "7_0", False),
    ],
)
def test_tasks_that_wait_are_listed_together(listed, job_id, is_there):
    assert has_waiting_task(listed, job_id) is is_there
