"""Trials on a Slurm whose nodes are hosts of their own: addresses, names, hyper-threading, /tmp, dead nodes.

Needs root, for the namespaces that play the hosts.
"""

import itertools
import json
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import toy_trials
from host_trials import shared_folder, started, step_of, wait_for
from hosts import HostsCluster, speak_from_login_node
from patience import extend
from toy_trials import hpc_rl, logs_of, trial_of

from hpc_rl.checkpoint.generation import scan, verify
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.records import Event, EventKind, load_events, load_lineages
from hpc_rl.core.trial import Attempt, Trial
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.rollout.batch_log.seals import load_seals
from hpc_rl.stats.read import load_history
from hpc_rl.supervise.host_watch import ISOLATED_S

pytestmark = pytest.mark.timeout(900)
# Traps of real clusters: a name that means loopback, an address that all nodes have, two threads per core. There is
# no default route.
TRAPS = {"loop_name": True, "same_everywhere": "docker0=172.17.0.1/16", "threads_per_core": 2, "num_cpus": 32}
NUM_STEPS = 40


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsCluster]:
    with started(**TRAPS) as cluster:
        yield cluster


@pytest.fixture
def cluster(trapped, monkeypatch) -> Iterator[HostsCluster]:
    """The cluster with all its hosts and an empty queue; commands run on its login node."""
    trapped.up()
    speak_from_login_node(trapped, monkeypatch)
    yield trapped
    trapped.cancel_all()


def wait_for_end(trial: Trial) -> None:
    wait_for(trial.done.exists, trial, 400)


def train(cluster: HostsCluster, name: str, num_nodes: int, *more: str) -> Trial:
    """Train the warm toy model on hosts of the cluster, and see that it learned."""
    here = shared_folder(cluster, name)
    hpc_rl("quickstart", "--only_prepare", cwd=here, timeout_s=300)
    options = [f"--n_nodes={num_nodes}", f"trial_name={name}", f"total_train_steps={NUM_STEPS}", *more]
    hpc_rl("submit", "--config", "configs/grpo.yaml", *options, cwd=here)
    trial = trial_of(here, name)
    wait_for_end(trial)
    history = load_history(trial)
    assert [row["step"] for row in history.steps] == list(range(1, NUM_STEPS + 1))
    first, last = history.evaluations[0]["eval_reward"], history.evaluations[-1]["eval_reward"]
    assert last > first + 0.05, f"held-out reward {first} -> {last}"
    return trial


def test_four_hosts_learn_without_a_default_route(cluster):
    train(cluster, "traps", 4)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("num_nodes", "more"),
    [
        (4, {}),
        (4, {"route": "eth0"}),
        (4, {"route": "ib0", "loop_name": True}),
        (4, {"same_everywhere": "docker0=172.17.0.1/16"}),
        (1, {"threads_per_core": 2, "num_cpus": 32}),
        (4, {"threads_per_core": 2, "num_cpus": 32}),
    ],
    ids=["plain", "route", "ib0_route_loop_name", "docker0", "threads_one_node", "threads"],
)
def test_hosts_with_each_trap_learn(monkeypatch, num_nodes, more):
    with started(**more) as cluster:
        speak_from_login_node(cluster, monkeypatch)
        train(cluster, "soak", num_nodes)


@pytest.mark.soak
def test_four_hosts_learn_by_ipv6_alone(monkeypatch):
    with started(ipv6=True) as cluster:
        speak_from_login_node(cluster, monkeypatch)
        trial = train(cluster, "ipv6", 4, "cluster.interface=ib0")
        leases = "".join(path.read_text() for path in trial.names.rglob("*.epoch-*"))
        urls = re.findall(r'"url": "(http://[^"]*)"', leases)
        assert urls and all(url.startswith("http://[fd77::1") for url in urls), urls


@pytest.mark.soak
def test_two_ranks_on_two_hosts_fine_tune(cluster):
    here = shared_folder(cluster, "sft")
    hpc_rl("quickstart", "--only_prepare", cwd=here, timeout_s=300)
    options = ["--n_nodes=2", "allocation_mode=fsdp:d2", "total_train_steps=20"]
    hpc_rl("submit", "--config", "configs/sft.yaml", *options, cwd=here)
    trial = trial_of(here, "sft")
    wait_for_end(trial)
    losses = [row["loss"] for row in load_history(trial).steps]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.2


