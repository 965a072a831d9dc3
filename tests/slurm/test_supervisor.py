"""The supervisor with one srun per node and role on a real Slurm: roles of the supervisor's fault tests, spread over
nodes.
"""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from supervised import HERE, ROOT, Fake, unit
from toy_trials import is_running, pid_of

from hpc_rl.core.records import ProcessRecord
from hpc_rl.core.trial import load_json, write_json
from hpc_rl.name_resolve import keys, open_names

SCRIPT = f"""#!/bin/bash
export PYTHONPATH={HERE}:{ROOT} SLURM_EXPORT_ENV=ALL
told=0
trap 'told=1; kill -TERM $pid' TERM
for try in 1 2 3; do
  {sys.executable} -m hpc_rl.roles.supervisor --trial_dir "$1" --attempt $SLURM_JOB_ID.0 --steps srun &
  pid=$!
  while :; do wait $pid; rc=$?; kill -0 $pid 2>/dev/null || break; done
  echo "rc $rc told $told"
  if ((rc <= 128 || told)); then break; fi
done
exit $rc
"""


class SlurmFake(Fake):
    """The trial as a job of 4 nodes."""

    def __init__(self, root: Path, cluster) -> None:
        super().__init__(root)
        self.cluster = cluster

    def submit(self, gpus: int = 0) -> str:
        script = self.trial.dir / "job.sh"
        script.write_text(SCRIPT)
        flags = [
            "--nodes=4",
            "--ntasks-per-node=1",
            "--cpus-per-task=16",
            "--mem=8000M",
            "--no-kill",
            "--time=10",
        ]
        flags += [f"--gpus-per-node={gpus}"] if gpus else []
        out = f"--output={self.trial.dir}/job.out"
        job_id = self.cluster.run(
            "sbatch", "--parsable", *flags, out, str(script), str(self.trial.dir)
        ).strip()
        self.attempt = self.trial.attempt(f"{job_id}.0")
        return job_id

    def story(self) -> str:
        return (self.trial.dir / "job.out").read_text()[-6000:]

    def ended(self) -> dict | None:
        return load_json(self.attempt.ended)

    def log(self, name: str) -> str:
        return (self.attempt.dir / "logs" / f"{name}.log").read_text()


@pytest.fixture
def fake(cluster, tmp_path: Path) -> Iterator[SlurmFake]:
    root = tmp_path / "with blank"
    root.mkdir()
    yield SlurmFake(root, cluster)


def everybody_up(fake: SlurmFake, num: int) -> Callable[[], bool]:
    return lambda: (
        sum("agent" not in path.name for path in fake.attempt.processes.glob("[rst]*.json")) >= num + 1
    )


UNITS = [
    unit("server", 0, nodes=(0,), gpus=2),
    unit("server", 1, nodes=(3,), gpus=2),
    unit("rollout", 0, nodes=(0,)),
    unit("trainer", 0, tasks=2, nodes=(1, 2), gpus=1),
]


def test_units_start_at_once_and_end_with_a_killed_supervisor(fake):
    fake.write({"trainer": ["deaf", "train"], "total": 4}, units=UNITS)
    fake.submit(gpus=4)
    fake.until(everybody_up(fake, 7))
    first = {(one.host, one.pid) for one in fake.alive()}
    # A process has its record before it has written its first line.
    for name, node in (("server-0.0", "n1"), ("server-1.0", "n4")):
        fake.until(lambda line=f"up {name}-rank0 {node}", name=name: line in fake.log(name))
    fake.until(lambda: all(fake.log(f"trainer-0.0-rank{rank}") for rank in range(4)))
    nodes = [fake.log(f"trainer-0.0-rank{rank}").split()[2] for rank in range(4)]
    assert nodes == ["n2", "n2", "n3", "n3"]
    gpus = {name: fake.log(name).split()[3:4] for name in ("server-0.0", "rollout-0.0", "trainer-0.0-rank3")}
    assert len(gpus["server-0.0"][0].split(",")) == 2 and len(gpus["trainer-0.0-rank3"][0].split(",")) == 2
    assert gpus["rollout-0.0"] == []
    record = load_json(fake.attempt.processes / "supervisor-0.0-rank0.json")
    os.kill(pid_of(record), signal.SIGKILL)
    fake.until(fake.ended)
    assert fake.ended()["exit_code"] == 0, fake.story()
    assert not first & {(one.host, one.pid) for one in fake.alive()}
    assert [row["incarnation"] for row in fake.events("started", "trainer")] == [0, 1]
    assert [row["code"] for row in fake.events("exited", "trainer")] == [0]


