"""When a watch asks Slurm about the first node, and how it gives the job back."""

import subprocess
from pathlib import Path

import pytest

from hpc_rl.core.errors import JobEvent, SchedulerError
from hpc_rl.core.records import load_job_state
from hpc_rl.core.trial import Trial
from hpc_rl.name_resolve.shared_fs import LEASE_TTL_S
from hpc_rl.schedulers import slurm
from hpc_rl.schedulers.slurm import JobFacts
from hpc_rl.supervise import first_node
from hpc_rl.supervise.first_node import LOOK_EVERY_S, Suspicion, WatchedJob

LATE = LEASE_TTL_S / 6 + LOOK_EVERY_S


@pytest.mark.parametrize(
    ("number", "times", "lease_age_s", "silent_s", "lost", "asked"),
    [
        (0, range(0, 1000, 5), lambda now: 0.0, 0.0, (), [300, 600, 900]),
        (0, range(0, 100, 5), lambda now: LATE, 0.0, (), []),
        (0, range(0, 100, 5), lambda now: now, 0.0, (), [25, 40, 55, 70, 85]),
        (0, range(5, 35, 5), lambda now: 0.0, 10.0, (), [5, 20]),
        (0, range(0, 300, 5), lambda now: now, 0.0, range(300), [25, 30]),
        (0, range(0, 90, 5), lambda now: now, 0.0, {25, 45, 60, 65}, [25, 30, 45, 50, 65, 70, 85]),
        (1, range(0, 80, 5), lambda now: now, 0.0, (), [55, 70]),
    ],
    ids=[
        "rarely while the lease is renewed and the node answers",
        "a lease that is renewed in time is not suspicious",
        "again and again where it is not renewed",
        "at once where the node is silent",
        "two answers are needed, and the second comes soon",
        "an answer between them that the node is there",
        "the second watch gives the first one time",
    ],
)
def test_when_slurm_is_asked(number, times, lease_age_s, silent_s, lost, asked):
    """At the times `lost`, Slurm answers that the node is lost."""
    suspicion, found = Suspicion(number=number), []
    for now in times:
        if suspicion.is_due(now, lease_age_s(now), silent_s):
            found.append(now)
            if suspicion.is_certain(now, now in lost):
                break
    assert found == asked


class Controller:
    """Slurm's answers, and the requests to it."""

    def __init__(self) -> None:
        self.facts = JobFacts(is_running=True, num_requeues=0, nodes=frozenset({"n2", "n3"}))
        self.refuses = False
        self.told: list[str] = []

    def requeue(self, job_id: str, *, processes_live: bool) -> None:
        if self.refuses:
            raise SchedulerError("no")
        self.told.append(f"requeue {job_id}")


@pytest.fixture
def controller(monkeypatch) -> Controller:
    controller = Controller()
    monkeypatch.setattr(slurm, "query_job_facts", lambda job_id: controller.facts)
    monkeypatch.setattr(slurm, "is_dead", lambda node: False)
    monkeypatch.setattr(slurm, "requeue", controller.requeue)
    monkeypatch.setattr(slurm, "cancel_jobs", lambda job_id: controller.told.append(f"cancel {job_id}"))
    monkeypatch.setattr(first_node, "REQUEUE_AGAIN_S", 0.0)
    return controller


def job_of(folder: Path, requeues: bool = True) -> WatchedJob:
    trial = Trial(folder)
    for place in (trial.jobs, trial.intent):
        place.mkdir(exist_ok=True)
    return WatchedJob("7", 0, 2, "n1", requeues, trial, "7")


def test_a_node_is_lost_once_it_left_the_running_job(tmp_path, controller):
    job = job_of(tmp_path)
    assert job.is_lost()
    controller.facts = JobFacts(is_running=True, num_requeues=0, nodes=frozenset({"n1", "n2"}))
    assert not job.is_lost()
    controller.facts = JobFacts(is_running=False, num_requeues=0, nodes=frozenset({"n2"}))
    assert not job.is_lost(), "a job that ends is none of its business"
    controller.facts = JobFacts(is_running=True, num_requeues=1, nodes=frozenset({"n2"}))
    assert not job.is_lost(), "nor is a later start"


@pytest.mark.parametrize(("requeues", "told"), [(True, "requeue 7"), (False, "cancel 7")])
def test_a_lost_job_is_requeued_or_cancelled_and_that_is_recorded(tmp_path, controller, requeues, told):
    job = job_of(tmp_path, requeues)
    for _ in range(2):  # by both watches
        job.give_back(JobEvent.FIRST_NODE_LOST)
    assert controller.told == [told] * 2
    [line] = load_job_state(job.trial, "7")
    assert (line.event, line.restart) == (JobEvent.FIRST_NODE_LOST, 2)


def test_a_job_that_slurm_does_not_requeue_is_cancelled(tmp_path, controller):
    controller.refuses = True
    job_of(tmp_path).give_back(JobEvent.FIRST_NODE_LOST)
    assert controller.told == ["cancel 7"]


def test_a_job_that_another_watch_has_requeued_is_left_alone(tmp_path, controller):
    controller.refuses = True
    controller.facts = JobFacts(is_running=False, num_requeues=1, nodes=frozenset())
    job_of(tmp_path).give_back(JobEvent.FIRST_NODE_LOST)
    assert controller.told == []


def test_only_a_script_that_was_killed_counts_as_lost(tmp_path, controller):
    job = job_of(tmp_path)
    for number, is_lost in ((0, False), (15, False), (9, True)):
        controller.facts = JobFacts(False, 0, frozenset(), script_signal=number)
        assert job.has_lost_script() == is_lost
    assert not job_of(tmp_path, requeues=False).has_lost_script()
    job.trial.cancel_intent("7").touch()
    assert not job.has_lost_script()


SHOWN = """JobId=7 JobName=x Restarts=2 JobState=RUNNING Reason=None ExitCode=0:0 ReqNodeList=n9 NodeList=n[1-2] x=1
JobId=8 JobName=x Restarts=0 JobState={state} Reason=None ExitCode=0:9 ReqNodeList=(null) NodeList=n4
"""


@pytest.mark.parametrize(("state", "is_running"), [("RUNNING", True), ("COMPLETING", False)])
def test_the_facts_of_a_job_are_those_of_all_its_components(monkeypatch, state, is_running):
    done = subprocess.CompletedProcess([], 0, SHOWN.format(state=state), "")
    monkeypatch.setattr(slurm, "call", lambda argv: done)
    assert slurm.query_job_facts("7") == JobFacts(is_running, 2, frozenset({"n1", "n2", "n4"}), 9)


def test_a_requeued_job_starts_once_its_processes_must_have_ended(monkeypatch):
    called = []

    def call(argv):
        called.append(" ".join(argv))
        told = "KillWait                = 40 sec\n" if argv[-1] == "config" else ""
        return subprocess.CompletedProcess(argv, 0, told, "")

    monkeypatch.setattr(slurm, "call", call)
    slurm.requeue("7", processes_live=True)
    assert called[0] == "scontrol requeue 7" and called[-1] == "scontrol update jobid=7 StartTime=now+55"
    slurm.requeue("7", processes_live=False)
    assert called[-1] == "scontrol update jobid=7 StartTime=now+15"