def nodes_of(cluster: HostsCluster) -> dict[str, str]:
    """Return the node, or nodes, of each step of the running jobs."""
    lines = cluster.run("squeue", "--steps", "--noheader", "--format=%j %N").splitlines()
    return dict(line.split() for line in lines)


def wait_for_step(trial: Trial, step: int) -> None:
    wait_for(lambda: step_of(trial) >= step, trial)


def long_trial(
    cluster: HostsCluster, name: str, num_steps: int, num_nodes: int = 4, **options: object
) -> Trial:
    here = shared_folder(cluster, name)
    toy_trials.make_quickstart(here)
    given = {"trial_name": name, "total_train_steps": num_steps, "recover.freq_steps": 10} | options
    arguments = [f"{key}={value}" for key, value in given.items()]
    hpc_rl("submit", "--config", "configs/grpo.yaml", f"--n_nodes={num_nodes}", *arguments, cwd=here)
    return trial_of(here, name)


def test_power_loss_of_a_server_node_costs_seconds(cluster):
    trial = long_trial(cluster, "power", NUM_STEPS)
    wait_for_step(trial, 10)
    nodes = nodes_of(cluster)
    cluster.kill_node(next(node for name, node in nodes.items() if name.startswith("serveragent-1")))
    wait_for_end(trial)
    assert len(load_history(trial).steps) == NUM_STEPS
    assert longest_pause_s(trial) < extend(10)


@pytest.mark.parametrize("cut", ["node", "pair"])
def test_nodes_that_do_not_reach_each_other_are_named_before_models_load(cluster, cut):
    if cut == "node":
        cluster.partition("n3", cut=True, interfaces=["ib0"])
    else:
        cluster.part("n2", "n4", "ib0", cut=True)
    try:
        trial = long_trial(cluster, f"network-{cut}", NUM_STEPS, **{"cluster.interface": "ib0"})
        wait_for(lambda: events_of(trial, EventKind.BAD_NODES), trial)
        begun, found = (
            events_of(trial, kind)[0] for kind in (EventKind.SUPERVISOR_STARTED, EventKind.BAD_NODES)
        )
        assert found.time - begun.time < extend(10)
        assert not events_of(trial, EventKind.STARTED)
        if cut == "node":
            assert "n3 (ib0 10.77.2.13)" in found.reason and "do not reach each other" in found.reason
        else:
            assert "n2 (ib0 10.77.2.12) and n4 (ib0 10.77.2.14) do not reach each other" in found.reason
        # the supervisor names the nodes before it has recorded its end, which `status` tells
        wait_for(lambda: list_ended(trial), trial)
        said = json.loads(hpc_rl("status", "--json", str(trial.dir), cwd=cluster.dir).stdout)
        assert "ib0 10.77.2.1" in said["last_end"] or "ib0 10.77.2.1" in said["reason"]
    finally:
        cluster.partition("n3", cut=False, interfaces=["ib0"])
        if cut == "pair":
            cluster.part("n2", "n4", "ib0", cut=False)


def list_ended(trial: Trial) -> list[Attempt]:
    """Return the attempts that have recorded their end."""
    attempts = [trial.attempt(folder.name) for folder in sorted(trial.attempts.glob("*"))]
    return [attempt for attempt in attempts if attempt.ended.exists()]


def events_of(trial: Trial, kind: EventKind) -> list[Event]:
    attempts = [trial.attempt(folder.name) for folder in sorted(trial.attempts.glob("*"))]
    return [event for attempt in attempts for event in load_events(attempt) if event.kind is kind]


def node_with(cluster: HostsCluster, role: str) -> str:
    """Return the (first) node of a role; the batch script and the supervisor are on n1."""
    found = next(node for name, node in nodes_of(cluster).items() if name.startswith(role))
    return cluster.run("scontrol", "show", "hostnames", found).split()[0]


def longest_pause_s(trial: Trial) -> float:
    """Return the longest time between two steps, lost ones included."""
    times = [row["time"] for row in load_history(trial).steps]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def check_history(trial: Trial) -> None:
    """See that a trial has each step, batch and prompt once, by one start after the other, and whole files."""
    rows = load_history(trial).steps
    print(f"{trial.name}: {longest_pause_s(trial):.0f} s between two steps at most", flush=True)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert [row["lineage"] for row in rows] == sorted(row["lineage"] for row in rows)
    for found in map(verify, scan(trial)):
        assert not found.problem, f"{found.path}: {found.problem}"
    seals = load_seals(trial.rollout).values()
    used = [index for seal in seals for index in seal.places]
    assert len(used) == len(set(used)), "a prompt is in two batches"
    starts = load_lineages(trial)
    assert [start.from_step for start in starts] == sorted(start.from_step for start in starts)


