"""A request judged by sinfo: the name of the limit against it, and the nearest request that fits."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.schedulers.sinfo import JobRequest, Node, find_threads_per_core, judge, parse_sinfo

SINFO = """\
gpu*|up|1-00:00:00|1-infinite|g1|64|512000|ib,a100|gpu:a100:8(S:0-1)|2
gpu*|up|1-00:00:00|1-infinite|g2|64|512000|ib,a100|gpu:a100:8(S:0-1),nvme:2|2
gpu*|up|1-00:00:00|1-infinite|g3|64|256000|a100|gpu:a100:4|2
big|up|infinite|1-infinite|g1|64|512000|ib,a100|gpu:a100:8|2
big|up|infinite|1-infinite|g2|64|512000|ib,a100|gpu:a100:8|2
big|up|infinite|1-infinite|h1|128+|1000000+|h100|gpu:8|2
short|up|30:00|1-2|c1|32|128000|(null)|(null)|1
short|up|30:00|1-2|c2|32|128000|(null)|(null)|1
short|up|30:00|1-2|c3|32|128000|(null)|(null)|1
off|down|infinite|1-infinite|c9|32|128000|(null)|(null)|1
a banner of the site
"""
NODES = parse_sinfo(SINFO)


def test_sinfo_is_read():
    assert len(NODES) == 10
    size, more = (64, 512000, {"a100": 8}), {"max_time_s": 86400, "is_default": True, "threads_per_core": 2}
    assert NODES[1] == Node("gpu", "g2", *size, frozenset({"ib", "a100"}), **more)
    assert NODES[5].cpus == 128 and NODES[5].gpus == {"": 8} and NODES[5].max_time_s is None
    assert NODES[6].max_nodes == 2 and NODES[6].max_time_s == 1800 and NODES[6].features == frozenset()


OF_GPU = "of 3 nodes of partition gpu have"


def ask(n_nodes: int, **more) -> JobRequest:
    return JobRequest(n_nodes=n_nodes, **more)


@pytest.mark.parametrize(
    ("request_", "limit", "words", "nearest"),
    [
        (ask(1, partition="gpus"), "partition", "no partition 'gpus'", "--partition gpu"),
        (ask(4), "nodes", "has 3 nodes; 4 were requested", "--n_nodes 3"),
        (ask(3, gpus=8), "gpus", f"2 {OF_GPU} 8 GPUs", "--n_nodes 2 or cluster.n_gpus_per_node=4"),
        (ask(1, gpus=16), "gpus", f"0 {OF_GPU} 16 GPUs", "cluster.n_gpus_per_node=8"),
        (
            ask(1, gpus=8, gpu_type="h100"),
            "gpus",
            "have 8 h100 GPUs per node; the most on 1 node(s) is 0",
            "",
        ),
        (ask(1, cpus=65), "cpus", f"0 {OF_GPU} 65 CPUs", "at most 64 CPUs per node"),
        (ask(3, mem_mb=300000), "memory", "2 of 3 nodes", "--n_nodes 2 or at most 256000 MB per node"),
        (ask(1, time_s=86401), "time", "limit of 1-00:00:00; 1-00:00:01", "--time 1-00:00:00"),
        (ask(3, partition="short"), "nodes", "allows 2 nodes per job", "--n_nodes 2"),
        (ask(3, constraint="ib"), "constraint", f"2 {OF_GPU} the features 'ib'", "--n_nodes 2"),
        (ask(1, constraint="ib&h100"), "constraint", "features: a100, ib", "launcher.slurm.constraint=null"),
        (ask(1, nodelist="g[1,4]"), "nodelist", "has no node g4", "launcher.slurm.nodelist=null"),
        (ask(3, exclude="g[2-3]"), "exclude", "leaves 1 of the 3 nodes", "--n_nodes 1"),
    ],
)
def test_the_binding_limit_and_what_would_fit(request_, limit, words, nearest):
    finding = judge(request_, NODES)[0]
    assert (finding.limit, finding.nearest, finding.certain) == (limit, nearest, True)
    assert words in finding.message


@pytest.mark.parametrize(
    "request_",
    [
        ask(3),
        ask(2, gpus=8, gpu_type="a100", cpus=64, mem_mb=512000, time_s=86400),
        ask(2, constraint="ib&a100"),
        ask(3, constraint="ib|a100"),
        ask(1, constraint="[rack1*2&rack2*1]"),
        ask(1, partition="short,big", gpus=8),
        ask(1, nodelist="g[1-2]", exclude="g3"),
        ask(1, partition="big", time_s=None),
    ],
)
def test_what_can_run_is_not_refused(request_):
    assert judge(request_, NODES) == []


def test_a_limit_that_a_qos_may_lift_is_told_and_not_refused():
    [finding] = judge(JobRequest(n_nodes=1, time_s=10**6, qos="long"), NODES)
    assert finding.limit == "time" and not finding.certain


def test_another_partition_that_takes_it_is_named():
    findings = judge(JobRequest(n_nodes=2, time_s=10**6, gpus=8), NODES)
    assert [finding.nearest for finding in findings] == ["--time 1-00:00:00", "--partition big"]


def test_a_partition_that_is_down_is_told():
    [finding] = judge(JobRequest(n_nodes=1, partition="off"), NODES)
    assert "not up" in finding.message and not finding.certain


def test_no_default_partition():
    nodes = [dataclasses.replace(node, is_default=False) for node in NODES]
    assert judge(JobRequest(n_nodes=1), nodes)[0].nearest == "--partition NAME"


SIZES = [st.integers(0, 12), st.integers(1, 200), st.integers(1, 10**6), st.integers(60, 10**6)]


@given(st.integers(1, 6), *SIZES)
def test_following_the_nearest_leads_to_a_request_that_fits(n_nodes, gpus, cpus, mem_mb, time_s):
    """One change at a time, always the first; never more than a few."""
    request = ask(n_nodes, gpus=gpus, cpus=cpus, mem_mb=mem_mb, time_s=time_s)
    names = {"--n_nodes": "n_nodes", "gpus": "gpus", "CPUs": "cpus", "MB": "mem_mb"}
    for _ in range(8):
        refusals = [finding for finding in judge(request, NODES) if finding.certain]
        if not refusals:
            return
        nearest = refusals[0].nearest.split(" or ")[-1]
        if nearest.startswith("--time"):
            change = {"time_s": 86400}
        else:
            name = next(field for word, field in names.items() if word in nearest)
            change = {name: int(re.search(r"\d+", nearest)[0])}
        request = dataclasses.replace(request, **change)
    raise AssertionError(request)


@pytest.mark.parametrize(("partition", "threads"), [(None, 2), ("short", 1), ("short,gpu", 2), ("none", 2)])
def test_threads_per_core_are_those_of_the_nodes_that_may_be_given(partition, threads):
    assert find_threads_per_core(JobRequest(n_nodes=1, partition=partition), NODES) == threads
