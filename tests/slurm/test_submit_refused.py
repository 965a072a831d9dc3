"""What a real sbatch refuses: its words, exit code 69, and nothing left behind."""

from pathlib import Path

import pytest
from command_line import Shell, small_trial


@pytest.fixture
def shell(cluster, tmp_path: Path) -> Shell:
    shell = small_trial(tmp_path)
    shell.env |= {name: value for name, value in cluster.client_env.items() if name != "PATH"}
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
