"""Conclusions from the reports of a job's nodes about the network between them."""

import os
import socket
import struct

import pytest
from patience import extend

from hpc_rl.core.net import answer_callers, find_unreached
from hpc_rl.supervise.network_check import Preflight, judge

pytestmark = pytest.mark.waits

HOSTS = ["n1", "n2", "n3", "n4"]
SAID = {host: {"interface": "ib0", "address": f"10.0.0.{host[1]}"} for host in HOSTS}


def results(*pairs: str) -> dict:
    """The results of all nodes; `n1>n2` means that n1 does not reach n2."""
    failed = [pair.split(">") for pair in pairs]
    unreached = {host: {peer: "timed out" for node, peer in failed if node == host} for host in HOSTS}
    return {host: {"unreached": peers} for host, peers in unreached.items()}


def test_nothing_follows_where_all_reach_each_other():
    found = judge(HOSTS, SAID, results(), 60)
    assert (found.problem, found.bad_nodes) == ("", ())
    assert found.addresses["n3"] == "10.0.0.3"


def test_a_pair_is_named_with_interface_and_addresses_and_costs_one_node():
    found = judge(HOSTS, SAID, results("n2>n4", "n4>n2"), 60)
    assert found.problem == "n2 (ib0 10.0.0.2) and n4 (ib0 10.0.0.4) do not reach each other: timed out"
    assert found.bad_nodes == ("n4",) and not found.hopeless
    one_way = judge(HOSTS, SAID, results("n2>n4"), 60)
    assert one_way.problem == "n2 (ib0 10.0.0.2) does not reach n4 (ib0 10.0.0.4): timed out"


def test_of_many_pairs_the_node_that_they_share_is_to_blame():
    found = judge(HOSTS, SAID, results("n1>n2", "n3>n2", "n4>n2", "n2>n1", "n2>n3", "n2>n4"), 60)
    assert found.bad_nodes == ("n2",) and not found.hopeless


def test_a_network_that_joins_no_nodes_is_no_nodes_fault():
    pairs = [f"{a}>{b}" for a in HOSTS for b in HOSTS if a != b]
    found = judge(HOSTS, SAID, results(*pairs), 60)
    assert found.hopeless and found.problem.endswith("; and 2 more")


def test_a_node_without_an_answer_or_an_address_is_named():
    without = {host: said for host, said in results("n1>n3", "n4>n3").items() if host != "n3"}
    found = judge(HOSTS, SAID, without, 45)
    assert found.problem == "n3: it did not answer within 45 s" and found.bad_nodes == ("n3",)
    no_address = SAID | {"n2": {"problem": "cluster.interface ib9: this host has no address there"}}
    found = judge(HOSTS, no_address, results(), 60)
    assert found.problem.startswith("n2: cluster.interface ib9") and found.bad_nodes == ("n2",)


@pytest.fixture
def answering():
    """A port of this host that answers as n2."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer_callers(server, "n2")
        yield server.getsockname()


def test_an_address_that_another_node_has_too_is_not_reached(answering):
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()
    found = find_unreached({"n2": answering, "n3": answering, "n4": closed})
    assert found["n3"] == "n2 answers there"
    assert "refused" in found["n4"].lower()
    assert "n2" not in found


HELLOS = """#!/bin/bash
for node in n1 n2 n3; do
  echo "HPC_RL_PREFLIGHT {\\"node\\": \\"$node\\", \\"interface\\": \\"ib0\\", \\"address\\": \\"10.0.0.1\\", \\"port\\": 1}"
done
read -r _
"""
RESULTS = """
for node in n1 n2 n3; do echo "HPC_RL_PREFLIGHT {\\"node\\": \\"$node\\", \\"unreached\\": {}}"; done
cat >/dev/null
"""
NOT_LAUNCHED = "echo 'srun: error: Task launch for StepId=7.0 failed on node n4: Unspecified error' >&2"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the check with an srun that is this script."""

    def run(script: str, limit_s: float = extend(1.4)):
        srun = tmp_path / "srun"
        srun.write_text(script)
        srun.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return Preflight(HOSTS, None, len(HOSTS), "", limit_s).run(tmp_path / "log", lambda: False)

    return run


def test_a_node_that_says_nothing_leaves_the_others_time(run):
    found = run(HELLOS + RESULTS)
    assert (found.bad_nodes, found.hopeless) == (("n4",), False)
    found = run(HELLOS + "cat >/dev/null\n")  # the others say nothing more
    assert (found.bad_nodes, found.hopeless) == (("n4",), False)


@pytest.mark.parametrize("before", [HELLOS, "#!/bin/bash\n"])
def test_a_node_that_gets_no_task_is_to_blame_though_srun_ends_the_others(run, before):
    found = run(f"{before}{NOT_LAUNCHED}\nexit 1\n")
    assert (found.bad_nodes, found.hopeless) == (("n4",), False)
    assert "Unspecified error" in found.problem and "n1" not in found.problem


@pytest.mark.parametrize("before", [HELLOS, "#!/bin/bash\n"])
def test_an_srun_that_fails_by_itself_blames_no_node_and_is_told(run, before):
    found = run(f"{before}echo 'srun: error: Invalid job credential' >&2\nexit 1\n")
    assert not found.problem and not found.bad_nodes
    assert "Invalid job credential" in found.unchecked


def test_a_caller_that_hangs_up_leaves_a_node_reachable():
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer_callers(server, "n2")
        for _ in range(20):
            caller = socket.create_connection(server.getsockname())
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            caller.close()
        assert find_unreached({"n2": server.getsockname()}) == {}
