"""Every cell of the table of decide.py, and what it says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.checkpoint.decide import CONTINUATIONS, Cause, GenerationInfo, Situation, decide

OURS, THEIRS = "job-2", "job-1"


def gen(step: int, submission: str = OURS, valid: bool = True, lineage: int = 0) -> GenerationInfo:
    return GenerationInfo(step, lineage, submission, valid, "" if valid else "is torn")


def situation(mode: str, start: str, generations: tuple[GenerationInfo, ...] = (), **more) -> Situation:
    """`start` is first, failure or continuation."""
    cause = {"first": None, "failure": Cause.FAILED, "continuation": Cause.STOPPED}[start]
    values = {"start_mode": mode, "ancestry": frozenset({OURS}), "cause": cause, **more}
    return Situation(mode=mode, first_start=start == "first", generations=generations, **values)


MIXED = (gen(9, THEIRS), gen(7, valid=False), gen(5), gen(3))

TABLE = [
    # mode, start, generations -> action, step, exit code
    ("disabled", "first", (), "fresh", None, 0),
    ("disabled", "first", MIXED, "refuse", None, 78),
    ("disabled", "failure", MIXED, "end", None, 70),
    ("disabled", "continuation", MIXED, "end", None, 70),
    ("auto", "first", (), "fresh", None, 0),
    ("auto", "first", MIXED, "load", 9, 0),
    ("auto", "first", (gen(4, valid=False),), "fresh", None, 0),
    ("auto", "failure", MIXED, "load", 9, 0),
    ("auto", "failure", (), "fresh", None, 0),
    ("auto", "continuation", MIXED, "load", 9, 0),
    ("auto", "continuation", (), "fresh", None, 0),
    ("fault", "first", (), "fresh", None, 0),
    ("fault", "first", (gen(4, valid=False),), "refuse", None, 78),
    ("fault", "failure", MIXED, "load", 5, 0),
    ("fault", "failure", (gen(9, THEIRS),), "fresh", None, 0),
    ("fault", "continuation", MIXED, "load", 5, 0),
    ("fault", "continuation", (gen(9, THEIRS),), "fresh", None, 0),
    ("resume", "first", MIXED, "load", 9, 0),
    ("resume", "first", (), "refuse", None, 3),
    ("resume", "first", (gen(4, valid=False),), "refuse", None, 3),
    ("resume", "failure", MIXED, "end", None, 70),
    ("resume", "continuation", MIXED, "load", 9, 0),
    ("resume", "continuation", (), "refuse", None, 3),
]


@pytest.mark.parametrize(("mode", "start", "generations", "action", "step", "code"), TABLE)
def test_the_table(mode, start, generations, action, step, code):
    decision = decide(situation(mode, start, generations))
    assert (decision.action, decision.step, decision.exit_code) == (action, step, code)
    assert decision.reason


@pytest.mark.parametrize("mode", ["disabled", "fault"])
def test_state_of_another_submission_without_generations_is_refused_too(mode):
    decision = decide(situation(mode, "first", has_state=True))
    assert decision.action == "refuse" and "another trial_name" in decision.reason


@pytest.mark.parametrize("mode", ["disabled", "auto", "fault", "resume"])
def test_hpc_rl_recover_is_a_first_start_as_resume_whatever_the_mode(mode):
    assert decide(situation(mode, "first", MIXED, start_mode="resume", has_state=True)).step == 9
    assert decide(situation(mode, "first", start_mode="resume", has_state=True)).exit_code == 3


def test_the_ancestry_of_a_recover_counts_in_mode_fault():
    both = frozenset({OURS, THEIRS})
    assert decide(situation("fault", "failure", MIXED, ancestry=both)).step == 9


@pytest.mark.parametrize("mode", ["disabled", "auto", "fault", "resume"])
def test_the_retry_budget_ends_any_mode(mode):
    assert decide(situation(mode, "failure", MIXED, failures=4, retries=3)).action == "end"
    assert decide(situation("auto", "failure", MIXED, failures=3, retries=3)).action == "load"


@pytest.mark.parametrize("cause", list(Cause))
def test_resume_goes_on_after_what_was_no_failure(cause):
    decision = decide(situation("resume", "failure", MIXED, cause=cause))
    assert decision.action == ("load" if cause in CONTINUATIONS else "end")
    assert str(cause) in decision.reason


def test_the_reason_names_what_was_passed_over():
    reason = decide(situation("auto", "failure", (gen(8, valid=False), gen(6)))).reason
    assert "generation 8 is torn" in reason and "loading generation 6" in reason


def test_of_one_step_the_newer_lineage_counts():
    assert decide(situation("auto", "failure", (gen(5, lineage=1), gen(5, lineage=3)))).lineage == 3


@given(
    mode=st.sampled_from(["disabled", "auto", "fault", "resume"]),
    start=st.sampled_from(["first", "failure", "continuation"]),
    generations=st.lists(st.builds(gen, st.integers(1, 9), st.sampled_from([OURS, THEIRS]), st.booleans())).map(tuple),
)
def test_only_valid_generations_are_ever_loaded(mode, start, generations):
    decision = decide(situation(mode, start, generations))
    valid = {one.step for one in generations if one.valid}
    assert (decision.action == "load") == (decision.step is not None)
    assert decision.step is None or decision.step in valid
    assert (decision.exit_code == 0) == (decision.action in ("load", "fresh"))
