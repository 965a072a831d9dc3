"""Trials on a private cluster of each version of Slurm: what users and Slurm do to a job, and every layout.

In `make test` a short life of a trial with the newest that Debian has. The layouts and a long life are soak tests.
"""

import json
import random
from collections.abc import Iterator

import pytest
from chaos import Chaos
from cluster import Cluster, speak_to
from kill_anything import READY, Killed, Trials, make_workplace
from packages import NEWEST, SUITES
from toy_trials import hpc_rl

from hpc_rl.doctor.finding import Requirements, Status
from hpc_rl.doctor.slurm_checks import OLDEST, check_slurm
from hpc_rl.stats.read import load_history
from hpc_rl.supervise.server_array import load_arrays

pytestmark = pytest.mark.timeout(600)
OLDER = [pytest.param(version, marks=pytest.mark.soak) for version in SUITES if version != NEWEST]
APART = {**READY, "allocation_mode": "embedded:d1+fsdp:d1", "cluster.n_nodes": 2}


@pytest.fixture(scope="module", params=[NEWEST, *OLDER])
def of_version(request, slurm_of) -> Iterator[Cluster]:
    with Cluster.private(slurm_of(request.param)) as cluster:
        yield cluster


@pytest.fixture
def cluster(of_version, monkeypatch) -> Iterator[Cluster]:
    of_version.up()
    speak_to(of_version, monkeypatch)
    yield of_version
    of_version.cancel_all()


@pytest.fixture
def trials(cluster, tmp_path) -> Iterator[Trials]:
    trials = Trials(make_workplace(tmp_path), "version")
    yield trials
    trials.end_all()


def state_of(one: Killed) -> str:
    return json.loads(hpc_rl("status", one.trial.dir, "--json", cwd=one.folder).stdout)["state"]


def check_end(one: Killed) -> None:
    """See that a trial has each step once."""
    one.finish().promises.check()
    assert [row["step"] for row in load_history(one.trial).steps] == list(range(1, one.total_steps + 1))
    assert state_of(one) == "done"


# After each event all roles start again, which takes half a minute; other files have each with the system's Slurm.
@pytest.mark.parametrize(
    "events",
    [["first node"], pytest.param(["requeue", "preempt", "first node"], marks=pytest.mark.soak)],
    ids=["short", "long"],
)
def test_the_life_of_a_trial(trials, cluster, monkeypatch, events):
    """It may be requeued by an administrator or preempted, loses its first node, is cancelled and recovered."""
    monkeypatch.setenv("HPC_RL_WATCH_S", "1")
    one = Chaos(trials.folder, trials.name, APART, total_steps=24, held=True, cluster=cluster)
    trials.started.append(one)
    one.submit()
    one.until(lambda: one.num_rows() >= 2)
    assert state_of(one) == "running"
    luck = random.Random(1)
    for number, event in enumerate(events, 1):
        one.strike(event, luck)
        started = one.trial.attempt(f"{one.job_id}.{number}").dir
        one.until(started.exists)
        if event != "requeue":  # a job is preempted also before its roles are up
            enough = one.num_rows() + 1
            one.until(lambda enough=enough: one.num_rows() >= enough)
    hpc_rl("cancel", one.trial.dir, cwd=one.folder)
    one.until(lambda: one.over)
    one.until(lambda: not cluster.run("squeue", "-h"))
    assert state_of(one) == "cancelled"
    one.job_id = json.loads(hpc_rl("recover", one.trial.dir, "--json", cwd=one.folder).stdout)["job_id"]
    check_end(one)


@pytest.mark.soak
def test_one_heterogeneous_job(trials, cluster):
    one = trials.start(
        APART | {"launcher.slurm.layout": "hetjob"}, scheduler="slurm", total_steps=6, held=True
    )
    one.until(lambda: one.num_rows() >= 1)
    shown = cluster.run("squeue", "-h", "-o", "%i").split()
    assert set(shown) == {f"{one.job_id}+0", f"{one.job_id}+1"}
    check_end(one)


@pytest.mark.soak
def test_servers_as_jobs_of_their_own(trials, cluster):
    one = trials.start(APART | {"launcher.slurm.layout": "jobs"}, scheduler="slurm", total_steps=6, held=True)
    one.until(lambda: one.num_rows() >= 1)
    [array] = load_arrays(one.trial)
    shown = cluster.run("squeue", "-h", "-o", "%i").split()
    assert set(shown) == {one.job_id, f"{array.job_id}_0"}
    check_end(one)
    one.until(lambda: not cluster.run("squeue", "-h"))
    assert [task.reason for task in load_arrays(one.trial)[0].tasks] == ["the trial has reached its end"]


def test_doctor_accepts_the_versions_that_are_tested(cluster):
    found = {finding.check: finding for finding in check_slurm(Requirements())}
    assert all(finding.status is not Status.FAIL for finding in found.values()), found
    assert "." in found["slurm version"].found
    assert tuple(map(int, next(iter(SUITES)).split("."))) == OLDEST
