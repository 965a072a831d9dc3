"""The processes of a job's first node die one by one: the job is given back, and each step is trained once.

An srun that sees its client die has Slurm end the step, and a script that dies before its slurmstepd ends the
job: a power loss has neither.
"""

import random
import time
from collections.abc import Iterator

import pytest
from chaos import Chaos
from cluster import Cluster, speak_to
from kill_anything import READY, make_workplace, new_luck
from packages import NEWEST, SUITES

from hpc_rl.core.errors import JobEvent
from hpc_rl.core.records import load_job_state
from hpc_rl.stats.read import load_history

pytestmark = pytest.mark.one_host("the processes of a node are found by the files that they hold")
NUM_ROUNDS = {version: 20 if version == NEWEST else 5 for version in SUITES}
GIVEN_BACK_S = 180.0
FOUR_NODES = {
    **READY,
    "cluster.n_nodes": 4,
    "allocation_mode": "embedded:d3+fsdp:d1",
    "recover.freq_steps": 2,
}


@pytest.fixture
def cluster(version, slurm_of, monkeypatch) -> Iterator[Cluster]:
    with Cluster.private(slurm_of(version)) as cluster:
        speak_to(cluster, monkeypatch)
        yield cluster


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("version", SUITES)
def test_each_death_of_the_first_node_costs_a_start_and_no_step(cluster, tmp_path, version):
    folder = make_workplace(tmp_path)
    one = Chaos(folder, "deaths", FOUR_NODES, total_steps=400, held=True, cluster=cluster)
    one.submit()
    luck = new_luck()
    try:
        for number in range(NUM_ROUNDS[version]):
            enough = one.num_rows() + 1
            one.until(lambda enough=enough: one.num_rows() >= enough)
            took_s = lose_first_node(one, luck, number)
            print(f"round {number}: given back after {took_s:.0f} s", flush=True)
            one.until(lambda number=number: len(one.trial_attempts()) == number + 2)
        one.finish().promises.check()
    finally:
        one.close()
    assert [row["step"] for row in load_history(one.trial).steps] == list(range(1, one.total_steps + 1))


def lose_first_node(one: Chaos, luck: random.Random, restart: int) -> float:
    """Kill the processes of the first node; return how long it took until the job was given back."""

    def is_given_back() -> bool:
        lines = load_job_state(one.trial, one.job_id)
        return any(
            line.restart == restart and line.event in (JobEvent.FIRST_NODE_LOST, JobEvent.SCRIPT_KILLED)
            for line in lines
        )

    begun = time.monotonic()
    one.lose_first_node(luck)
    one.until(is_given_back, GIVEN_BACK_S)
    return time.monotonic() - begun
