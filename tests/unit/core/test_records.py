"""Records: one tolerant parser each."""

import json

import pytest

from hpc_rl.core.errors import FailureClass
from hpc_rl.core.records import (
    DrainIntent,
    Event,
    EventKind,
    EventLog,
    ExitRecord,
    JobEvent,
    JobRecord,
    JobStateLine,
    LineageRecord,
    ProcessFile,
    ProcessRecord,
    TrialState,
    find_newest_job,
    find_successors,
    load_job_state,
)
from hpc_rl.core.trial import AttemptId, Trial


@pytest.fixture
def trial(tmp_path) -> Trial:
    trial = Trial(tmp_path / "trial")
    trial.make_dirs()
    return trial


def test_a_record_survives_a_round_trip():
    record = ExitRecord(code=70, reason="no memory", failure=FailureClass.OUT_OF_MEMORY, final=True, time=5.0)
    data = json.loads(json.dumps(record.to_json()))
    assert data["class"] == "out of memory" and "failure" not in data
    assert ExitRecord.parse(data) == record


@pytest.mark.parametrize(
    "data", [None, [], "x", {}, {"pid": "7", "start_ticks": 1, "host": "a", "role": "b"}]
)
def test_a_record_without_what_it_needs_is_none(data):
    assert ProcessRecord.parse(data) is None


def test_unknown_keys_and_optional_values_of_another_type_are_ignored():
    record = ExitRecord.parse({"code": 0, "class": "of a later version", "final": "yes", "new": [1]})
    assert record == ExitRecord(code=0)
    assert LineageRecord.parse({"lineage": True, "from_step": 0, "attempt": "1.0", "incarnation": 0}) is None


def test_the_job_id_is_that_of_the_file_name(trial):
    trial.job("17").write_text('{"scheduler": "slurm", "changed": ["actor.lr"], "time": 3}')
    expected = JobRecord(job_id="17", scheduler="slurm", changed=("actor.lr",), time=3.0)
    assert JobRecord.read(trial.job("17")) == expected
    assert JobRecord.read(trial.job("18")) is None


def test_torn_lines_and_unknown_events_are_skipped(trial):
    lines = ['{"event": "started", "restart": 1}', '{"event": "sang"}', '{"event": "ended", "code": 0, "rea']
    trial.job_state("17").write_text("\n".join(lines) + "\n")
    assert load_job_state(trial, "17") == [JobStateLine(event=JobEvent.STARTED, restart=1)]
    assert load_job_state(trial, "18") == []


def test_the_newest_job_is_the_last_successor(trial):
    assert find_newest_job(trial, "17") == "17"
    trial.successor("17", 1).write_text('{"job_id": "18"}')
    trial.successor("17", 2).write_text('{"job_id": "23"}')
    assert find_newest_job(trial, "17") == "23" and find_successors(trial, "17") == {1: "18", 2: "23"}


def test_events_are_read_on_and_anew_where_the_file_was_replaced(trial):
    attempt = trial.attempt("1.0")
    attempt.make_dirs()
    log = EventLog(attempt)
    assert log.poll() == []
    first = '{"event": "started", "role": "trainer", "incarnation": 0, "time": 1}\n'
    attempt.events.write_text(first)
    assert [event.kind for event in log.poll()] == [EventKind.STARTED]
    with attempt.events.open("a") as file:
        row = {"event": "exited", "role": "trainer", "failure": True, "class": "node", "incarnation": 0}
        file.write(json.dumps(row) + "\n")
    started, exited = log.poll()
    assert started.unit == ("trainer", 0) and exited.uses_retry and exited.failure is FailureClass.NODE
    attempt.events.write_text('{"event": "progress", "step": 5}\n')
    assert [event.step for event in log.poll()] == [5]


def test_a_message_decides_nothing():
    stopping = Event.parse({"event": "stopping", "reason": "SIGTERM of the scheduler"})
    assert stopping is not None and stopping.cause is None
    assert DrainIntent.parse({"reason": "cancelled by a person"}) is None


def test_a_file_name_tells_its_process(trial):
    attempt = trial.attempt("1.0")
    for path, rank in ((attempt.log("server", 3, 2), None), (attempt.exit_record("trainer", 0, 1, 7), 7)):
        found = ProcessFile.parse(path)
        assert found is not None and found.rank == rank and not found.by_client
    client = ProcessFile.parse(attempt.processes / "client-server-3.2-rank0.json")
    assert client is not None and (client.role, client.index, client.incarnation) == ("server", 3, 2)
    assert client.by_client and ProcessFile.parse(attempt.events) is None


def test_attempt_ids():
    assert AttemptId.parse("local-2026.12") == AttemptId("local-2026", 12)
    task = AttemptId.parse("17_3.0")
    assert task is not None and task.is_server_task and task.array_id == "17" and str(task) == "17_3.0"
    assert AttemptId.parse("17") is None and AttemptId.parse("17.x") is None


def test_states_that_are_over():
    assert TrialState.DONE.is_over and not TrialState.PENDING.is_over
