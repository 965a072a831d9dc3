"""`submit` and `status` of a thousand nodes cost as many calls of Slurm and on files as of ten."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from command_line import make_checkpoint, make_python
from scale_trials import measure_load

from hpc_rl.cli.__main__ import main
from hpc_rl.core.errors import ExitCode

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
trial_name: n{nodes}
total_train_steps: 10
cluster: {{fileroot: {root}/runs, n_gpus_per_node: 8, n_nodes: {nodes}}}
train_dataset: {{path: {root}/train.jsonl, batch_size: {ranks}}}
actor: {{path: {root}/model}}
gconfig: {{n_samples: 4, max_new_tokens: 4}}
rollout: {{reward_fn: exact_match}}
allocation_mode: sglang:d{servers}t8+fsdp:d{ranks}
recover: {{mode: auto}}
launcher: {{type: slurm, inference_server_python: {root}/python}}
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


def test_submit_and_status_do_not_grow_with_the_nodes(cluster, capsys):
    found = {}
    for nodes in (8, 1000):
        ranks = nodes // 4 * 8
        text = CONFIG.format(root=cluster, nodes=nodes, ranks=ranks, servers=nodes - nodes // 4)
        (cluster / f"n{nodes}.yaml").write_text(text)
        submitted = run(cluster, "submit", str(cluster / f"n{nodes}.yaml"), "--no_check")
        capsys.readouterr()
        shown = run(cluster, "status", f"n{nodes}", "--json")
        assert json.loads(capsys.readouterr().out)["state"] in ("pending", "running")
        found[nodes] = submitted, shown
    few, many = found[8], found[1000]
    assert many[0][1]["sbatch"] == few[0][1]["sbatch"] == 1 and many[0][1].total() <= few[0][1].total() <= 2
    assert many[1][1] == few[1][1] == Counter(squeue=1)
    for number in (0, 1):
        assert many[number][0] <= few[number][0] + 50
        assert many[number][2] <= few[number][2] + 5.0
