"""What a real sbatch refuses: its words, exit code 69, and nothing left behind."""

import json
from pathlib import Path

import pytest
from command_line import Shell


@pytest.fixture
def shell(cluster, tmp_path: Path) -> Shell:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 64}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    shell = Shell(tmp_path)
    shell.env |= {name: value for name, value in cluster.client_env.items() if name != "PATH"}
    (shell.here / "grpo.yaml").write_text(
        f"""experiment_name: sums
trial_name: small
total_train_steps: 10
cluster: {{fileroot: {tmp_path / "runs"}, n_gpus_per_node: 0}}
train_dataset: {{path: {tmp_path / "train.jsonl"}}}
actor: {{path: {tmp_path / "model"}}}
gconfig: {{n_samples: 4, max_new_tokens: 4}}
"""
    )
    return shell


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--partition", "nowhere"], "invalid partition specified: nowhere"),
        (["launcher.slurm.mem=900T"], "Memory specification can not be satisfied"),
        (["launcher.slurm.constraint=unobtainium"], "Invalid feature specification"),
    ],
)
def test_sbatch_refuses(shell, cluster, arguments, words):
    message = shell.refused(69, "submit", "--no_check", "--config", "grpo.yaml", *arguments)
    assert message.startswith("hpc-rl: sbatch refused the job: ")
    assert words in message
    assert message.count("\n") == 1
    assert cluster.run("squeue", "-h") == ""
