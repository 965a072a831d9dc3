"""A thousand and ten thousand nodes: submit, status, supervisor, bad nodes, roster, and the next start.

Calls of Slurm, calls on files, memory and time are counted, with units that do nothing and programs of Slurm
that only answer. Real processes are in benchmarks/cluster_load.py. Limits of CPU time are generous: costs that
grow with the square of the nodes are a hundred times as high, not ten times.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import make_checkpoint, make_python
from patience import extend
from scale_trials import NUM_BAD, measure_apart, measure_load

from hpc_rl.cli.__main__ import main
from hpc_rl.core.errors import ExitCode
from hpc_rl.name_resolve.roster import POLL_S, READS_PER_POLL

SMALL, LARGE = 1_000, 10_000
FACTOR = LARGE / SMALL
# each second: intents, checkpoints, the lease of the trial, metrics, the listing of two folders in each poll
FIXED_PER_MINUTE = 1200


@pytest.fixture(scope="module")
def supervisors(tmp_path_factory) -> dict[int, dict[str, Any]]:
    return {n: measure_apart("supervisor", tmp_path_factory.mktemp(f"n{n}"), n) for n in (SMALL, LARGE)}


@pytest.mark.parametrize(("what", "calls_per_node"), [("start", 4), ("stop", 20)])
def test_a_start_and_a_stop_cost_the_same_for_each_node(supervisors, what, calls_per_node):
    small, large = (supervisors[n][what]["file_calls"] for n in (SMALL, LARGE))
    assert large <= 1.2 * FACTOR * small and large <= calls_per_node * LARGE


def test_a_minute_of_watching_has_a_bound(supervisors):
    """However many servers there are, READS_PER_POLL leases are read in POLL_S."""
    for found in supervisors.values():
        assert found["minute"]["file_calls"] <= FIXED_PER_MINUTE + 60 / POLL_S * READS_PER_POLL
    assert supervisors[LARGE]["minute"]["cpu_s"] <= extend(10.0), "a sixth of a core"


def test_cpu_time_grows_no_faster_than_the_nodes(supervisors):
    small, large = supervisors[SMALL], supervisors[LARGE]
    for what in ("start", "minute", "bad_nodes", "roster", "stop"):
        assert large[what]["cpu_s"] <= 3 * FACTOR * small[what]["cpu_s"] + extend(0.5), what


def test_a_bad_node_costs_the_same_in_every_trial(supervisors):
    small, large = (supervisors[n]["bad_nodes"]["file_calls"] for n in (SMALL, LARGE))
    assert large <= small + 10 and large <= 40 * NUM_BAD


def test_a_roster_is_one_file(supervisors):
    for num_nodes, found in supervisors.items():
        assert found["roster"]["file_calls"] <= 2
        assert found["size"]["roster_mb"] <= 400e-6 * num_nodes
    assert supervisors[LARGE]["roster"]["cpu_s"] <= extend(0.5)


def test_the_memory_of_a_node_is_a_few_kilobytes(supervisors):
    small, large = (supervisors[n]["size"]["memory_mb"] for n in (SMALL, LARGE))
    assert (large - small) / (LARGE - SMALL) <= 0.03


def test_the_next_start_asks_slurm_four_times(tmp_path):
    """Whatever its size: is this the newest start, which nodes are there, requeue, and exclude."""
    found = {}
    for num_nodes in (SMALL, LARGE):
        (tmp_path / str(num_nodes)).mkdir()
        found[num_nodes] = measure_apart("requeue", tmp_path / str(num_nodes), num_nodes)
    small, large = found[SMALL], found[LARGE]
    asked = {"scontrol show": 1, "sinfo -h": 1, "scontrol requeue": 1, "scontrol update": 1}
    assert small["slurm"] == large["slurm"] == asked
    # 5 % of the nodes can be spared
    assert (small["excluded"], large["excluded"]) == (SMALL // 20, NUM_BAD)
    assert large["file_calls"] <= small["file_calls"] + 5 <= 100
    assert large["cpu_s"] <= extend(1.0) and large["memory_mb"] <= small["memory_mb"] + 30


# -- commands

PROGRAMS = {
    "sbatch": "echo 4711",
    "squeue": 'echo "4711|RUNNING|None|2026-01-01T00:00:00"',
    "scontrol": "",
    "sinfo": "",
    "sacct": "",
    "srun": "",
    "scancel": "",
}
CONFIG = """experiment_name: sums
trial_name: {layout}{nodes}
total_train_steps: 10
cluster: {{fileroot: {root}/runs, n_gpus_per_node: 8, n_nodes: {nodes}}}
train_dataset: {{path: {root}/train.jsonl, batch_size: {ranks}}}
actor: {{path: {root}/model}}
gconfig: {{n_samples: 4, max_new_tokens: 4}}
rollout: {{reward_fn: exact_match}}
allocation_mode: sglang:d{servers}t8+fsdp:d{ranks}
recover: {{mode: auto}}
launcher: {{type: slurm, inference_server_python: {root}/python, slurm: {{layout: {layout}}}}}
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch) -> Path:
    """Programs of Slurm that write their names to `calls`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/bash\necho "{name}" >> {tmp_path}/calls\n{body}\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    make_checkpoint(tmp_path / "model")
    make_python(tmp_path / "python", packages={"sglang": "0.5.23"})
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def run(cluster: Path, *argv: str) -> tuple[int, Counter[str], float]:
    """Run a command; return its calls on files, the calls of Slurm, and its CPU seconds."""
    calls = cluster / "calls"
    calls.write_text("")
    with measure_load() as load:
        assert main([*argv]) == ExitCode.DONE
    return load.num_file_calls, Counter(calls.read_text().split()), load.cpu_s


@pytest.mark.parametrize("layout", ["allocation", "jobs"])
def test_submit_and_status_do_not_grow_with_the_nodes(cluster, capsys, layout):
    found = {}
    for nodes in (8, SMALL, LARGE):
        ranks = nodes // 4 * 8
        sizes = {"nodes": nodes, "ranks": ranks, "servers": nodes - nodes // 4}
        (cluster / f"n{nodes}.yaml").write_text(CONFIG.format(root=cluster, layout=layout, **sizes))
        submitted = run(cluster, "submit", str(cluster / f"n{nodes}.yaml"), "--no_check")
        capsys.readouterr()
        shown = run(cluster, "status", f"{layout}{nodes}", "--json")
        assert json.loads(capsys.readouterr().out)["state"] in ("pending", "running")
        found[nodes] = submitted, shown
    few = found[8]
    for nodes, many in found.items():
        # beside sbatch one question, whose answer is kept
        assert many[0][1]["sbatch"] == (1 if layout == "allocation" else 2)
        assert many[0][1].total() - many[0][1]["sbatch"] <= 1
        assert many[1][1] in (Counter(), Counter(squeue=1)), "an answer of some seconds ago is used again"
        for number in (0, 1):
            assert many[number][0] <= few[number][0] + 50
            assert many[number][2] <= few[number][2] + extend(5.0 * nodes / LARGE)
