"""Polling: with any number of commands, queries are rare, combined, and made by one process at a time."""

import json
import os
import subprocess
import sys

import pytest
from job_scripts import write_programs
from patience import extend

from hpc_rl.core.errors import SchedulerError
from hpc_rl.schedulers import shared_query
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.schedulers.shared_query import NOT_LISTED, Poller, SharedAnswer, make_cluster_key

UID = 1000


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Cluster:
    """Knows jobs, counts questions."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.jobs: dict[str, JobState] = {}
        self.accounting: dict[str, JobState] = {}
        self.asked: list[tuple[float, str]] = []
        self.refuses = ""

    def query_account(self, uid: int) -> dict[str, JobState]:
        self.asked.append((self.clock.now, "squeue"))
        if self.refuses:
            raise SchedulerError(self.refuses)
        return dict(self.jobs)

    def query_past(self, job_ids: list[str]) -> dict[str, JobState]:
        self.asked.append((self.clock.now, "sacct"))
        return {job_id: self.accounting[job_id] for job_id in job_ids if job_id in self.accounting}

    def has(self, job_id: str, state: State) -> None:
        self.jobs[job_id] = JobState(job_id, state, state.value.upper(), nodes="n1")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cluster(clock):
    return Cluster(clock)


@pytest.fixture
def poller(tmp_path, clock, cluster):
    """Makes pollers of different processes."""
    return lambda: Poller(cluster, tmp_path / "polling", clock)


def test_many_watchers_for_three_minutes_make_few_calls(poller, clock, cluster):
    for number in range(20):
        cluster.has(str(number), State.RUNNING)
    watchers = [poller() for _ in range(5)]
    start = clock.now
    while clock.now < start + 180:
        for number, watcher in enumerate(watchers):
            seen = watcher.look({str(4 * number + k): start - 60 for k in range(4)}, UID)
            assert {state.state for state in seen.states.values()} == {State.RUNNING}
            assert clock.now - seen.asked_at < 25
        clock.now += 0.5
    assert 7 <= len(cluster.asked) <= 9
    assert sum(when < start + 30 for when, _ in cluster.asked) == 2


def test_a_job_of_a_moment_ago_is_pending_and_asked_for_soon(poller, clock, cluster):
    poller().look({}, UID)
    clock.now += 1
    seen = poller().look({"7": clock.now}, UID)
    assert seen.states["7"].state is State.PENDING
    assert len(cluster.asked) == 1, "a query was made a second ago"
    cluster.has("7", State.RUNNING)
    clock.now += 5
    assert poller().look({"7": clock.now - 5}, UID).states["7"].state is State.RUNNING
    assert len(cluster.asked) == 2


def test_nothing_makes_more_than_four_calls_a_minute(poller, clock, cluster):
    start = clock.now
    while clock.now < start + 120:
        poller().look({f"never-{clock.now}": clock.now}, UID, newer_than=clock.now)
        clock.now += 0.5
    for begin in (when for when, _ in cluster.asked):
        assert sum(begin <= when < begin + 60 for when, _ in cluster.asked) <= 4


def test_a_job_that_left_the_list_without_accounting_is_gone(poller, clock, cluster):
    cluster.has("7", State.RUNNING)
    poller().look({"7": clock.now - 100}, UID)
    cluster.jobs.clear()
    clock.now += 30
    state = poller().look({"7": clock.now - 130}, UID).states["7"]
    assert (state.state, state.native) == (State.UNKNOWN, NOT_LISTED)
    for _ in range(20):
        clock.now += 30
        poller().look({"7": 1.0}, UID)
    assert 1 <= sum(what == "sacct" for _, what in cluster.asked) <= 2, "not again and again"


def test_an_end_is_remembered_for_longer_than_the_scheduler_does(poller, clock, cluster):
    cluster.has("7", State.TIMEOUT)
    poller().look({"7": 1.0}, UID)
    cluster.jobs.clear()
    clock.now += 3600
    assert poller().look({"7": 1.0}, UID).states["7"].state is State.TIMEOUT
    assert [what for _, what in cluster.asked] == ["squeue", "squeue"]
    cluster.has("7", State.PENDING)  # requeued after all
    clock.now += 30
    assert poller().look({"7": 1.0}, UID).states["7"].state is State.PENDING


def test_accounting_tells_of_what_the_queue_forgot(poller, clock, cluster):
    cluster.accounting["7"] = JobState("7", State.NODE_FAIL, "NODE_FAIL")
    assert poller().look({"7": 1.0}, UID).states["7"].state is State.NODE_FAIL


def test_a_scheduler_that_fails_is_asked_less_and_the_last_answer_stands(poller, clock, cluster):
    cluster.has("7", State.RUNNING)
    first = poller().look({"7": 1.0}, UID)
    cluster.refuses = "squeue: timed out"
    start = clock.now
    while clock.now < start + 600:
        clock.now += 1
        seen = poller().look({"7": 1.0}, UID)
    assert seen.states["7"].state is State.RUNNING
    assert (seen.asked_at, seen.complaint) == (first.asked_at, "squeue: timed out")
    assert len(cluster.asked) <= 6
    cluster.refuses = ""
    clock.now += 300
    assert poller().look({"7": 1.0}, UID).complaint == ""


def test_a_death_with_the_claim_delays_the_others_half_a_minute(tmp_path, poller, clock, cluster):
    cluster.has("7", State.RUNNING)
    poller().look({"7": 1.0}, UID)
    due = SharedAnswer.read(tmp_path / "polling" / "answer.json").next_at
    clock.now = due
    (tmp_path / "polling" / "claim-2.0").write_text("of a process that is no more")
    poller().look({"7": 1.0}, UID)
    assert len(cluster.asked) == 1
    clock.now = due + shared_query.RETRY_S
    poller().look({"7": 1.0}, UID)
    assert len(cluster.asked) == 2


def test_without_a_writable_state_directory_the_times_are_kept(tmp_path, clock, cluster):
    (tmp_path / "file").write_text("")
    cluster.has("7", State.RUNNING)
    for _ in range(60):
        watcher = Poller(cluster, tmp_path / "file" / "polling", clock)
        assert watcher.look({"7": 1.0}, UID).states["7"].state is State.RUNNING
        clock.now += 0.5
    assert len(cluster.asked) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"no": "such"}'])
def test_a_torn_answer_is_asked_for_again(tmp_path, poller, cluster, content):
    (tmp_path / "polling").mkdir()
    (tmp_path / "polling" / "answer.json").write_text(content)
    cluster.has("7", State.RUNNING)
    assert poller().look({"7": 1.0}, UID).states["7"].state is State.RUNNING


def test_arrays_and_heterogeneous_jobs_are_found_by_their_id():
    known = [JobState("7+0", State.RUNNING), JobState("7+1", State.PENDING)]
    known += [JobState("8_[2-9]", State.PENDING), JobState("8_0", State.FAILED)]
    answer = SharedAnswer(accounts={str(UID): known})
    assert answer.find(UID, "7").state is State.RUNNING
    assert answer.find(UID, "8").state is State.PENDING
    assert answer.find(UID, "8_0").state is State.FAILED
    known.append(JobState("8_1", State.RUNNING))
    assert answer.find(UID, "8").state is State.RUNNING
    assert answer.find(UID, "80") is None


ASKER = """
import os, sys, time
from pathlib import Path
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.schedulers.shared_query import Poller

