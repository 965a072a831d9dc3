"""Replicas on two hosts each: one of their nodes dies, training goes on with the others, and they return.

Needs root, for the namespaces that play the hosts.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import toy_trials
from alone_trials import list_backend_options
from host_trials import shared_folder, started, step_of, wait_for
from hosts import HostsCluster, speak_from_login_node
from other_pythons import python_of
from patience import extend
from sglang_stand_in import make_stand_in
from toy_trials import hpc_rl, logs_of, trial_of

from hpc_rl.core.records import EventKind, load_events
from hpc_rl.core.trial import Trial
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import LeaseView, NameResolve

pytestmark = pytest.mark.timeout(900)
OPTIONS = {
    "cluster.n_nodes": 5,
    "allocation_mode": "sglang:d2t2+fsdp:d1",
    "train_dataset.batch_size": 4,
    "gconfig.n_samples": 4,
    "evaluator.freq_steps": "null",
    "valid_dataset": "null",
    "recover.freq_steps": 50,
    "launcher.slurm.exclusive": True,  # small jobs would share a node
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[HostsCluster]:
    with started(num_nodes=5) as cluster:
        yield cluster


@pytest.fixture
def cluster(hosts, monkeypatch) -> Iterator[HostsCluster]:
    hosts.up()
    speak_from_login_node(hosts, monkeypatch)
    yield hosts
    hosts.cancel_all()


class Observed:
    """A trial, and the leases of its servers by this reader's clock."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.names = trial, NameResolve(trial.names)

    def list_serving(self) -> dict[int, LeaseView]:
        leases = self.names.list_leases(keys.servers("rollout")).items() if self.trial.names.is_dir() else ()
        return {
            int(key.rpartition("/")[2]): one
            for key, one in leases
            if one.alive and one.value.get("state") in keys.ROUTABLE
        }

    def wait_for_servers(self, *indexes: int, limit_s: float = 200) -> dict[int, LeaseView]:
        def find() -> dict[int, LeaseView]:
            found = self.list_serving()
            return found if found.keys() == {*indexes} else {}

        return wait_for(find, self.trial, limit_s)

    def wait_for_steps(self, count: int) -> None:
        last = step_of(self.trial) + count
        wait_for(lambda: step_of(self.trial) >= last, self.trial)


def make_place(cluster: HostsCluster, name: str) -> Path:
    """Make the toy in a folder of all hosts, unless it is there."""
    here = cluster.dir / "work" / name
    if not here.exists():
        toy_trials.make_quickstart(shared_folder(cluster, name))
    return here


def make_real(cluster: HostsCluster, name: str, backend: str) -> dict[str, Any]:
    """Make a model that is large enough for a real server; return the options of a trial with such servers."""
    from conformance import make_model  # it imports torch

    make_model(make_place(cluster, name) / "quickstart/warm", 1)
    words = list_backend_options(backend, python_of(backend))
    return dict(word.split("=", 1) for word in words) | {"rollout.setup_timeout": f"{extend(900):.0f}"}


def submit(cluster: HostsCluster, name: str, **options: Any) -> Observed:
    here = make_place(cluster, name)
    own = OPTIONS | {"trial_name": name} | {key.replace("__", "."): value for key, value in options.items()}
    if "launcher.inference_server_python" not in own:
        own |= make_stand_in(here / "stand-in")
    hpc_rl("submit", "--config", "configs/grpo.yaml", *(f"{key}={own[key]}" for key in own), cwd=here)
    return Observed(trial_of(here, name))


def nodes_of_steps(cluster: HostsCluster, prefix: str) -> dict[str, list[str]]:
    """Return the nodes of each running step whose name begins so."""
    found = {}
    for line in cluster.run("squeue", "--steps", "--noheader", "--format=%j %N").splitlines():
        name, nodes = line.split()
        if name.startswith(prefix):
            found[name] = cluster.run("scontrol", "show", "hostnames", nodes).split()
    return found


REAL = [
    pytest.param(name, marks=[pytest.mark.soak, getattr(pytest.mark, name), pytest.mark.timeout(2400)])
    for name in ("sglang", "vllm")
]