def test_servers_and_trainer_in_turn_see_the_same_gpus(fake):
    trainer = unit("trainer", 0, tasks=4, gpus=1)
    servers = [replace(unit("server", index, gpus=2), gpu_offset=2 * index) for index in range(2)]
    units = [*servers, unit("rollout", 0), trainer]
    fake.write({"trainer": ["die", "train"]}, units=units, allocation="sglang:d2t2|fsdp:d4")
    fake.submit(gpus=4)
    fake.until(fake.ended)
    assert fake.ended()["exit_code"] == 0, fake.story()
    gpus = [fake.log(f"{name}-0.{start}-rank0").split()[3] for name in ("trainer",) for start in (0, 1)]
    gpus += [",".join(fake.log(f"server-{index}.0").split()[3] for index in range(2))]
    assert len(gpus[0].split(",")) == 4 and set(gpus) == {gpus[0]}


def test_a_dead_node_costs_its_replica_only(fake):
    fake.write({"trainer": ["train"], "total": 130}, units=UNITS)
    fake.submit(gpus=4)
    fake.until(everybody_up(fake, 7))
    fake.cluster.kill_node("n4")
    fake.until(fake.ended)
    assert fake.ended()["exit_code"] == 0, fake.story()
    assert [row["incarnation"] for row in fake.events("started", "trainer")] == [0]
    ends = {(row["role"], row["index"]): row["code"] for row in fake.events("exited")}
    assert ends["server", 0] == 75 and ends["server", 1] != 75
    assert ends["rollout", 0] == 75


def test_scancel_ends_it_and_a_dead_rank_takes_its_peers(fake, until):
    fake.write({"trainer": ["deaf", "serve"]}, units=UNITS[2:])
    job_id = fake.submit(gpus=4)
    fake.until(everybody_up(fake, 5))
    doomed = next(one for one in fake.alive() if one.role == "trainer" and one.rank == 3)
    os.kill(pid_of(vars(doomed)), signal.SIGKILL)
    fake.until(lambda: len(fake.events("started", "trainer")) == 2)
    assert fake.events("exited", "trainer")[0]["code"] == 137
    fake.until(everybody_up(fake, 9))
    fake.cluster.run("scancel", job_id)
    until(lambda: not fake.cluster.run("squeue", "-h"))
    assert not fake.alive()
    assert fake.ended() is None or fake.ended()["exit_code"] == 75


IDLE = [
    *(replace(unit("server", i, nodes=(1 + i // 2,)), module="idle_server") for i in range(5)),
    replace(unit("rollout"), module="idle_rollout"),
    unit("trainer"),
]


def steps(fake: SlurmFake) -> Counter[tuple[str, str]]:
    """How many steps each role has on each node, as Slurm knows them."""
    rows = fake.cluster.run("squeue", "-h", "--steps", "-o", "%j %N").splitlines()
    found = [(name.partition("-")[0], node) for name, node in map(str.split, rows)]
    return Counter(step for step in found if step[0] in ("serveragent", "rollout", "trainer"))


def counters(fake: SlurmFake) -> dict[str, int]:
    """How often each server has written its lease."""
    leases = open_names(fake.trial).list_leases(keys.servers("rollout"))
    return {key: lease.counter for key, lease in leases.items() if lease.value["state"] in keys.ROUTABLE}


@pytest.mark.timeout(400)
def test_the_servers_of_a_node_are_one_step_that_lives_and_dies_alone(fake):
    fake.write({"trainer": ["serve"]}, units=IDLE)
    write_json(fake.trial.current_weights, {"label": "1.1", "path": "/published"})
    fake.submit()
    fake.until(lambda: len(counters(fake)) == 5 and fake.newest("trainer", 0), 90)
    one_each = {("serveragent", f"n{node}"): 1 for node in (2, 3, 4)} | {
        ("rollout", "n1"): 1,
        ("trainer", "n1"): 1,
    }
    fake.until(lambda: steps(fake) == one_each)
    began, before, written = time.monotonic(), fake.replicas(), counters(fake)

    fake.kill("server", 0)
    new = fake.wait_for_new(before, 0)
    assert [index for index in new if new[index] != before[index]] == [0]
    assert new[0].step == before[1].step and steps(fake) == one_each

    client = ProcessRecord.read(fake.attempt.process_record("server", 0, 0, 0, by_client=True))
    for role, index, record in (("srun", 0, client), ("agent", 2, fake.newest("serveragent", 2))):
        known, pair = fake.replicas(), (index, index + 1)
        os.kill(pid_of(vars(record)), signal.SIGKILL)
        new = fake.wait_for_new(known, *pair)
        assert [i for i in sorted(new) if new[i] != known[i]] == [*pair], role
        fake.until(lambda known=known, pair=pair: not any(is_running(vars(known[i])) for i in pair))
    fake.until(lambda: steps(fake) == one_each)

    # server 4 was left alone all the time: what it wrote was a heartbeat, six times a minute at most
    [key] = [key for key in written if key.endswith("/4")]
    num_beats = counters(fake)[key] - written[key]
    assert num_beats <= (time.monotonic() - began) / 10 + 1
    os.kill(pid_of(vars(fake.newest("supervisor", 0))), signal.SIGKILL)
    fake.wait_for_new(new, *new)
    assert len(fake.events("supervisor_started")) == 2
