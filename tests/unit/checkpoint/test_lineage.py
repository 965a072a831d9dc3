"""Lineage records, and what gather() makes of a trial directory."""

import errno
import json
import os
import shutil
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.decide import Cause, Decision, Situation
from hpc_rl.checkpoint.generation import Commit, Manifest, move_aside
from hpc_rl.checkpoint.lineage import create_lineage
from hpc_rl.checkpoint.start_facts import (
    count_failures,
    decide_start,
    find_fruitless_starts,
    find_trimmed,
    gather,
)
from hpc_rl.core import checked_file
from hpc_rl.core.errors import StopCause, TrialStateError
from hpc_rl.core.records import load_lineages
from hpc_rl.core.trial import Attempt, Trial, write_json
from hpc_rl.stats.read import load_known_lineages

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
    making.record_rank(0, [checked_file.record(making.folder / "state")])
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
    return gather(trial, one, incarnation, Situation(mode, start_mode or mode))[0]


def test_numbers_count_up_and_name_where_they_come_from(trial):
    first = create_lineage(trial, attempt(trial, "7.0"), 0, FRESH)
    second = create_lineage(
        trial, attempt(trial, "7.1"), 2, Decision("load", "it was there", step=5, lineage=0)
    )
    assert (first.lineage, first.from_step, first.from_lineage, first.submission) == (0, 0, None, "7")
    assert (second.lineage, second.from_step, second.from_lineage, second.incarnation) == (1, 5, 0, 2)
    assert load_lineages(trial) == [first, second]


def test_unsound_records_are_skipped_and_keep_their_numbers(trial):
    first = create_lineage(trial, attempt(trial, "7.0"), 0, FRESH)
    os.mkfifo(trial.lineages / "0001.json")
    (trial.lineages / "0002.json").symlink_to("0002.json")
    (trial.lineages / "0003.json").mkdir()
    for number, change in (
        (4, {"lineage": "4"}),
        (5, {"from_step": None}),
        (6, {"lineage": 0}),
        (7, {"set_aside": 3}),
    ):
        write_json(trial.lineages / f"{number:04d}.json", asdict(first) | {"lineage": number} | change)
    write_json(trial.lineages / "0008.json", [])
    assert load_lineages(trial) == [first] and [line.lineage for line in load_known_lineages(trial)][:1] == [
        0
    ]
    assert create_lineage(trial, attempt(trial, "7.1"), 0, FRESH).lineage == 9
    shutil.rmtree(trial.lineages)
    trial.lineages.write_text("a file")
    with pytest.raises(TrialStateError, match="lineages must be a folder"):
        look(trial, attempt(trial, "7.2"))


def test_a_pipe_in_place_of_a_record_keeps_nobody_waiting(trial):
    os.mkfifo(trial.trimmed)
    assert find_trimmed(trial) == 0
    writer = os.open(trial.trimmed, os.O_RDWR)  # somebody who may write, and does not
    try:
        assert find_trimmed(trial) == 0
    finally:
        os.close(writer)


def test_a_number_is_never_reused_though_records_are_lost(trial):
    commit(trial, 3, "7.0", lineage=4)
    one = attempt(trial, "8.0")
    assert create_lineage(trial, one, 0, FRESH).lineage == 5
    trial.published("8.12").mkdir()
    shutil.rmtree(trial.lineages)
    assert create_lineage(trial, one, 1, FRESH).lineage == 9


def test_of_starters_at_once_each_has_its_own_number(trial):
    one, numbers = attempt(trial, "7.0"), []
    threads = [
        threading.Thread(target=lambda: numbers.append(create_lineage(trial, one, 0, FRESH).lineage))
        for _ in range(12)
    ]
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
    create_lineage(trial, one, 0, FRESH)
    assert look(trial, one, 1).cause is Cause.SUPERVISOR  # the same attempt, and nobody saw the trainer's end
    two = attempt(trial, "7.1")
    assert look(trial, two).cause is Cause.NODE  # the attempt left no word
    write_json(one.ended, {"exit_code": 75})
    assert look(trial, two).cause is Cause.STOPPED
    event(one, event="exited", role="trainer", incarnation=0, code=137)
    assert look(trial, two).cause is Cause.FAILED
    event(one, **{"event": "exited", "role": "trainer", "incarnation": 0, "code": 73, "class": "disk full"})
    assert look(trial, two).cause is Cause.DISK_FULL


