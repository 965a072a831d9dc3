"""Lineage records, and what gather() makes of a trial directory."""

from __future__ import annotations

import json
import threading

import pytest

from hpc_rl.checkpoint.decide import Cause, Decision
from hpc_rl.checkpoint.generation import Commit
from hpc_rl.checkpoint.lineage import decide_start, failures_without_progress, gather, next_lineage, read_lineages
from hpc_rl.checkpoint.manifest import Manifest
from hpc_rl.trial import Attempt, Trial, write_json

FRESH = Decision("fresh", "because")


@pytest.fixture
def trial(tmp_path) -> Trial:
    trial = Trial.of(tmp_path, "me", "exp", "one")
    trial.make_dirs()
    return trial


def attempt(trial: Trial, name: str) -> Attempt:
    one = trial.attempt(name)
    one.make_dirs()
    return one


def commit(trial: Trial, step: int, attempt_id: str, lineage: int = 0) -> None:
    making = Commit(trial, step, attempt_id, 0)
    making.begin()
    (making.folder / "state").write_text(f"state of {step}")
    making.rank_done(0, ["state"])
    submission = attempt_id.rpartition(".")[0]
    making.commit(
        Manifest(
            step=step,
            lineage=lineage,
            attempt=attempt_id,
            incarnation=0,
            submission=submission,
            version=f"{lineage}.{step}",
            num_ranks=1,
            config_hash="c",
        )
    )


def event(one: Attempt, **row) -> None:
    with one.events.open("a") as file:
        file.write(json.dumps(row) + "\n")


def look(trial: Trial, one: Attempt, incarnation: int = 0, mode: str = "auto", start_mode: str = ""):
    return gather(trial, one, incarnation, mode, start_mode or mode, 3)[0]


def test_numbers_count_up_and_name_where_they_come_from(trial):
    first = next_lineage(trial, attempt(trial, "7.0"), 0, FRESH)
    second = next_lineage(trial, attempt(trial, "7.1"), 2, Decision("load", "it was there", step=5, lineage=0))
    assert (first.lineage, first.from_step, first.from_lineage, first.submission) == (0, 0, None, "7")
    assert (second.lineage, second.from_step, second.from_lineage, second.incarnation) == (1, 5, 0, 2)
    assert read_lineages(trial) == [first, second]


def test_of_starters_at_once_each_has_its_own_number(trial):
    one, numbers = attempt(trial, "7.0"), []
    threads = [threading.Thread(target=lambda: numbers.append(next_lineage(trial, one, 0, FRESH).lineage)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(12))


def test_a_start_that_left_no_lineage_does_not_count(trial):
    attempt(trial, "7.0")
    assert look(trial, attempt(trial, "7.1")).first_start


def test_the_cause_of_the_last_end(trial):
    one = attempt(trial, "7.0")
    next_lineage(trial, one, 0, FRESH)
    assert look(trial, one, 1).cause is Cause.SUPERVISOR  # the same attempt, and nobody saw the trainer's end
    two = attempt(trial, "7.1")
    assert look(trial, two).cause is Cause.NODE  # the attempt left no word
    write_json(one.ended, {"exit_code": 75})
    assert look(trial, two).cause is Cause.STOPPED
    event(one, event="exited", role="trainer", incarnation=0, code=137)
    assert look(trial, two).cause is Cause.FAILED


def test_ancestry_follows_the_lineages_and_nothing_else(trial):
    next_lineage(trial, attempt(trial, "1.0"), 0, FRESH)
    next_lineage(trial, attempt(trial, "2.0"), 0, FRESH)
    next_lineage(trial, attempt(trial, "3.0"), 0, Decision("load", "", step=4, lineage=0))
    situation = look(trial, attempt(trial, "3.0"), 1)
    assert situation.ancestry == {"1", "3"} and situation.has_state and not situation.first_start


def test_a_damaged_generation_is_named_and_the_next_one_loaded(trial):
    one = attempt(trial, "7.0")
    next_lineage(trial, one, 0, FRESH)
    commit(trial, 3, "7.0")
    commit(trial, 6, "7.0")
    (trial.generation(6) / "state").write_text("state of 9")  # the same size, other content
    decision, damaged = decide_start(trial, one, 1, "auto", "auto", 3)
    assert (decision.action, decision.step) == ("load", 3)
    assert [found.step for found in damaged] == [6]
    assert "generation 6" in decision.reason


def test_mode_fault_passes_over_a_newer_generation_of_a_stranger(trial):
    next_lineage(trial, attempt(trial, "1.0"), 0, FRESH)
    next_lineage(trial, attempt(trial, "7.0"), 0, FRESH)
    commit(trial, 3, "7.0", lineage=1)
    commit(trial, 9, "1.0")
    assert decide_start(trial, attempt(trial, "7.0"), 1, "fault", "fault", 3)[0].step == 3


def test_failures_are_counted_since_the_last_progress_over_all_attempts(trial):
    one, two = attempt(trial, "7.0"), attempt(trial, "7.1")
    failure = {"event": "exited", "role": "trainer", "incarnation": 0, "code": 70, "failure": True}
    event(one, **failure)
    event(one, event="progress", step=3)
    event(one, **failure)
    event(one, event="exited", role="server", code=1)
    event(two, **failure)
    event(attempt(trial, "8.0"), **failure)
    assert look(trial, attempt(trial, "7.2")).failures == 2
    assert failures_without_progress([]) == 0
