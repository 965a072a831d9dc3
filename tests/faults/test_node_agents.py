"""The replicas of a node under their agent, by an srun that starts the program here: who dies with whom, and
what is started again.
"""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rl.core.proc import is_alive

sys.path.insert(0, str(Path(__file__).parent))

from patience import extend
from supervised import Fake, unit

# Its own process becomes the program; a client that notes each start is all that is needed of srun.
SRUN = """#!/bin/bash
for word; do case $word in
  --job-name=*) name=${word#*=} ;;
  --gpus-per-node=*) export CUDA_VISIBLE_DEVICES=$(seq -s, 4 $((3 + ${word#*=}))) ;;
esac; done
echo "$name $*" >> "$SRUNS"
while [[ $1 == -* ]]; do shift; done
SLURM_PROCID=0 exec "$@"
"""
UNITS = [
    *(replace(unit("server", index, gpus=2), gpu_offset=2 * index) for index in range(3)),
    replace(unit("server", 3), pool="student"),
    unit("rollout"),
    unit("trainer"),
]


class OnOneNode(Fake):
    """The trial in a job of one node."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        (root / "srun").write_text(SRUN)
        (root / "srun").chmod(0o755)
        self.sruns_file = root / "sruns"
        self.disk = root / "disk"  # of the node
        self.disk.mkdir()
        self.env = {"PATH": f"{root}:{os.environ['PATH']}", "SRUNS": str(self.sruns_file)}
        self.env |= {"TMPDIR": str(self.disk), "SLURM_JOB_ID": "7"}

    def begin(self, script: dict) -> None:
        self.write({"trainer": ["serve"], **script}, units=UNITS)
        self.start("srun", SLURM_JOB_NODELIST="n1", **self.env)
        self.until(
            lambda: len(self.replicas()) == 4 and self.newest("rollout", 0) and self.newest("trainer", 0)
        )

    def sruns(self) -> Counter[str]:
        names = [line.split()[0] for line in self.sruns_file.read_text().splitlines()]
        return Counter(name.partition("-")[0] for name in names)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[OnOneNode]:
    one = OnOneNode(tmp_path)
    yield one
    for process in one.supervisors:
        process.kill()
        process.wait()
    one.until(lambda: not one.alive())


def test_the_replicas_of_a_node_and_pool_are_one_step_with_parts_of_its_gpus(fake):
    fake.begin({})
    assert fake.sruns() == {"serveragent": 2, "rollout": 1, "trainer": 1}
    asked = [line for line in fake.sruns_file.read_text().splitlines() if line.startswith("serveragent-0.0")]
    assert "--cpus-per-task=3" in asked[0] and "--gpus-per-node=6" in asked[0]
    # a server leaves its record before it says that it is up
    fake.until(lambda: all("\n" in fake.attempt.log("server", index, 0).read_text() for index in range(3)))
    logs = [fake.attempt.log("server", index, 0).read_text().split() for index in range(3)]
    assert [log[2] for log in logs] == ["4,5", "6,7", "8,9"], "each has a log and GPUs of its own"
    # the agent would remove it when it leaves, with the caches of a server that is started again
    assert not list(fake.disk.glob("hpc-rl-*")), "the directory of caches is the servers' own"
    fake.supervisors[0].terminate()
    assert fake.supervisors[0].wait(extend(90)) == 75, fake.story()
    assert {row["code"] for row in fake.events("exited", "server")} == {75}
    assert not fake.alive()


def test_a_killed_replica_is_started_again_alone_by_the_same_agent(fake):
    fake.begin({})
    before = fake.replicas()
    fake.kill("server", 1)
    after = fake.wait_for_new(before, 1)
    assert [index for index in range(4) if after[index] != before[index]] == [1]
    [row] = fake.events("exited", "server")
    assert (row["index"], row["code"]) == (1, 137)
    assert fake.sruns() == {"serveragent": 2, "rollout": 1, "trainer": 1}


def test_the_death_of_an_agent_is_that_of_its_replicas_and_one_new_agent_starts_them(fake):
    fake.begin({"server": ["deaf"]})
    before = fake.replicas()
    os.kill(before[2].pid, signal.SIGSTOP)  # it can't see that its input ends
    fake.kill("serveragent", 0)
    after = fake.wait_for_new(before, 0, 1, 2)
    assert [index for index in range(4) if after[index] != before[index]] == [0, 1, 2]
    assert not [one for index, one in before.items() if index < 3 and is_alive(one.pid, one.start_ticks)]
    assert fake.sruns()["serveragent"] == 3
    assert sorted(row["index"] for row in fake.events("exited", "server")) == [0, 1, 2]


def test_the_death_of_the_supervisor_ends_agents_and_replicas(fake):
    fake.begin({"server": ["deaf"], "trainer": ["deaf"]})
    fake.supervisors[0].kill()
    fake.until(lambda: not fake.alive())


def test_the_last_replica_of_an_agent_takes_it_along_and_brings_a_new_one(fake):
    fake.begin({"server-3": ["exit 70", "serve"]})
    fake.until(lambda: fake.sruns()["serveragent"] == 3)
    codes = {row["index"]: row["code"] for row in fake.events("exited", "server")}
    assert codes == {3: 70}
    fake.until(lambda: len(fake.replicas()) == 4)


def test_a_step_with_too_few_gpus_is_named(fake):
    script = Path(fake.env["PATH"].partition(":")[0]) / "srun"
    script.write_text(script.read_text().replace("seq -s, 4 $((3", "seq -s, 4 $((1"))
    fake.write({"trainer": ["serve"]}, units=UNITS)
    assert fake.run(steps="srun", SLURM_JOB_NODELIST="n1", **fake.env) == 78, fake.story()
    assert "need 6 GPUs, but CUDA_VISIBLE_DEVICES is 4,5,6,7" in fake.events("failing")[0]["reason"]
