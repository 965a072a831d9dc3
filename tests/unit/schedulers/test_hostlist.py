"""Slurm's lists of node names, and the other hosts of a job."""

import pytest

from hpc_rl.schedulers.hostlist import expand, list_peer_hosts

OF_7 = {"SLURM_JOB_NODELIST": "n7", "SLURMD_NODENAME": "n7", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"}
HET = {
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[1-3]",
    "SLURM_HET_SIZE": "2",
}
HET |= {"SLURM_JOB_NODELIST": "gpu1", "SLURMD_NODENAME": "gpu1", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "peers"),
    [
        ({}, []),
        ({"SLURM_JOB_NODELIST": "n[1-4]", "SLURMD_NODENAME": "n1"}, ["n2", "n3"]),
        (OF_7, ["10.0.0.7"]),
        (HET, ["cpu1", "cpu2", "10.0.0.1"]),
    ],
)
def test_the_other_hosts_of_a_job(environ, peers):
    assert list_peer_hosts(environ) == peers


def test_node_lists():
    assert expand("a[1-3,07-09]b,c") == ["a1b", "a2b", "a3b", "a07b", "a08b", "a09b", "c"]
    assert expand("b[2,1]") == ["b2", "b1"]
    assert expand("r[1-2]n[1-2]") == ["r1n1", "r1n2", "r2n1", "r2n2"]
