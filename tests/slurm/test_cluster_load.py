"""What a trial on 64 nodes costs the scheduler and the file system: the counts of benchmarks/cluster_load.py."""

import shutil
import sys
from pathlib import Path

import pytest
from cluster import Cluster

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from cluster_load import IdleTrial, measure


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_64_nodes_have_one_srun_per_node_and_role_and_quiet_servers(running_cluster, tmp_path):
    assert shutil.which("strace"), "strace is not on the PATH; install the package strace, which counts calls"
    with Cluster.private(running_cluster.slurm, 64, num_gpus=0) as cluster:
        trial = IdleTrial(tmp_path, cluster, num_nodes=64, replicas=2)
        found = measure(trial, seconds=60)
        cluster.cancel_all()
    assert found["srun"]["most_for_one_node_and_role"] == 1
    assert found["srun"]["started"] == {"preflight": 1, "serveragent": 63, "rollout": 1, "trainer": 1}
    assert not any(found["scheduler_calls_per_minute_while_idle"].values())
    server = found["file_calls_per_minute"]["server"]
    assert server["renames"] <= 7 and server["fsyncs"] == 0, server  # a minute may begin within a beat
    assert found["file_calls_per_minute"]["rollout"]["all"] < 200, "it opens the roster, not 126 leases"
    supervisor = found["file_calls_per_minute"]["supervisor"]["all"]
    assert supervisor < 2400, "it lists 126 leases, and reads none of them"
    assert found["file_calls_per_minute"]["serveragent"]["all"] == 0