@pytest.mark.soak
@pytest.mark.parametrize("supervisor", ["lives", "stopped"])
def test_a_first_node_that_is_cut_off_writes_nothing_once_another_start_owns_the_trial(
    cluster, monkeypatch, supervisor
):
    monkeypatch.setenv("HPC_RL_WATCH_S", "5")
    trial = long_trial(cluster, f"fence-{supervisor}", NUM_STEPS, num_nodes=3)
    wait_for_step(trial, 12)
    first = trial.attempt(next(trial.attempts.iterdir()).name)
    cluster.partition("n1", cut=True)
    if supervisor == "stopped":  # it ends none of its roles
        [pid] = running_on(cluster, "n1", ["supervisor"])
        subprocess.run(cluster.on("n1", ["kill", "-STOP", pid], cluster.dir), check=True)
    segments = list(trial.rollout.glob("segment-*.ledger"))
    try:
        wait_for(lambda: cluster.hurry() or len(list(trial.attempts.iterdir())) == 2, trial)
        [second] = [trial.attempt(one.name) for one in trial.attempts.iterdir() if one != first.dir]
        wait_for(lambda: EventKind.SUPERVISOR_STARTED in {event.kind for event in load_events(second)}, trial)
        writers = ("rollout", "trainer", *(["supervisor"] if supervisor == "lives" else []))
        assert running_on(cluster, "n1", writers), "nothing lives there that could write"
        wait_for(lambda: not running_on(cluster, "n1", writers), trial, FENCED_S)
        files = written_by(first, segments)
        hurried_to_its_end(cluster, trial)
    finally:
        cluster.partition("n1", cut=False)
    time.sleep(20)  # Slurm ends what is left there
    after = written_by(first, segments)
    if supervisor == "stopped":  # Slurm lets it run again, to end it: it reports that in its own files
        after = {path: what for path, what in after.items() if path.name.startswith(("metrics", "segment"))}
    assert after.items() <= files.items(), "later starts trim, the fenced one does nothing"
    check_history(trial)
    assert "its first node was lost" in hpc_rl("status", str(trial.dir), cwd=cluster.dir).stdout
    told = json.loads(hpc_rl("status", "--json", str(trial.dir), cwd=cluster.dir).stdout)
    if supervisor == "lives":
        assert {(one["node"], one["cut_off"]) for one in told["attempts"][0]["silences"]} == {("n1", True)}


@pytest.mark.soak
def test_a_first_node_that_is_cut_off_ends_by_itself(cluster):
    trial = long_trial(cluster, "alone", NUM_STEPS)
    wait_for_step(trial, 12)
    cluster.partition("n1", cut=True)
    try:
        wait_for(lambda: not running_on(cluster, "n1"), trial, ISOLATED_S + FENCED_S)
        [ended] = wait_for(lambda: events_of(trial, EventKind.ENDED), trial, FENCED_S)
        assert ended.code == ExitCode.STOPPED and "cut off" in ended.reason
        said = hpc_rl("status", str(trial.dir), cwd=cluster.dir).stdout
        assert "n1 has been cut off from the other nodes since " in said
        assert not any(f"{node} has not answered" in said for node in ("n2", "n3", "n4"))
    finally:
        cluster.partition("n1", cut=False)


FENCED_S = 60  # a kill may take 25 s, and this machine is slow


def running_on(
    cluster: HostsCluster, node: str, roles: Sequence[str] = ("supervisor", "rollout", "trainer", "server")
) -> list[str]:
    """Return the pids, on that node, of the processes of roles."""
    command = cluster.on(node, ["ps", "-eo", "pid=,args="], cluster.dir)
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    programs = {f"-m hpc_rl.roles.{role} " for role in roles}
    found = [line.split(maxsplit=2) for line in lines if any(program in line for program in programs)]
    return [pid for pid, program, _ in found if "python" in program]