@pytest.mark.parametrize("backend", ["stand-in", *REAL])
def test_a_replica_of_an_array_loses_a_node_and_returns_while_training_goes_on(cluster, backend):
    own = {"total_train_steps": 100_000, "launcher__slurm__layout": "jobs"}
    limit_s = 300
    if backend != "stand-in":
        own |= make_real(cluster, f"array-{backend}", backend) | {
            "allocation_mode": f"{backend}:d2t2+fsdp:d1"
        }
        limit_s = 900
    one = submit(cluster, f"array-{backend}", **own)
    before = one.wait_for_servers(0, 1, limit_s=limit_s)
    one.wait_for_steps(3)
    nodes = nodes_of_steps(cluster, "server-0")
    assert [len(places) for places in nodes.values()] == [2], "one step on both nodes"
    cluster.kill_node(next(iter(nodes.values()))[1])
    one.wait_for_servers(1)
    one.wait_for_steps(3)

    def find_task() -> tuple[str, str]:
        lines = cluster.run("squeue", "--noheader", "--format=%i %T").splitlines()
        [(task, state)] = [line.split() for line in lines if "_0" in line]
        return task, state

    # a node that returns before Slurm misses it leaves the task running, and the replica starts again in it
    wait_for(lambda: find_task()[1] == "PENDING", one.trial)
    cluster.up()

    def find_both() -> dict[int, LeaseView]:
        cluster.hurry(find_task()[0])
        found = one.list_serving()
        return found if found.keys() == {0, 1} else {}

    after = wait_for(find_both, one.trial, limit_s)
    assert after[0].epoch > before[0].epoch and after[0].value["attempt"] != before[0].value["attempt"]
    assert after[1].epoch == before[1].epoch
    one.wait_for_steps(2)
    if backend == "stand-in":
        logs = "".join(path.read_text() for path in one.trial.dir.rglob("logs/sglang-*.log"))
        assert "node 1 of 2 joins at 10.77." in logs
    assert "has other weights" not in logs_of(one.trial, 10_000)
    hpc_rl("cancel", str(one.trial.dir), cwd=cluster.dir)


@pytest.mark.soak
def test_a_replica_of_one_job_is_restarted_after_the_loss_of_a_process_on_its_second_node(cluster):
    one = submit(cluster, "one-job", total_train_steps=100_000)
    before = one.wait_for_servers(0, 1)
    one.wait_for_steps(2)
    record = next(one.trial.attempts.glob("*/processes/server-0.0-rank1.json"))
    process = json.loads(record.read_text())
    os.kill(toy_trials.pid_of(process), 9)
    wait_for(lambda: (seen := one.list_serving().get(0)) and seen.epoch > before[0].epoch, one.trial)
    one.wait_for_steps(2)
    [attempt] = [one.trial.attempt(folder.name) for folder in one.trial.attempts.glob("*")]
    [exit_of] = [event for event in load_events(attempt) if event.kind is EventKind.EXITED]
    assert "the part of this replica at" in exit_of.reason or "rank 1 exited" in exit_of.reason
    hpc_rl("cancel", str(one.trial.dir), cwd=cluster.dir)


@pytest.mark.parametrize("backend", REAL)
def test_a_real_server_on_two_hosts_serves_a_trial(cluster, backend):
    own = make_real(cluster, f"real-{backend}", backend)
    own |= {"cluster.n_nodes": 3, "allocation_mode": f"{backend}:t2+fsdp:d1", "total_train_steps": 3}
    trial = submit(cluster, f"real-{backend}", **own).trial
    wait_for(trial.done.exists, trial, 900)
    assert step_of(trial) == 3
    first, second = (next(trial.attempts.glob(f"*/logs/server-0.0-rank{rank}.log")) for rank in (0, 1))
    assert "is serving weights 0.3 now" in first.read_text()
    assert re.search(r"n\d INFO weights 0\.3 are in /dev/shm/", second.read_text()), "its own copy"


@pytest.mark.soak
def test_the_servers_of_a_lost_node_return_on_another(cluster):
    """Slurm takes the node out of the job; its servers become a job of their own, which ends with the trial."""
    embedded = {"allocation_mode": "embedded:d2+fsdp:d1", "cluster__n_nodes": 3}
    embedded["launcher__slurm__replace_servers"] = True
    one = submit(cluster, "replaced", total_train_steps=100_000, **embedded)
    before = one.wait_for_servers(0, 1)
    one.wait_for_steps(2)
    [[lost]] = nodes_of_steps(cluster, "serveragent-1").values()
    cluster.kill_node(lost)
    one.wait_for_servers(0)
    after = one.wait_for_servers(0, 1)
    assert after[0].epoch == before[0].epoch
    assert after[1].value["host"] not in (lost, before[0].value["host"])
    said = json.loads(hpc_rl("status", "--json", str(one.trial.dir), cwd=cluster.dir).stdout)
    [array] = said["servers"]
    assert [task["state"] for task in array["tasks"]] == ["running"]
    one.wait_for_steps(2)
    hpc_rl("cancel", str(one.trial.dir), cwd=cluster.dir)
    wait_for(lambda: not cluster.run("squeue", "--noheader").strip(), one.trial)