def test_ancestry_follows_the_lineages_and_nothing_else(trial):
    create_lineage(trial, attempt(trial, "1.0"), 0, FRESH)
    create_lineage(trial, attempt(trial, "2.0"), 0, FRESH)
    create_lineage(trial, attempt(trial, "3.0"), 0, Decision("load", "", step=4, lineage=0))
    situation = look(trial, attempt(trial, "3.0"), 1)
    assert situation.ancestry == {"1", "3"} and situation.has_state and not situation.first_start


@pytest.mark.parametrize("known_by", ["manifest", "job", "nothing"])
def test_a_lost_parent_record_keeps_mode_fault_from_a_fresh_start(trial, known_by):
    create_lineage(trial, attempt(trial, "1.0"), 0, FRESH)
    commit(trial, 3, "1.0", lineage=0)
    if known_by != "manifest":  # the parent made nothing that is left
        create_lineage(trial, attempt(trial, "2.0"), 0, Decision("load", "", step=3, lineage=0))
        (trial.lineages / "0001.json").write_bytes(bytes(40))
        if known_by == "job":
            write_json(trial.job("3"), {"lineage_parent": "2"})
            write_json(trial.job("2"), {"lineage_parent": "1"})
        create_lineage(trial, attempt(trial, "3.0"), 0, Decision("load", "", step=5, lineage=1))
    else:
        (trial.lineages / "0000.json").write_bytes(bytes(40))
        create_lineage(trial, attempt(trial, "3.0"), 0, Decision("load", "", step=3, lineage=0))
    decision, _ = decide_start(trial, attempt(trial, "3.0"), 1, Situation("fault", "resume", retries=3))
    if known_by == "nothing":
        assert (decision.action, decision.exit_code) == (
            "refuse",
            3,
        ) and "lineages/0001.json can't be read" in decision.reason
    else:
        assert (decision.action, decision.step) == ("load", 3), decision.reason


def test_a_damaged_generation_is_named_and_the_next_one_loaded(trial):
    one = attempt(trial, "7.0")
    create_lineage(trial, one, 0, FRESH)
    commit(trial, 3, "7.0")
    commit(trial, 6, "7.0")
    (trial.generation(6) / "state").write_text("state of 9")  # the same size, other content
    decision, damaged = decide_start(trial, one, 1, Situation("auto", "auto", retries=3))
    assert (decision.action, decision.step) == ("load", 3)
    assert [found.step for found in damaged] == [6]
    assert "checkpoint 6" in decision.reason


def test_mode_fault_passes_over_a_newer_generation_of_a_stranger(trial):
    create_lineage(trial, attempt(trial, "1.0"), 0, FRESH)
    create_lineage(trial, attempt(trial, "7.0"), 0, FRESH)
    commit(trial, 3, "7.0", lineage=1)
    commit(trial, 9, "1.0")
    assert decide_start(trial, attempt(trial, "7.0"), 1, Situation("fault", "fault", retries=3))[0].step == 3


def test_failures_are_counted_since_the_last_progress_over_all_attempts(trial):
    one, two = attempt(trial, "7.0"), attempt(trial, "7.1")
    failure = {"event": "exited", "role": "trainer", "incarnation": 0, "code": 70, "failure": True}
    event(one, **failure)
    event(one, event="progress", step=3)
    event(one, **failure)
    event(one, event="exited", role="server", code=1)
    event(two, **failure)
    event(attempt(trial, "8.0"), **failure)
    past = look(trial, attempt(trial, "7.2")).history
    assert [(one.attempt, one.cause) for one in past] == [("7.0", Cause.FAILED), ("7.1", Cause.FAILED)]
    assert count_failures([]) == 0