def written_by(attempt: Attempt, segments: list[Path]) -> dict[Path, tuple[int, bytes]]:
    """Return what an attempt's processes wrote: its own files, leases, and these segments of the batch log."""
    paths = [path for path in attempt.dir.rglob("*") if path.is_file()]
    leases = attempt.trial.names.rglob("*.epoch-*")
    paths += [path for path in leases if json.loads(path.read_text())["value"].get("attempt") == attempt.id]
    paths += [path for path in segments if path.exists()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["trainer", "batch"])
def test_power_loss_of_a_trainer_or_of_the_first_node_is_survived(cluster, monkeypatch, victim):
    monkeypatch.setenv("HPC_RL_WATCH_S", "5")
    trial = long_trial(cluster, f"lost-{victim}", NUM_STEPS)
    wait_for_step(trial, 12)
    node = "n1" if victim == "batch" else cluster.run("scontrol", "show", "hostnames", "n2").strip()
    cluster.kill_node(node)
    time.sleep(30)
    cluster.up()
    hurried_to_its_end(cluster, trial)
    check_history(trial)


@pytest.mark.soak
def test_status_tells_within_30_s_that_the_first_node_lost_power_while_slurm_waits_for_it(monkeypatch):
    with started(extra_conf="SlurmdTimeout=300", without=("SlurmdTimeout=",)) as cluster:
        speak_from_login_node(cluster, monkeypatch)
        trial = long_trial(cluster, "silent", 10_000)
        wait_for(lambda: status_of(cluster, trial)["eta_s"] is not None, trial)
        before = counter_of_owner(trial)
        wait_for(lambda: counter_of_owner(trial) != before, trial)  # the worst moment: it was just renewed
        begun = time.monotonic()
        cluster.kill_node("n1")
        told = wait_for(lambda: (one := status_of(cluster, trial))["silent_hosts"] and one, trial)
        took_s = time.monotonic() - begun
        print(f"told after {took_s:.1f} s: {told['silent_hosts']}", flush=True)
        assert took_s <= 30
        assert told["eta_s"] is None and told["steps_per_second"] is None
        said = hpc_rl("status", str(trial.dir), cwd=cluster.dir).stdout
        assert "the supervisor on n1 has sent no heartbeat for " in said and "done in about" not in said
        assert cluster.run("squeue", "--noheader", "--format=%T").split() == ["RUNNING"]
        assert "down" not in cluster.run("sinfo", "--noheader", "--nodes=n1", "--format=%T")


def status_of(cluster: HostsCluster, trial: Trial) -> dict[str, Any]:
    return json.loads(hpc_rl("status", "--json", str(trial.dir), cwd=cluster.dir).stdout)


def counter_of_owner(trial: Trial) -> int:
    """Return how often the supervisor has renewed its lease."""
    return NameResolve(trial.names).list_leases(keys.OWNER)[keys.OWNER].counter


@pytest.mark.soak
@pytest.mark.parametrize("length_s", [30, 180])
@pytest.mark.parametrize("victim", ["server", "rollout", "trainer", "batch"])
def test_a_partition_of_any_node_is_survived(cluster, monkeypatch, victim, length_s):
    monkeypatch.setenv("HPC_RL_WATCH_S", "5")
    # The rollout role is on the first node, too. When that comes back after the requeue to a job that can start on
    # no other node, while processes of the earlier start are there, Slurm drains it and holds the job.
    spare = length_s > 30 and victim in ("rollout", "batch")
    trial = long_trial(cluster, f"cut-{victim}-{length_s}", NUM_STEPS, num_nodes=3 if spare else 4)
    wait_for_step(trial, 12)
    node = {"batch": "n1", "trainer": "n2"}.get(victim) or node_with(cluster, victim)
    cluster.partition(node, cut=True)
    end = time.monotonic() + length_s
    while time.monotonic() < end:
        if spare:
            cluster.hurry()
        time.sleep(1)
    cluster.partition(node, cut=False)
    time.sleep(20)  # a node that has the job still, and gets it again, is drained by Slurm
    hurried_to_its_end(cluster, trial)
    check_history(trial)


def hurried_to_its_end(cluster: HostsCluster, trial: Trial, timeout_s: float = 500) -> None:
    deadline = time.monotonic() + extend(timeout_s)
    while not trial.done.exists():
        assert time.monotonic() < deadline, logs_of(trial)
        cluster.hurry()
        time.sleep(1)
