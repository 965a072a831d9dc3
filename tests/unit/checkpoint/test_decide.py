"""Every cell of the table of decide.py: each combination of what a decision depends on, against rules written
from the design.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.checkpoint.decide import (
    CONTINUATIONS,
    OUTSIDE_FACTOR,
    Cause,
    GenerationInfo,
    PastStart,
    Situation,
    decide,
)

OURS, THEIRS = "job-2", "job-1"
MODES = ("disabled", "auto", "fault", "resume")
RETRIES = 2


def gen(step: int, submission: str = OURS, valid: bool = True, lineage: int = 0) -> GenerationInfo:
    return GenerationInfo(step, lineage, submission, valid, "" if valid else "is torn")


def past(*causes: Cause) -> tuple[PastStart, ...]:
    return tuple(PastStart("job-2.0", number, cause, "because") for number, cause in enumerate(causes))


# What the decision may depend on. Each axis has every kind of value that the design tells apart.
STATES = {
    "nothing": (),
    "ours": (gen(5), gen(3)),
    "theirs": (gen(9, THEIRS), gen(4, THEIRS)),
    "both": (gen(9, THEIRS), gen(5), gen(3)),
    "newest torn": (gen(9, THEIRS), gen(7, valid=False), gen(5)),
    "all torn": (gen(7, valid=False), gen(4, THEIRS, valid=False)),
}
CAUSES = (None, *Cause)  # None: the first start
HISTORIES = {
    "none": (),
    "as many failures as allowed": past(*[Cause.FAILED] * RETRIES),
    "one too many": past(Cause.FAILED, Cause.NODE, Cause.WALLTIME, Cause.FAILED),
    "ended from outside, often": past(
        *[Cause.NODE, Cause.DISK_FULL, Cause.SUPERVISOR] * (OUTSIDE_FACTOR * (RETRIES + 1) // 3)
    ),
    "ended from outside, too often": past(*[Cause.NODE] * (OUTSIDE_FACTOR * (RETRIES + 1) + 1)),
}
ANCESTRIES = (frozenset({OURS}), frozenset({OURS, THEIRS}))
AXES = (("itself", "resume"), CAUSES, STATES, HISTORIES, ANCESTRIES, (False, True), (None, 5, 4, 7), (0, 4))


def rule(mode, start, cause, state, history, ancestry, foreign, wanted, trimmed):
    """(action, step, exit code) as section 8 of the design has it, in its order and words."""
    if "too" in history:  # "the retry budget counts attempts without a new committed generation"
        return "end", None, 70
    generations, valid = STATES[state], {one.step for one in STATES[state] if one.valid}
    first = cause is None
    start_mode = "resume" if start == "resume" else mode
    continuation = cause in (Cause.STOPPED, Cause.PREEMPTED, Cause.WALLTIME, Cause.NODE)
    if first and wanted:  # "recover --from": that one or none
        return ("load", wanted, 0) if wanted in valid and wanted >= trimmed else ("refuse", None, 3)
    # "fresh; refuses a trial directory that already has state"
    if first and start_mode in ("disabled", "fault"):
        return ("refuse", None, 78) if generations or foreign else ("fresh", None, 0)
    if not first and mode == "disabled":  # "ends"
        return "end", None, 70
    if not first and mode == "resume" and not continuation:  # "a failure is not resumed twice"
        return "end", None, 70
    lines = ancestry if mode == "fault" and not first else {OURS, THEIRS}  # "of this submission's lineage"
    sound = [one for one in generations if one.valid and one.submission in lines]
    loadable = {one.step for one in sound if one.step >= trimmed}
    if loadable:  # "newest valid generation"
        return "load", max(loadable), 0
    must = start_mode == "resume" if first else mode == "resume"  # "else exit 3"
    # "else fresh", where its batches are there
    return ("refuse", None, 3) if must or trimmed else ("fresh", None, 0)


@pytest.mark.parametrize("mode", MODES)
def test_every_combination(mode):
    count = 0
    for start, cause, state, history, ancestry, foreign, wanted, trimmed in itertools.product(*AXES):
        situation = Situation(
            mode=mode,
            start_mode="resume" if start == "resume" else mode,
            first_start=cause is None,
            generations=STATES[state],
            ancestry=ancestry,
            has_state=foreign,
            cause=cause,
            history=HISTORIES[history],
            retries=RETRIES,
            wanted=wanted,
            trimmed=trimmed,
        )
        decision = decide(situation)
        expected = rule(mode, start, cause, state, history, ancestry, foreign, wanted, trimmed)
        assert (decision.action, decision.step, decision.exit_code) == expected, (situation, decision)
        assert decision.reason
        later = {one.step for one in STATES[state] if decision.step and one.step > decision.step}
        goes_back = cause is None and wanted and decision.action == "load"
        assert set(decision.set_aside) == (later if goes_back else set())
        count += 1
    assert count == 2 * 8 * 6 * 5 * 2 * 2 * 4 * 2


def situation(mode: str, start: str, generations: tuple[GenerationInfo, ...] = (), **more) -> Situation:
    """`start` is first, failure or continuation."""
    cause = {"first": None, "failure": Cause.FAILED, "continuation": Cause.STOPPED}[start]
    values = {"start_mode": mode, "ancestry": frozenset({OURS}), "cause": cause, **more}
    return Situation(mode=mode, first_start=start == "first", generations=generations, **values)


def test_a_refusal_of_state_says_what_to_do():
    decision = decide(situation("fault", "first", has_state=True))
    assert "another trial_name, or hpc-rl recover" in decision.reason


@pytest.mark.parametrize("cause", list(Cause))
def test_the_reason_says_how_the_start_before_ended(cause):
    decision = decide(situation("resume", "failure", STATES["both"], cause=cause))
    assert decision.action == ("load" if cause in CONTINUATIONS else "end")
    assert str(cause) in decision.reason


def test_the_reason_names_what_was_passed_over():
    reason = decide(situation("auto", "failure", (gen(8, valid=False), gen(6)))).reason
    assert "checkpoint 8: is torn" in reason and "loading checkpoint 6" in reason
    reason = decide(situation("fault", "failure", STATES["both"])).reason
    assert "ignores 1 checkpoint(s) of other submissions" in reason
    reason = decide(situation("auto", "failure", (gen(3),), trimmed=7)).reason
    assert (
        "checkpoint 3: it is older than the batch log" in reason and "batches 1 to 7 were trimmed" in reason
    )


def test_the_guard_names_its_evidence():
    reason = decide(situation("auto", "failure", history=HISTORIES["one too many"], retries=RETRIES)).reason
    assert reason.startswith("3 starts in a row without a new checkpoint; recover.retries allows 2: ")
    assert "trainer 0 of attempt job-2.0 failed (because)" in reason and "ran into its time limit" in reason


def test_a_missing_generation_is_refused_with_those_that_exist():
    assert (
        "the trial has checkpoints 3, 5"
        in decide(situation("auto", "first", STATES["ours"], wanted=4)).reason
    )
    assert "set aside: 5" in decide(situation("auto", "first", STATES["ours"], wanted=3)).reason


def test_of_one_step_the_newer_lineage_counts():
    assert decide(situation("auto", "failure", (gen(5, lineage=1), gen(5, lineage=3)))).lineage == 3


@given(
    mode=st.sampled_from(MODES),
    start=st.sampled_from(["first", "failure", "continuation"]),
    generations=st.lists(
        st.builds(gen, st.integers(1, 9), st.sampled_from([OURS, THEIRS]), st.booleans())
    ).map(tuple),
)
def test_only_valid_generations_are_ever_loaded(mode, start, generations):
    decision = decide(situation(mode, start, generations))
    valid = {one.step for one in generations if one.valid}
    assert (decision.action == "load") == (decision.step is not None)
    assert decision.step is None or decision.step in valid
    assert (decision.exit_code == 0) == (decision.action in ("load", "fresh"))