def drained(one: Attempt, why: StopCause) -> None:
    """The attempt stopped five minutes before the end of its job."""
    event(one, event="started", role="trainer", index=0, incarnation=0)
    event(one, event="end_time", ends_at=2000.0)
    event(one, event="stopping", cause=why, time=1700.0)
    event(one, event="exited", role="trainer", incarnation=0, code=75)
    write_json(one.ended, {"exit_code": 75, "cause": why})


def test_starts_without_a_generation_are_counted_over_requeues(trial):
    """A job whose time is too short for one generation must not come back for ever."""
    for restart, why in enumerate([StopCause.TIME_LIMIT, StopCause.PREEMPTION, StopCause.USER_SIGNAL, None]):
        one = attempt(trial, f"7.{restart}")
        create_lineage(trial, one, 0, FRESH)
        if why:
            drained(one, why)
    causes = [Cause.WALLTIME, Cause.PREEMPTED, Cause.WALLTIME, Cause.NODE]
    assert [one.cause for one in look(trial, attempt(trial, "7.4")).history] == causes
    assert [one.cause for one in find_fruitless_starts(trial, "7")] == causes
    decision, _ = decide_start(trial, attempt(trial, "7.4"), 0, Situation("auto", "auto", retries=1))
    assert decision.action == "end" and "2 starts in a row without a new checkpoint" in decision.reason
    commit(trial, 4, "7.3", lineage=3)
    assert look(trial, attempt(trial, "7.4")).history == find_fruitless_starts(trial, "7") == ()


def test_failures_before_the_newest_generation_are_over(trial):
    """Nobody saw that progress: the supervisor was killed together with its trainer."""
    one = attempt(trial, "7.0")
    for incarnation in range(3):
        create_lineage(trial, one, incarnation, FRESH)
        event(one, event="exited", role="trainer", incarnation=incarnation, code=70, failure=True)
    assert len(look(trial, one, 3).history) == 3
    create_lineage(trial, one, 3, FRESH)
    commit(trial, 4, "7.0", lineage=3)
    assert look(trial, one, 4).history == ()


def test_a_start_that_made_a_generation_is_none_without_one(trial):
    one = attempt(trial, "7.0")
    create_lineage(trial, one, 0, FRESH)
    event(one, event="started", role="trainer", index=0, incarnation=0)
    commit(trial, 3, "7.0")
    event(one, event="progress", step=3)
    event(one, event="exited", role="trainer", incarnation=0, code=137, failure=True)
    assert find_fruitless_starts(trial, "7") == look(trial, one, 1).history == ()
    assert decide_start(trial, one, 1, Situation("auto", "auto", retries=0))[0].action == "load"
    create_lineage(trial, one, 1, Decision("load", "", step=3, lineage=0))
    event(one, event="started", role="trainer", index=0, incarnation=1)
    event(one, event="exited", role="trainer", incarnation=1, code=137, failure=True)
    assert [past.incarnation for past in find_fruitless_starts(trial, "7")] == [1]


def test_the_start_that_runs_is_no_past_one(trial):
    one = attempt(trial, "7.0")
    create_lineage(trial, one, 0, FRESH)
    assert find_fruitless_starts(trial, "7", running="7.0") == ()
    assert [past.cause for past in find_fruitless_starts(trial, "7")] == [Cause.NODE]


def test_a_generation_that_was_lost_later_still_was_progress(trial):
    one = attempt(trial, "7.0")
    create_lineage(trial, one, 0, FRESH)
    event(one, event="started", role="trainer", index=0, incarnation=0)
    event(one, event="progress", step=3)
    event(one, event="exited", role="trainer", incarnation=0, code=75)
    assert look(trial, attempt(trial, "7.1")).history == ()


