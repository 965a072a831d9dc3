"""Layouts on a real Slurm: an array of servers that is preempted and returns, a heterogeneous job, successors, submitit."""

import re
import time
from collections.abc import Iterator

import pytest
from cluster import Cluster, speak_to
from kill_anything import READY, Killed, Trials, make_workplace, short_name
from toy_trials import hpc_rl

from hpc_rl.core.trial import load_json
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.servers.router import is_older
from hpc_rl.supervise import bad_nodes
from hpc_rl.supervise.server_array import load_arrays

pytestmark = pytest.mark.timeout(900)
JOBS = {
    **READY,
    "allocation_mode": "embedded:d2+fsdp:d1",
    "cluster.n_nodes": 3,
    "launcher.slurm.layout": "jobs",
    "launcher.slurm.exclusive": True,  # small jobs would share a node, and none could be preempted alone
}


@pytest.fixture
def trials(cluster, tmp_path, request) -> Iterator[Trials]:
    trials = Trials(make_workplace(tmp_path), short_name(request.node.name))
    yield trials
    trials.end_all()


def queue(cluster) -> list[str]:
    return cluster.run("squeue", "--noheader", "--format=%i %j %T %N").splitlines()


def serving(one: Killed) -> dict[str, str]:
    """Weights of each server whose lease is alive and says that it serves."""
    if not hasattr(one, "names"):
        one.names = NameResolve(one.trial.names)
    leases = one.names.list_leases(keys.servers("rollout"))
    return {
        key: seen.value["version"]
        for key, seen in leases.items()
        if seen.alive and seen.value["state"] in ("serving", "paused")
    }


def node_by_attach(one: Killed, role: str, number: int) -> str:
    """Where `hpc-rl attach` gets to."""
    which = ("--role", role, "--index", str(number))
    return hpc_rl(
        "attach", one.trial.dir, *which, "--exec", "--", "printenv", "SLURMD_NODENAME", cwd=one.folder
    ).stdout.strip()


def current(one: Killed) -> str:
    return (load_json(one.trial.current_weights) or {"label": ""})["label"]


def test_servers_are_preempted_half_way_and_come_back_with_current_weights(trials, cluster, until):
    one = trials.start(JOBS, scheduler="slurm", total_steps=120, held=True)
    [array] = load_arrays(one.trial)
    one.until(lambda: len(serving(one)) == 2 and one.num_rows() >= 5)
    assert node_by_attach(one, "server", 1) == next(
        line.split()[3] for line in queue(cluster) if f"{array.job_id}_1" in line
    )
    assert (
        "serving weights"
        in hpc_rl("logs", one.trial.dir, "--role", "server", "--index", "1", cwd=one.folder).stdout
    )
    assert {line.split()[0] for line in queue(cluster)} == {
        one.job_id,
        f"{array.job_id}_0",
        f"{array.job_id}_1",
    }
    node = next(line.split()[3] for line in queue(cluster) if line.startswith(f"{array.job_id}_1 "))

    high = cluster.run(
        "sbatch",
        "--parsable",
        "--partition=high",
        f"--nodelist={node}",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 600",
    ).strip()
    one.until(lambda: any(f"{array.job_id}_1 " in line and "PENDING" in line for line in queue(cluster)))
    enough = one.num_rows() + 5
    one.until(lambda: one.num_rows() >= enough and serving(one).keys() == {"server/rollout/0"})
    assert not one.over, "the trainer went on with the server that was left"

    cluster.run("scancel", high)
    before = current(one)
    one.until(lambda: cluster.hurry(f"{array.job_id}_1") or "server/rollout/1" in serving(one))
    enough = one.num_rows() + 5
    one.until(lambda: one.num_rows() >= enough or one.over)
    one.release()
    log = (one.trial.attempt(f"{array.job_id}_1.1").dir / "logs" / "server-1.0.log").read_text()
    first = re.findall(r"the server is serving, with weights (\S+) from", log)[0]
    assert not is_older(first, before), f"it came back with {first} while {before} was current"
    assert "the server is waiting, with weights" not in log, (
        "it offered itself before it had the current weights"
    )

    one.finish().promises.check()
    assert [path.name for path in one.trial.attempts.iterdir()] == [f"{one.job_id}.0"], (
        "the trainer was never started again"
    )
    until(lambda: not queue(cluster))
    assert [task.reason for task in load_arrays(one.trial)[0].tasks] == ["the trial has reached its end"] * 2


def test_one_heterogeneous_job(trials, cluster, until):
    one = trials.start(
        JOBS | {"launcher.slurm.layout": "hetjob"}, scheduler="slurm", total_steps=30, held=True
    )
    one.until(lambda: len(serving(one)) == 2 and one.num_rows() >= 2)
    steps = dict(
        line.split()[:2]
        for line in cluster.run("squeue", "--steps", "--noheader", "--format=%j %N").splitlines()
    )
    components = {line.split()[0]: line.split()[3] for line in queue(cluster)}
    assert set(components) == {f"{one.job_id}+0", f"{one.job_id}+1"}
    assert steps["trainer-0.0"] == components[f"{one.job_id}+0"]
    assert len({steps["serveragent-0.0"], steps["serveragent-1.0"], steps["trainer-0.0"]}) == 3
    assert (
        node_by_attach(one, "server", 1) == steps["serveragent-1.0"]
        and node_by_attach(one, "trainer", 0) == steps["trainer-0.0"]
    )
    one.finish().promises.check()
    until(lambda: not queue(cluster))