class Slow:
    def query_account(self, uid):
        with open(sys.argv[2], "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(0.5)
        return {"7": JobState("7", State.RUNNING)}

    def query_past(self, job_ids):
        return {}

seen = Poller(Slow(), Path(sys.argv[1])).look({"7": time.time() - 60}, 1000, patience_s=30)
assert seen.states["7"].state is State.RUNNING
"""


def test_of_processes_that_ask_at_once_one_asks_and_all_know(tmp_path):
    argv = [sys.executable, "-c", ASKER, str(tmp_path / "polling"), str(tmp_path / "log")]
    many = [subprocess.Popen(argv) for _ in range(6)]
    assert [process.wait(extend(60)) for process in many] == [0] * 6
    assert len((tmp_path / "log").read_text().split()) == 1


def test_two_clusters_do_not_share_their_answers(tmp_path, monkeypatch):
    keys = set()
    for name in ("a", "b"):
        conf = tmp_path / f"{name}.conf"
        conf.write_text(f"# x\nClusterName={name}\n")
        monkeypatch.setenv("SLURM_CONF", str(conf))
        keys.add(make_cluster_key())
    assert len(keys) == 2 and all("/" not in key for key in keys)


def test_the_name_of_a_cluster_without_files_is_asked_for_once(tmp_path, monkeypatch):
    says = "echo 'ClusterName             = Configless'"
    write_programs(tmp_path, {"scontrol": f"#!/bin/bash\necho x >>{tmp_path}/calls\n{says}\n"})
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(shared_query, "CONF_PLACES", (str(tmp_path / "nowhere"),))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "Of_the_Job")
    assert shared_query.find_cluster_name() == "of_the_job" and not (tmp_path / "calls").exists()
    monkeypatch.delenv("SLURM_CLUSTER_NAME")
    assert shared_query.find_cluster_name() == shared_query.find_cluster_name() == "configless"
    assert (tmp_path / "calls").read_text() == "x\n"
    (tmp_path / "slurm.conf").write_text("ClusterName=filed\n")
    monkeypatch.setattr(shared_query, "CONF_PLACES", (str(tmp_path / "nowhere"), str(tmp_path)))
    assert shared_query.find_cluster_name() == "filed"


def test_the_answer_is_private(tmp_path, poller):
    poller().look({}, UID)
    path = tmp_path / "polling" / "answer.json"
    assert path.stat().st_mode & 0o077 == 0
    assert json.loads(path.read_text())["sequence"] == 1


def test_tasks_of_an_array_are_found_while_they_wait_run_and_have_ended(poller, clock, cluster):
    cluster.has("7_0", State.RUNNING)
    cluster.has("7_[1-3%1]", State.PENDING)
    wanted = {f"7_{number}": clock.now - 60 for number in range(5)}
    states = poller().look(wanted, UID).states
    assert [states[f"7_{number}"].state for number in range(4)] == [State.RUNNING, *[State.PENDING] * 3]
    assert states["7_2"].job_id == "7_2" and states["7_4"].native == NOT_LISTED
    assert poller().look({"7": clock.now - 60}, UID).states["7"].state is State.RUNNING, "the whole array"
    clock.now += 60
    del cluster.jobs["7_[1-3%1]"]
    cluster.has("7_0", State.DONE)
    cluster.has("7_1", State.RUNNING)
    states = poller().look(wanted, UID).states
    assert (states["7_0"].state, states["7_1"].state) == (State.DONE, State.RUNNING)