def test_from_an_older_generation_the_later_ones_are_set_aside(trial):
    create_lineage(trial, attempt(trial, "1.0"), 0, FRESH)
    for step in (3, 6, 9):
        commit(trial, step, "1.0")
    (trial.generation(9) / "state").write_text("torn")
    two = attempt(trial, "2.0")
    decision, unwanted = decide_start(trial, two, 0, Situation("fault", "resume", retries=3, wanted=3))
    assert (decision.action, decision.step, decision.set_aside) == ("load", 3, (6, 9))
    assert sorted((one.step, one.problem) for one in unwanted)[0] == (6, "it is later than checkpoint 3")
    record = create_lineage(trial, two, 0, decision)
    assert load_lineages(trial)[-1] == record and record.set_aside == (6, 9) and record.from_step == 3
    for found in unwanted:
        move_aside(found.path, found.problem)
    # its own next start, by the stored mode
    again, _ = decide_start(trial, two, 1, Situation("fault", "resume", wanted=3))
    assert (again.action, again.step) == ("load", 3) and "as asked" not in again.reason


def test_a_named_generation_is_read_to_its_last_byte(trial, monkeypatch):
    monkeypatch.setattr(
        generation, "LIGHT_BYTES", 0
    )  # also a large file, before later generations are set aside
    commit(trial, 3, "1.0")
    commit(trial, 5, "1.0")
    (trial.generation(3) / "state").write_text("state of 4")
    decision, unwanted = decide_start(
        trial, attempt(trial, "2.0"), 0, Situation("auto", "resume", retries=3, wanted=3)
    )
    assert decision.action == "refuse" and decision.exit_code == 3 and unwanted == []
    assert [found.step for found in generation.scan(trial)] == [5, 3]


def test_the_batch_log_says_from_where_it_can_replay(trial):
    assert find_trimmed(trial) == 0
    trial.batches.mkdir()
    for step in (7, 8):
        (trial.batches / f"{step:08d}.seal").write_text("{}")
    assert find_trimmed(trial) == 6 == look(trial, attempt(trial, "2.0")).trimmed
    assert find_trimmed(trial) == 6
    write_json(trial.trimmed, {"step": 7})  # a trim that was killed left a seal
    assert find_trimmed(trial) == 7
    for path in trial.batches.iterdir():
        path.unlink()
    assert find_trimmed(trial) == 7  # the oldest generation kept is that of the newest batch: no seal is left
    decision, _ = decide_start(trial, attempt(trial, "2.0"), 0, Situation("auto", "auto", retries=3))
    assert decision.action == "refuse" and "batches 1 to 7 were trimmed" in decision.reason


def test_mode_fault_takes_the_imported_generation_it_began_with(trial):
    commit(trial, 4, "import.0", lineage=-1)
    one = attempt(trial, "7.0")
    first, _ = decide_start(trial, one, 0, Situation("fault", "resume", retries=3))
    assert (first.action, first.step, first.lineage) == ("load", 4, -1)
    create_lineage(trial, one, 0, first)
    event(one, event="exited", role="trainer", incarnation=0, code=70)
    again, _ = decide_start(trial, one, 1, Situation("fault", "resume", retries=3))
    assert (again.action, again.step) == ("load", 4), again.reason


def test_mode_fault_passes_over_an_import_that_is_none_of_its_own(trial):
    one = attempt(trial, "7.0")
    create_lineage(trial, one, 0, FRESH)
    commit(trial, 3, "7.0")
    commit(trial, 4, "import.0", lineage=-1)
    assert decide_start(trial, one, 1, Situation("fault", "fault", retries=3))[0].step == 3


@pytest.mark.parametrize("failures", [1, 2])
def test_a_manifest_unreadable_for_an_instant_is_not_set_aside(trial, monkeypatch, failures):
    monkeypatch.setattr(checked_file, "AGAIN_S", 0.0)
    commit(trial, 3, "7.0")
    commit(trial, 5, "7.0")
    left, read = [failures], Path.read_bytes

    def read_bytes(path):
        if path == trial.generation(5) / "manifest.json" and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    decision, damaged = decide_start(trial, attempt(trial, "8.0"), 0, Situation("auto", "auto", retries=3))
    assert (decision.step, [one.step for one in damaged]) == ((5, []) if failures == 1 else (3, [5]))