@pytest.mark.soak
def test_where_requeue_is_refused_a_successor_goes_on(trials, cluster, until):
    options = READY | {"allocation_mode": "embedded:d1+fsdp:d1", "launcher.slurm.comment": "project-7"}
    one = trials.start(options, scheduler="slurm", total_steps=24, held=True)
    one.until(lambda: one.num_rows() >= 3)
    bad_nodes.add(one.trial, one.trial.attempt(f"{one.job_id}.0"), ["n4"], "lost", time.time(), hours=1)
    bad_nodes.write_exclude_file(one.trial, one.job_id, time.time())
    cluster.run("scontrol", "update", f"jobid={one.job_id}", "Requeue=0")
    cluster.run("scancel", "--batch", "--signal=USR1", one.job_id)
    one.until(lambda: (one.trial.jobs / f"{one.job_id}.next-0001").exists())
    successor = load_json(one.trial.successor(one.job_id, 1))["job_id"]
    assert successor != one.job_id
    assert cluster.run("squeue", "-h", "-t", "all", "-j", successor, "-o", "%k").split()[1:] == ["project-7"]
    assert " ExcNodeList=n4 " in cluster.run("scontrol", "show", "job", "-o", successor), (
        "a bad node is avoided"
    )
    one.until(lambda: one.trial.attempt(f"{one.job_id}.1").events.exists())
    said = hpc_rl("status", one.trial.dir, cwd=trials.folder).stdout
    assert f"{one.job_id} (slurm), continued as job {successor}" in said
    one.finish().promises.check()
    assert sorted(path.name for path in one.trial.attempts.iterdir()) == [
        f"{one.job_id}.0",
        f"{one.job_id}.1",
    ]
    assert not one.trial.job(successor).exists(), "it is no submission of its own"
    until(lambda: not queue(cluster))


@pytest.mark.soak
def test_submitit_submits_saves_and_requeues(trials, cluster, until):
    pytest.importorskip("submitit")
    options = {
        "allocation_mode": "embedded:d1+fsdp:d1",
        "launcher.slurm.backend": "submitit",
        "launcher.slurm.time": "'1:00:00'",
    }
    one = trials.start(READY | options, scheduler="slurm", total_steps=30, held=True)
    one.until(lambda: one.num_rows() >= 5)
    cluster.run(
        "scancel", "--signal=USR2", one.job_id
    )  # what submitit asks Slurm for before the end, and on preemption
    one.until(lambda: any("PENDING" in line for line in queue(cluster)))
    until(
        lambda: set(cluster.run("sinfo", "-h", "-p", "main", "-o", "%T").split()) == {"idle"}, 60
    )  # the first start is gone
    assert (load_json(one.trial.attempt(f"{one.job_id}.0").ended) or {}).get("exit_code") == 75, (
        "saved before it was requeued"
    )
    again = one.trial.attempt(f"{one.job_id}.1").dir
    one.until(lambda: cluster.hurry(one.job_id) or again.exists(), 300)
    one.finish().promises.check()
    assert sorted(path.name for path in one.trial.attempts.iterdir()) == [
        f"{one.job_id}.0",
        f"{one.job_id}.1",
    ]
    assert (one.trial.dir / "submitit").stat().st_mode & 0o077 == 0
    until(lambda: not queue(cluster))


SLOW_REWARD = """import time


def score(prompt, completion, **columns):
    time.sleep(0.2)
    return sum(map(ord, completion)) % 7 / 7
"""


@pytest.fixture
def short_cluster(running_cluster, monkeypatch) -> Iterator[Cluster]:
    """A cluster of its own whose partition gives a job three minutes."""
    partition = "PartitionName=tight Nodes=ALL MaxTime=3 DefaultTime=3 State=UP PriorityTier=1"
    with Cluster.private(running_cluster.slurm, extra_conf=partition) as cluster:
        speak_to(cluster, monkeypatch)
        yield cluster


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_a_trial_of_four_time_limits_finishes_by_successors(short_cluster, tmp_path, until):
    trials = Trials(make_workplace(tmp_path), "successors")
    (tmp_path / "some_reward.py").write_text(SLOW_REWARD)
    options = {
        "launcher.slurm.partition": "tight",
        "launcher.slurm.time": "'3'",
        "launcher.slurm.continue_by": "successor",
    }
    try:
        one = trials.start(JOBS | options, scheduler="slurm", total_steps=240)
        one.until(lambda: one.over, 2700)
        one.finish().promises.check()
    finally:
        trials.end_all()
    attempts = sorted(path.name for path in one.trial.attempts.iterdir())
    assert attempts == [f"{one.job_id}.{number}" for number in range(len(attempts))]
    assert len(attempts) >= 4
    followed = [
        load_json(one.trial.successor(one.job_id, number))["job_id"] for number in range(1, len(attempts))
    ]
    assert len(set(followed)) == len(followed), "one successor for each start"
    tasks = [task for array in load_arrays(one.trial) for task in array.tasks]
    assert max(task.starts for task in tasks) >= 2, "the servers' jobs went on as well"
    print(f"{len(attempts)} attempts, starts of the server tasks: {[task.starts for task in tasks]}")
    until(lambda: not queue(short_cluster))
